"""`python -m tests.support.nat_matrix` (root) prints which pairs of routers allow a direct
connection: the table of docs/networking.md.

Each pair is two hosts that know only a public relay. A row reports the reachability that each host
determined, whether they met through the relay, whether a hole was punched within a minute, and the
seconds for a request of 1 MiB and its answer over the final path.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

from tests.support.nat_process import NatHost, wait_until
from tests.support.netns import Kind, Topology, missing

PAIRS = [
    ("preserving", "preserving"),
    ("preserving, resets", "preserving"),
    ("preserving, resets", "preserving, resets"),
    ("preserving", "random"),
    ("preserving", "fully-random"),
    ("random", "random"),
    ("fully-random", "fully-random"),
    ("preserving", "none"),
]


def attach(net: Topology, name: str, outside: str, router: str) -> str:
    """Attach a host to the network and return its listen address."""
    kind, _, resets = router.partition(", ")
    if kind == "none":
        net.public(name, outside)
        return f"/ip4/{outside}/tcp/9100"
    assert kind in get_args(Kind)
    net.behind_nat(name, outside, kind, resets=bool(resets))  # type: ignore[arg-type]
    return "/ip4/0.0.0.0/tcp/9100"


def measure(directory: Path, routers: tuple[str, str]) -> str:
    """Measure one pair and return its row."""
    with Topology() as net:
        net.public("relay", "5.5.5.5")
        listen = [
            attach(net, name, f"5.5.5.1{number}", routers[number])
            for number, name in enumerate("ab")
        ]
        relay = NatHost(net, "relay", directory / "relay", listen_addrs=["/ip4/5.5.5.5/tcp/9000"])
        a, b = (
            NatHost(
                net,
                name,
                directory / name,
                listen_addrs=[listen[number]],
                initial_peers=relay.addrs,
            )
            for number, name in enumerate("ab")
        )
        wait_until(lambda: a.sees(b) and b.sees(a), "they meet", 60.0)
        met = a.sees(b)

        def settled() -> bool:
            return a.sees(b) == b.sees(a) == "direct" or any(
                each.do("stat")["nat"]["punch"]["failed"] for each in (a, b)
            )

        wait_until(settled, "punching ends", 60.0)
        time.sleep(3.0)
        end = a.sees(b)
        verdicts = [each.do("stat")["nat"]["reach"]["verdict"] for each in (a, b)]
        seconds = a.do("request", peer=b.peer, bytes=2**20).get("seconds")
        took = "failed" if seconds is None else f"{seconds:.2f} s"
        return (
            f"| {routers[0]} | {routers[1]} | {verdicts[0]}, {verdicts[1]} | {met} | {end} |"
            f" {took} |"
        )


def main() -> None:
    if why := missing():
        sys.exit(why)
    print(
        "| router of A | router of B | found to be | met | in the end | 1 MiB there and back"
        " |\n|---|---|---|---|---|---|"
    )
    for routers in PAIRS if len(sys.argv) < 3 else [tuple(sys.argv[1:3])]:
        with tempfile.TemporaryDirectory() as directory:
            print(measure(Path(directory), routers), flush=True)


if __name__ == "__main__":
    main()

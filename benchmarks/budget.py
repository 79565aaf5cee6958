"""Does a node keep to its bandwidth? `python -m benchmarks.budget`

Three real hosts on loopback, each publishing a group of 125 KB and drawing four every second; the
first has a cap. Real exchange and meter; scored in this process. What is counted are bytes of
streams, all protocols, in both directions.

Goal: no more than the rate and its burst, and the other direction goes on. A pull that is under way
when the budget is spent still comes, and is made up for afterwards.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import trio

from benchmarks import report
from swarmnode.config import NetworkConfig, SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, MODEL, TOKENIZER, Author, swarm_of
from swarmnode.p2p.budget import BURST_BYTES, BURST_SECONDS
from swarmnode.p2p.metering import Meter
from swarmnode.p2p.network import Libp2pNetwork
from swarmnode.rollouts.exchange import RolloutExchange
from swarmnode.rollouts.groups import Draw, GroupRules
from swarmnode.wire.envelope import Credentials
from tests.support.fakes.scorer import InProcessScorer
from tests.support.hosts import hosts

SWARM = swarm_of()
PAUSE_SECONDS = 1.0
DRAWN = 4
CAP = 30_000


@dataclass(frozen=True)
class Result:
    arm: str
    seconds: float
    sent: int
    """Bytes."""
    received: int
    refused: dict[str, int]
    bound: float
    """Bytes that the capped direction may have moved: rate × time + burst."""


async def measure(arm: str, seconds: float) -> Result:
    """`arm`: none, upload or download, the first host's cap."""
    caps = {
        "none": {},
        "upload": {"upload_bytes_per_second": CAP},
        "download": {"download_bytes_per_second": CAP},
    }[arm]
    with tempfile.TemporaryDirectory() as directory:
        async with (
            hosts(Path(directory), 3, swarm=SWARM) as networks,
            trio.open_nursery() as nursery,
        ):
            meters = [
                Meter(
                    NetworkConfig(**(caps if n == 0 else {})),
                    "",
                    Path(directory) / f"meter{n}",
                    traffic(network),
                )
                for n, network in enumerate(networks)
            ]
            for n, (network, meter) in enumerate(zip(networks, meters, strict=True)):
                author = Author(SWARM, seed=n)
                cfg = SharingConfig(groups_per_second=1000)
                credentials = Credentials(author.key, SWARM)
                exchange = RolloutExchange(
                    network,
                    InProcessScorer(),
                    credentials,
                    GroupRules(BUILTIN_TASKS),
                    cfg,
                    budget=meter,
                )
                exchange.set_policy(
                    SimpleNamespace(
                        model=MODEL, tokenizer=TOKENIZER, policy_version=0, tokens_per_text_byte=1.0
                    )
                )
                await nursery.start(exchange.run)
                nursery.start_soon(publish_and_draw, exchange, author)
            started = trio.current_time()
            before = networks[0].statistics().traffic
            await trio.sleep(seconds)
            after, took = networks[0].statistics().traffic, trio.current_time() - started
            nursery.cancel_scope.cancel()
    sent = sum(after.sent.values()) - sum(before.sent.values())
    received = sum(after.received.values()) - sum(before.received.values())
    return Result(
        arm,
        took,
        sent,
        received,
        meters[0].statistics().refused,
        CAP * took + max(CAP * BURST_SECONDS, BURST_BYTES),
    )


def traffic(network: Libp2pNetwork):  # type: ignore[no-untyped-def]
    """Reads the meter of one host."""
    return lambda: network.statistics().traffic


async def publish_and_draw(exchange: RolloutExchange, author: Author) -> None:
    for sequence in itertools.count():
        exchange.publish(author.long_group(sequence))
        exchange.draw(Draw(sequence, DRAWN, 0, DRAWN))
        await trio.sleep(PAUSE_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the time")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["none", "upload", "download"],
        choices=["none", "upload", "download"],
    )
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()
    seconds = options.seconds / 5 if options.quick else options.seconds
    results = [trio.run(measure, arm, seconds) for arm in options.arms]
    print(report.heading("budget: does a node keep to its bandwidth?"))
    rows = [
        [
            r.arm,
            f"{r.seconds:.0f}",
            f"{r.sent / r.seconds / 1000:.1f}",
            f"{r.received / r.seconds / 1000:.1f}",
            "–" if r.arm == "none" else f"{r.bound / r.seconds / 1000:.1f}",
            str(sum(r.refused.values())),
        ]
        for r in results
    ]
    print(
        report.table(
            ["cap", "seconds", "up kB/s", "down kB/s", "rate and burst kB/s", "refusals"], rows
        )
    )
    if options.json:
        report.write_json(options.json, [r.__dict__ for r in results])


if __name__ == "__main__":
    main()

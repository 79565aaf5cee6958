"""The state of a node as lines of text, for `swarmnode status`.

`render` is a pure function of the decoded body of /status.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from swarmnode.errors import Unavailable
from swarmnode.observe.address import NodeAddress
from swarmnode.observe.client import decode_status, fetch_status
from swarmnode.observe.logs import clean_text
from swarmnode.observe.samples import visible

WATCH_SECONDS = 2.0
"""Interval between two requests of `status --watch`."""
NAME_CHARACTERS = 20
MAX_PEERS = 16
OLD_STEPS = 10
"""Age in steps at which a held-out reward is called old."""
Status = Mapping[str, Any]


def fetch(address: NodeAddress, points: int = 0) -> Status:
    """Return the decoded body of /status.

    Raises:
        Unavailable: no node answers, or another one than `address.peer`.
    """
    return decode_status(address, fetch_status(address, points))


def short_id(peer: str) -> str:
    """Return the end of a peer id; the beginning is the same for all peers."""
    return f"…{peer[-6:]}" if len(peer) > 7 else peer


def names_of(s: Status) -> dict[str, str]:
    """Return the names that peers claim, by peer id. Invalid entries are skipped."""
    match s:
        case {"swarm": {"rows": [*rows]}}:
            return {
                row["peer"]: row["name"]
                for row in rows
                if isinstance(row, dict)
                and isinstance(row.get("peer"), str)
                and isinstance(row.get("name"), str)
                and row["name"]
            }
    return {}


def peer_label(peer: str, names: Mapping[str, str]) -> str:
    """Return name and short id, because any peer may claim a name. Without one, more of the id."""
    name = names.get(peer, "")[:NAME_CHARACTERS]
    return one_line(f"{name} {short_id(peer)}" if name else f"{peer[:8]}{short_id(peer)}")


def one_line(text: str) -> str:
    """Return `text` as one line without control, direction and other invisible characters."""
    return visible(clean_text(text))


def number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}".replace(",", "\u202f")


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def render(status: Status) -> str:
    """Return verdict, learning, rollouts, peers and crew as lines.

    Args:
        status: decoded body of /status.
    """
    return "\n".join(map(one_line, _lines(status)))


def _lines(status: Status) -> Iterator[str]:
    s = status["snapshot"]
    node, report, network = s["node"], s["trainer"]["report"] or {}, s["network"]["peers"]
    troubles = [*status["ready"]["reasons"], *status["troubles"]]
    name = node["name"] or node["swarm_name"] or short_id(node["peer"]) or "swarmnode"
    yield f"{name}: {'; '.join(troubles) or 'ready'}"
    yield _joined(
        f"swarm {node['swarm_name']}",
        node["model"],
        report.get("device"),
        _engine(report),
        f"up {duration(max(0.0, s['at'] - node['started_at']))}",
    )
    if node["trainer"]:
        yield progress(s)
        if report:
            restarts = sum(s["supervisor"]["restarts"].values())
            yield f"policy version {number(report['policy_version'])} · restarts {number(restarts)}"
            yield held_out(report)
        yield _recent(s["trainer"]["recent"])
        yield exchanged(s)
    rollouts = s["rollouts"]
    admission = rollouts["admission"]
    yield (
        f"groups: {number(rollouts['published'])} published; of peers"
        f" {number(admission['admitted'])} admitted, {number(rollouts['judged'].get('used', 0))}"
        f" used, {number(sum(admission['ignored'].values()))} ignored,"
        f" {number(sum(admission['rejected'].values()))} rejected,"
        f" {number(rollouts['pool']['groups'])} in the pool"
    )
    swarm, names = s["swarm"], names_of(s)
    median = swarm["reward_median"]
    yield _joined(
        f"peers: {number(network['connected'])} connected, {number(network['known'])} known",
        f"{swarm['reporting']} with a recent summary (claimed)",
        f"median held-out reward {number(median, 3)}" if median is not None else "",
    )
    yield from _peers(s["peers"], names)
    if s["stages"]["enabled"]:
        yield from _crew(s["stages"], node["peer"], names)


def _joined(*parts: str | None) -> str:
    return " · ".join(part for part in parts if part)


def _engine(report: Status) -> str:
    """Return the engine that samples; empty without an inference server."""
    server = report.get("server")
    if not server:
        return ""
    words = f"vLLM {server.get('version')}"
    samples = server.get("state") == "sampling"
    return f"sampled by {words}" if samples else f"own engine; {words.strip()} is away"


def progress(s: Status) -> str:
    """Return in one line what the trainer does, its step, and the time that is left."""
    report = s["trainer"]["report"] or {}
    if not s["trainer"]["connected"]:
        return s["supervisor"]["loading"].get("trainer") or "no trainer"
    step, last = report["step"], report["max_steps"]
    seconds = s["trainer"]["recent"].get("step_seconds")
    left = (last - step) * s["trainer"]["recent"].get("interval_seconds", 0.0) if last else 0
    return _joined(
        f"step {number(step)}" + (f" of {number(last)}" if last else ""),
        f"{number(seconds, 2)} s per step" if seconds is not None else "",
        f"{duration(left)} left" if left > 0 else "",
        report["activity"] or report["phase"],
    )


def held_out(report: Status) -> str:
    """Return the held-out reward with its error, step and age in one line."""
    if report.get("reward_held_out") is None:
        return "held-out reward: not measured yet"
    reward, error, at = (report[f"reward_held_out{end}"] for end in ("", "_error", "_step"))
    behind = report["step"] - at if at is not None else 0
    return (
        f"held-out reward {number(reward, 3)}"
        + (f" ± {number(error, 3)}" if error is not None else "")
        + (f" at step {number(at)}" if at is not None else "")
        + (f", {behind} steps old" if behind >= OLD_STEPS else "")
    )


def _recent(recent: Status) -> str:
    """Return the means of the last steps in one line."""
    return (
        f"reward of own groups {number(recent.get('reward_own'), 3)}, of peers'"
        f" {number(recent.get('reward_external'), 3)} · "
        f"{number(recent.get('tokens_per_second'))} tokens/s"
    )


def exchanged(s: Status) -> str:
    """Return in one line the groups given to peers and used from them."""
    gained = s["gained"]
    saved = gained["tokens_saved"]
    return (
        f"given: {number(gained['given'])} groups used by {gained['given_to']}"
        f" peer{'' if gained['given_to'] == 1 else 's'} (claimed)"
        f" · gained: {number(gained['used'])} groups of peers"
        + (f", about {number(saved)} own tokens saved" if saved else "")
    )


def _peers(peers: Sequence[Status], names: Mapping[str, str]) -> Iterator[str]:
    order = sorted(peers, key=lambda peer: (not peer["direction"], -peer["used"], peer["peer"]))
    heads = ("peer", "link", "admitted", "used", "rejected", "reputation", "seen")
    rows = [
        (
            peer_label(peer["peer"], names),
            peer["direction"] or "–",
            *(number(peer[name]) for name in ("admitted", "used", "rejected")),
            number(peer["reputation"], 2),
            duration(peer["last_seen_seconds"]),
        )
        for peer in order[:MAX_PEERS]
    ]
    if rows:
        yield from _table([heads, *rows])
    if len(order) > MAX_PEERS:
        yield f"  and {len(order) - MAX_PEERS} more"


def _crew(stages: Status, me: str, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the stages in order, with the holder and the state of each."""
    crew, own = stages["crew"], stages["own"] or {}
    if not crew["slots"]:
        yield f"in no crew; other nodes that offer to hold a stage: {crew['offers']}"
        return
    stopped, recovery = crew["stopped_seconds"], crew["recovery_seconds"]
    age = own.get("checkpoint_age_steps")
    yield _joined(
        f"crew {crew['state']}",
        f"no step for {duration(stopped)}" if stopped else "",
        f"recovered in {recovery:.1f} s" if recovery is not None else "",
        f"from {own['source']}" if own.get("source") else "",
        f"checkpoint {age} steps old" if age is not None else "",
    )
    holder = lambda peer: (
        "none" if not peer else "this node" if peer == me else peer_label(peer, names)
    )
    rows = [
        (
            str(slot["stage"]),
            holder(slot["peer"]),
            number(slot["layers"]),
            str(slot["state"]),
            number(slot["step"]),
        )
        for slot in crew["slots"]
    ]
    yield from _table([("stage", "holder", "layers", "state", "step"), *rows])


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        yield "  " + "  ".join(cells).rstrip()


def render_or_fail(status: Status, address: NodeAddress) -> str:
    """Return `render(status)`. Raises `Unavailable` if the node is of another version."""
    try:
        return render(status)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise Unavailable(
            f"the node at {address.url} is of another version ({clean_text(repr(error))}): use the"
            " swarmnode of that version"
        ) from error


def print_status(address: NodeAddress, as_json: bool = False, before: str = "") -> int:
    """Print the state of a node once, after the text `before`.

    Returns:
        The exit code: 0 if the node is ready, otherwise 1.

    Raises:
        Unavailable: the node does not answer.
    """
    status = fetch(address)
    text = json.dumps(status, indent=2) if as_json else render_or_fail(status, address)
    if not as_json and (invite := status["snapshot"]["node"].get("invite")):
        text += "\n" + one_line(f"invite {invite}")
    print(before + text, flush=True)
    return 0 if status["ready"]["ok"] else 1


def watch_status(address: NodeAddress, as_json: bool = False) -> int:
    """Print the state every WATCH_SECONDS until Ctrl-C, on a terminal in place of the last one. If
    the node stops answering, print the error and continue.

    Returns:
        The exit code 0, after Ctrl-C.

    Raises:
        Unavailable: the node does not answer at the start.
    """
    before = "\x1b[2J\x1b[H" if sys.stdout.isatty() else "\n"
    with contextlib.suppress(KeyboardInterrupt):
        print_status(address, as_json)
        while True:
            time.sleep(WATCH_SECONDS)
            try:
                print_status(address, as_json, before)
            except Unavailable as error:
                print(before + one_line(str(error)), flush=True)
    return 0

"""The state of a node in the terminal, for `swarmnode status` and `swarmnode top`.

`render` is a pure function of the decoded body of /status. This module imports neither torch nor
libp2p.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from swarmnode.errors import Unavailable
from swarmnode.observe.address import NodeAddress
from swarmnode.observe.client import decode_status, fetch_status
from swarmnode.observe.logs import clean_text
from swarmnode.observe.samples import visible

BARS = "▁▂▃▄▅▆▇█"
POLL_SECONDS = 1.0
"""Interval between two requests of `top`."""
SPARK_WIDTH = 28
NAME_WIDTH = 20
MAX_ROWS = 64
OLD_STEPS = 10
"""Age in steps at which a held-out reward is called old."""
Status = Mapping[str, Any]


def fetch(address: NodeAddress, points: int = 120) -> Status:
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


def peer_label(peer: str, names: Mapping[str, str]) -> Text:
    """Return name and short id, because any peer may claim a name. Without one, more of the id."""
    name = names.get(peer, "")[:NAME_WIDTH]
    return text(f"{name} {short_id(peer)}" if name else f"{peer[:8]}{short_id(peer)}")


def text(value: object, style: str = "") -> Text:
    """Return a text without markup and control characters, for texts of peers and servers."""
    return Text(one_line(value), style=style, no_wrap=True, overflow="ellipsis")


def one_line(value: object) -> str:
    """Return `value` as one line without control, direction and other invisible characters."""
    return visible(clean_text(str(value)))


def number(value: float | None, digits: int = 0, unit: str = "") -> str:
    return (
        "–"
        if value is None
        else f"{value:,.{digits}f}".replace(",", "\u202f") + (f" {unit}" if unit else "")
    )


def sparkline(values: list[float | None], width: int = SPARK_WIDTH) -> str:
    """Return a line of `width` bars from the lowest to the highest value, with gaps for None."""
    shown = (
        values
        if len(values) <= width
        else [values[(i + 1) * len(values) // width - 1] for i in range(width)]
    )
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    level = lambda value: round((value - low) / (high - low) * (len(BARS) - 1)) if high > low else 0
    return "".join(" " if value is None else BARS[level(value)] for value in shown)


class Spark:
    """A sparkline that fills the available width."""

    def __init__(self, values: list[float | None]) -> None:
        self._values = [
            value if isinstance(value, int | float) and math.isfinite(value) else None
            for value in values
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(
            sparkline(self._values, min(SPARK_WIDTH, options.max_width)), style="cyan", no_wrap=True
        )

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, SPARK_WIDTH)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


class Fitting:
    """A table without its last columns where the terminal is too narrow for all.

    Args:
        make: Number of columns → table.
    """

    def __init__(self, make: Callable[[int], Table], columns: int) -> None:
        self._make = make
        self._columns = columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=1000)
        tables = (self._make(count) for count in range(self._columns, 1, -1))
        width = lambda table: Measurement.get(console, wide, table).maximum
        yield next((t for t in tables if width(t) <= options.max_width), self._make(1))


def progress(s: Status) -> str:
    """Return in one line what the trainer does, its step, and the time that is left."""
    report = s["trainer"]["report"] or {}
    if not s["trainer"]["connected"]:
        return s["supervisor"]["loading"].get("trainer") or "no trainer"
    step, last = report["step"], report["max_steps"]
    seconds = s["trainer"]["recent"].get("step_seconds")
    left = (last - step) * s["trainer"]["recent"].get("interval_seconds", 0.0) if last else 0
    parts = [
        f"step {number(step)}" + (f" of {number(last)}" if last else ""),
        f"{number(seconds, 2)} s per step" if seconds is not None else "",
        f"{duration(left)} left" if left > 0 else "",
        report["activity"] or report["phase"],
    ]
    return " · ".join(part for part in parts if part)


def held_out(report: Status) -> str:
    """Return the held-out reward with its error, step and age in one line; empty without one."""
    if report.get("reward_held_out") is None:
        return "held-out reward: not measured yet" if report else ""
    reward, error, at = (report[f"reward_held_out{end}"] for end in ("", "_error", "_step"))
    behind = report["step"] - at if at is not None else 0
    return (
        f"held-out reward {number(reward, 3)}"
        + (f" ± {number(error, 3)}" if error is not None else "")
        + (f" at step {number(at)}" if at is not None else "")
        + (f", {behind} steps old" if behind >= OLD_STEPS else "")
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


def render(status: Status) -> RenderableType:
    """Return a panel with verdict, learning, rollouts, peers, crew, and the claims of peers.

    Args:
        status: decoded body of /status.
    """
    s = status["snapshot"]
    node, report = s["node"], s["trainer"]["report"] or {}
    troubles = [*status["ready"]["reasons"], *status["troubles"]]
    verdict = (
        text("ready", "green")
        if not troubles
        else text("; ".join(troubles), "yellow" if status["ready"]["ok"] else "red")
    )
    title = one_line(node["name"] or node["swarm_name"] or short_id(node["peer"]) or "swarmnode")
    facts = [
        f"swarm {node['swarm_name']}",
        node["model"],
        report.get("device"),
        _engine(report),
        f"up {duration(max(0.0, s['at'] - node['started_at']))}",
    ]
    head = Text.assemble(
        verdict, "   ", text(" · ".join(str(fact) for fact in facts if fact), "dim")
    )
    names = names_of(s)
    lines = [one_line(each) for each in (progress(s), held_out(report), exchanged(s))]
    parts: list[RenderableType] = [
        head,
        "",
        *([*filter(None, lines), ""] if node["trainer"] else []),
        _learning(s, report, status.get("history") or {}),
        "",
        _peers(s["peers"], names),
    ]
    if s["stages"]["enabled"]:
        parts += ["", _crew(s["stages"], node["peer"], names)]
    if s["swarm"]["rows"]:
        parts += ["", _swarm(s["swarm"])]
    body = Group(*parts)
    return Panel(
        body,
        title=Text(title, style="bold"),
        title_align="left",
        border_style="dim",
        padding=(0, 1),
    )


def _engine(report: Mapping[str, Any]) -> str:
    """Return the engine that samples; empty without an inference server."""
    server = report.get("server")
    if not server:
        return ""
    samples = server.get("state") == "sampling"
    words = f"vLLM {server.get('version')}"
    return f"sampled by {words}" if samples else f"own engine; {words.strip()} is away"


def _learning(s: Status, report: Status, history: Status) -> Table:
    rollouts, admission, pool = s["rollouts"], s["rollouts"]["admission"], s["rollouts"]["pool"]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, style="cyan", ratio=1)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    past = lambda column: Spark(history.get(column) or [])
    connected = s["trainer"]["connected"]
    recent = s["trainer"]["recent"] if connected else {}
    restarts = sum(s["supervisor"]["restarts"].values())
    rejected, ignored = sum(admission["rejected"].values()), sum(admission["ignored"].values())
    used = rollouts["judged"].get("used", 0)
    polled = text(f"polls {rollouts['pulling']['polled']} peers", "dim")
    rows: list[tuple[str, str, RenderableType, str, str]] = [
        (
            "reward held-out",
            number(report.get("reward_held_out"), 3),
            past("reward_held_out"),
            "published",
            number(rollouts["published"]),
        ),
        (
            "reward own",
            number(recent.get("reward_own"), 3),
            past("reward_own"),
            "admitted",
            number(admission["admitted"]),
        ),
        (
            "reward peers'",
            number(recent.get("reward_external"), 3),
            past("reward_external"),
            "used",
            number(used),
        ),
        (
            "policy version",
            number(report.get("policy_version")),
            past("policy_version"),
            "ignored",
            number(ignored),
        ),
        (
            "step",
            number(recent.get("step_seconds"), 2, "s"),
            past("step_seconds"),
            "rejected",
            number(rejected),
        ),
        (
            "tokens/s",
            number(recent.get("tokens_per_second")),
            polled,
            "pool",
            number(pool["groups"]),
        ),
        (
            "peers",
            number(s["network"]["peers"]["connected"]),
            past("peers"),
            "restarts",
            number(restarts),
        ),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _peers(peers: list[Status], names: Mapping[str, str]) -> RenderableType:
    if not peers:
        return text("no peers yet", "dim")
    order = sorted(peers, key=lambda peer: (not peer["direction"], -peer["used"], peer["peer"]))
    rows: list[tuple[RenderableType, ...]] = [
        (
            peer_label(peer["peer"], names),
            text(peer["direction"] or "–"),
            *(number(peer[name]) for name in ("admitted", "used", "rejected")),
            number(peer["reputation"], 2),
            duration(peer["last_seen_seconds"]),
        )
        for peer in order[:MAX_ROWS]
    ]
    styles = [
        "dim" if not p["direction"] else "yellow" if p["reputation"] < 0 else "" for p in order
    ]
    heads = ("peer", "link", "admitted", "used", "rejected", "reputation", "seen")
    return _table(heads, ("peer", "link"), rows, styles, len(order))


def _table(
    heads: Sequence[str],
    left: Collection[str],
    rows: Sequence[Sequence[RenderableType]],
    styles: Sequence[str],
    count: int,
) -> Fitting:
    """Return a table with at most MAX_ROWS rows.

    Args:
        left: Columns that are aligned to the left.
        styles: Style of each row.
        count: Number of all rows.
    """

    def make(columns: int) -> Table:
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        for head in heads[:columns]:
            table.add_column(head, justify="left" if head in left else "right", no_wrap=True)
        for row, style in zip(rows, styles, strict=False):
            table.add_row(*row[:columns], style=style)
        if count > MAX_ROWS:
            table.add_row(text(f"and {count - MAX_ROWS} more", "dim"))
        return table

    return Fitting(make, len(heads))


SLOT_STYLES = {
    "active": "green",
    "failed": "red",
    "loading": "yellow",
}


def _crew(stages: Status, me: str, names: Mapping[str, str]) -> RenderableType:
    """Return the stages in order, with the holder and the state of each."""
    crew, own = stages["crew"], stages["own"] or {}
    if not crew["slots"]:
        return text(
            f"in no crew; other nodes that offer to hold a stage: {crew['offers']}",
            "dim",
        )
    facts = [
        f"crew {crew['state']}",
        (f"no step for {duration(crew['stopped_seconds'])}" if crew["stopped_seconds"] else ""),
        (
            f"recovered in {crew['recovery_seconds']:.1f} s"
            if crew["recovery_seconds"] is not None
            else ""
        ),
        f"from {own['source']}" if own.get("source") else "",
        (
            f"checkpoint {own['checkpoint_age_steps']} steps old"
            if own.get("checkpoint_age_steps") is not None
            else ""
        ),
    ]
    is_running = crew["state"] == "running"
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("stage", "holder", "layers", "state", "step"):
        table.add_column(
            name, justify="right" if name in ("layers", "step") else "left", no_wrap=True
        )
    for slot in crew["slots"]:
        holder = (
            text("none")
            if not slot["peer"]
            else text("this node")
            if slot["peer"] == me
            else peer_label(slot["peer"], names)
        )
        state = text(slot["state"], SLOT_STYLES.get(slot["state"], ""))
        table.add_row(
            text(slot["stage"]), holder, number(slot["layers"]), state, number(slot["step"])
        )
    line = one_line(" · ".join(fact for fact in facts if fact))
    return Group(Text(line, "" if is_running else "yellow"), table)


def _swarm(swarm: Status) -> RenderableType:
    """Return the summaries of peers."""
    median = (
        f", median held-out {number(swarm['reward_median'], 3)}"
        if swarm["reward_median"] is not None
        else ""
    )
    nodes = "1 node" if swarm["reporting"] == 1 else f"{swarm['reporting']} nodes"
    line = f"swarm: {nodes} with a recent summary (claimed){median}"
    rows: list[tuple[RenderableType, ...]] = [
        (
            text(row["name"] or "–"),
            text(short_id(row["peer"])),
            number(row["step"]),
            number(row["reward"], 3) + (f" at {row['reward_step']}" if row["reward"] else ""),
            number(row["published"]),
            number(row["peers"]),
            duration(row["age_seconds"]),
        )
        for row in swarm["rows"][:MAX_ROWS]
    ]
    styles = ["" if row["direct"] else "dim" for row in swarm["rows"]]
    heads = ("name", "peer", "step", "held-out", "published", "peers", "age")
    table = _table(heads, ("name", "peer"), rows, styles, len(swarm["rows"]))
    return Group(Text(one_line(line), "dim"), table)


def render_or_fail(status: Status, address: NodeAddress) -> RenderableType:
    """Return `render(status)`. Raises `Unavailable` if the node is of another version."""
    try:
        return render(status)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise Unavailable(
            f"the node at {address.url} is of another version ({clean_text(repr(error))}): use the"
            " swarmnode of that version"
        ) from error


def status_command(address: NodeAddress, as_json: bool = False) -> int:
    """Print the state of a node once.

    Returns:
        The exit code: 0 if the node is ready, otherwise 1.

    Raises:
        Unavailable: the node does not answer.
    """
    status = fetch(address, points=0 if as_json else 120)
    if as_json:
        print(json.dumps(status, indent=2))
    else:
        console = Console()
        console.print(render_or_fail(status, address))
        if invite := status["snapshot"]["node"].get("invite"):  # in one piece, to copy it
            console.print(Text(f"invite {one_line(invite)}"), soft_wrap=True)
    return 0 if status["ready"]["ok"] else 1


def top_command(address: NodeAddress) -> None:
    """Show the node until Ctrl-C, updated every POLL_SECONDS. Lines below the terminal's last one
    are cut. Without a terminal, print the state once.

    If the node stops answering, the last state stays with an error, and requests continue.

    Raises:
        Unavailable: the node does not answer at the start.
    """
    last, console = render_or_fail(fetch(address), address), Console()
    if not console.is_terminal:
        console.print(last)
        return
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(last, console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            time.sleep(POLL_SECONDS)
            try:
                shown = last = render_or_fail(fetch(address), address)
            except Unavailable as error:
                shown = Group(text(str(error), "red"), last)
            live.update(shown, refresh=True)

"""The status page in a real Chromium: its rendering, its handling of hostile names, and its network
requests."""

from __future__ import annotations

import html
import math
import re
from pathlib import Path

import msgspec
import pytest

from swarmnode.drops import DropCounts
from swarmnode.observe import http
from swarmnode.observe.history import History
from swarmnode.observe.logfile import LogLine
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.observe.watch import DiskStatistics
from swarmnode.p2p.autonat import ReachStatistics
from swarmnode.p2p.budget import TrafficStatistics
from swarmnode.p2p.nat import NatStatistics
from swarmnode.p2p.network import NetworkStatistics
from swarmnode.p2p.punch import PunchStatistics
from swarmnode.p2p.summaries import ClaimStatistics, SummaryStatistics
from swarmnode.rollouts.network.admission import AdmissionStatistics
from swarmnode.stages.crew_messages import StageStatus
from swarmnode.stages.network.crew_service import StagesStatistics
from swarmnode.stages.network.crew_state import CrewStatistics, MemberStatistics
from swarmnode.stages.network.stream_proxy import StreamProxyStatistics
from swarmnode.weights.network.swaps import WeightsStatistics
from tests.support.browser import CHROMIUM, Tab, status_page
from tests.support.snapshots import PEERS, STARTED_AT, example

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]
REQUESTS = {"/", "/app.js", "/style.css", "/icon.svg", "/samples", "/status?points=360"}


class Visit:
    """The content of a tab."""

    def __init__(self, dom: str, tab: Tab, origin: str) -> None:
        self.dom = dom
        self.text = html.unescape(re.sub(r"<[^>]+>", " ", dom))
        self.errors = tab.errors
        self.requests = {url.removeprefix(origin) for url in tab.requests}

    def path(self, series: str) -> str:
        """Return the points of one line as the browser has them."""
        found = re.search(rf'<path class="line [^"]*" d="([^"]*)" data-series="{series}"', self.dom)
        return found.group(1) if found else ""


async def visit(tmp_path: Path, snapshot=example, shown: str = "true", **options) -> Visit:
    """Visit the page of a node until `shown` holds in it."""
    async with status_page(tmp_path, snapshot, **options) as tab:
        await tab.until(
            f"({shown}) && performance.getEntriesByType('resource').some((each) =>"
            " each.name.endsWith('/samples'))"
        )
        dom, origin = await tab.js("[document.documentElement.outerHTML, location.origin]")
        return Visit(dom, tab, origin)


async def test_page_shows_the_snapshot(tmp_path) -> None:
    seen = await visit(tmp_path)
    for series in (
        "reward_own",
        "reward_external",
        "reward_held_out",
        "peers",
        "policy_version",
        "step_seconds",
        "memory_trainer",
        "completion_tokens",
        "completion_tokens_p95",
        "completion_cut_share",
        "zero_advantage_share",
        "entropy",
        "grad_norm",
        "tokens_per_second",
    ):
        assert seen.path(series).count("L") > 100, series
    assert "NaN" not in seen.dom
    for series in (
        "admitted",
        "ignored",
        "rejected",
        "bytes_in",
        "bytes_out",
        "cpu_network",
        "cpu_trainer",
    ):
        assert seen.dom.count(f'data-series="{series}"') > 3, series
    for value in (
        "0.631",
        "±0.021",
        "+0.561 since the start",
        "kitchen-3090",
        "ready",
        "swarm local",
        "seed",
    ):
        assert value in seen.text, value
    for peer in PEERS:
        assert f"{peer[:8]}…{peer[-6:]}" in seen.text
    assert 'aria-label="Reward: own 0.659, peers\' 0.654, held-out 0.631"' in html.unescape(
        seen.dom
    ).replace("&#39;", "'")
    assert seen.errors == []
    assert seen.requests == REQUESTS


async def test_page_shows_swarm_exchanges_and_resource_use(tmp_path) -> None:
    seen = await visit(tmp_path, width=390)
    text = re.sub(r"\s+", " ", seen.text)
    assert (
        "Swarm (claimed, not verified) 4 nodes with a recent summary; the median of their held-out"
        " rewards is 0.567." in text
    )
    for value in (
        "attic",
        "Küche 2",
        "gpu-box-7",
        "0.624",
        "received through another peer",
        "5, 4 fragments",
        "distance 2.1 %, 97 % of the difference taken",
        "accepted 16, clipped 2",
        "applied done 16",
        "busy no partner 6",
        "failed no effect 2",
        "96.0 MiB, 24 s of CPU",
        "212.0 GiB free of 476.0 GiB",
        "Example GPU, 20.0 GiB of 24.0 GiB free, 3.0 GiB held by this node",
        "/swarmnode/groups/1 4.5 MiB",
        "of 186.3 GiB",
        "0.4 s ahead of most peers'",
        "special ids own, not shared",
    ):
        assert value in (text if value != "received through another peer" else seen.dom), value
    assert seen.errors == []


def recovering() -> NodeSnapshot:
    """The trainer of stage 2 is gone, and a node without a name loads stage 1."""
    s = example()
    states = ("active", "loading", "failed", "active")
    slots = [
        msgspec.structs.replace(slot, state=state)
        for slot, state in zip(s.stages.crew.slots, states, strict=True)
    ]
    slots[1] = msgspec.structs.replace(slots[1], peer=PEERS[2])
    crew = msgspec.structs.replace(
        s.stages.crew, state="preparing", slots=tuple(slots), stopped_seconds=42.0
    )
    return msgspec.structs.replace(s, stages=msgspec.structs.replace(s.stages, crew=crew))


@pytest.mark.parametrize("width", [1280, 390])
async def test_crew_is_drawn_by_stage_with_colour_and_word(tmp_path, width) -> None:
    seen = await visit(tmp_path, recovering, width=width)
    text = re.sub(r"\s+", " ", seen.text)
    short = lambda peer: f"{peer[:8]}…{peer[-6:]}"
    assert (
        f"Stage 0 · head this node active 4 layers, step 250 Stage 1 {short(PEERS[2])} loading 6"
        f" layers, step 250 Stage 2 Küche 2 {short(PEERS[1])} failed 6 layers, step 250 Stage 3 ·"
        f" last gpu-box-7 {short(PEERS[3])} active 4 layers, step 250" in text
    )
    assert re.findall(r'<li class="(\w*)" data-stage="(\d)"', seen.dom) == [
        ("good", "0"),
        ("warn", "1"),
        ("bad", "2"),
        ("good", "3"),
    ]
    for value in (
        "Preparing; no step for 42 s; 1 other node offers to hold a stage.",
        "another member's checkpoint, in 2.1 s",
        "of step 240, 10 steps old",
        "a policy copy, 1 steps old, last refresh ",
        "6.4 s",
        "broken 1",
        "crew 14, step 3",
        "the crew has taken no step for 42 s",
        "only through relays",
        "reachable through 2",
        "succeeded 3, failed 1",
    ):
        assert value in text, value
    assert seen.errors == []


async def test_page_shows_no_crew_for_a_whole_policy(tmp_path) -> None:
    seen = await visit(
        tmp_path, lambda: msgspec.structs.replace(example(), stages=StagesStatistics())
    )
    assert re.search(r'id="crew-card"[^>]*hidden', seen.dom)
    waiting = StagesStatistics(
        enabled=True, crew=CrewStatistics(offers=2), last_reason="12D3KooW is gone"
    )
    (tmp_path / "again").mkdir()
    seen = await visit(
        tmp_path / "again", lambda: msgspec.structs.replace(example(), stages=waiting)
    )
    line = "In no crew; 2 other nodes offer to hold a stage; 12D3KooW is gone."
    assert line in seen.text
    assert not re.search(r'id="crew-card"[^>]*hidden', seen.dom)


async def test_page_shows_used_budget_and_full_disk(tmp_path) -> None:
    s = example()
    budget = msgspec.structs.replace(
        s.budget,
        paused={"quiet_hours": True, "month": True, "download": False},
        level_bytes={"out": -2048.0},
    )
    swarm, disk = SummaryStatistics(clock_offset_seconds=95.0), DiskStatistics(2**29, 2**38)
    node = msgspec.structs.replace(
        s.node, invite="/dns4/example.org/tcp/9512/p2p/12D3KooWx/swarm/ab12"
    )
    poor = msgspec.structs.replace(
        s, node=node, budget=budget, disk=disk, weights=WeightsStatistics(), swarm=swarm
    )
    seen = await visit(tmp_path, lambda: poor)
    for value in (
        "quiet hours, month",
        "out -2.0 KiB",
        "512.0 MiB free of 256.0 GiB",
        "the disk of the data directory has 512 MiB left",
    ):
        assert value in seen.text, value
    assert "this clock is 95 s behind those of most peers" in seen.text
    assert "No summaries yet." in seen.text
    assert 'data-state="paused"' in seen.dom
    assert "/dns4/example.org/tcp/9512/p2p/12D3KooWx/swarm/ab12" in seen.text
    assert re.search(r'id="no-weights"[^>]*>', seen.dom).group(0).count("hidden") == 0
    assert seen.errors == []


async def test_hostile_strings_are_inert(tmp_path) -> None:
    evil = (
        '"><script>document.title="owned"</script><img src="http://evil.example/x"'
        " onerror=\"document.title='owned'\">"
    )
    s = example()
    snapshot = msgspec.structs.replace(
        s,
        node=msgspec.structs.replace(
            s.node, name=evil, swarm_name=evil, model=evil, tasks=[evil], addrs=[evil]
        ),
        peers=[msgspec.structs.replace(s.peers[0], peer=evil[:64], direction=evil)],
        logs=[LogLine(s.at, evil, evil, evil)],
        swarm=SummaryStatistics(
            reporting=1, rows=[ClaimStatistics(peer=evil[:64], name=evil, version=evil)]
        ),
        stages=StagesStatistics(
            enabled=True,
            last_reason=evil,
            events={evil: 1},
            streams=StreamProxyStatistics(received={evil: 1}, sent={evil: 2}),
            crew=CrewStatistics(
                evil,
                evil,
                0,
                (
                    MemberStatistics(0, evil, evil, 0, 1),
                    MemberStatistics(1, evil[:64], "active", 0, 1),
                ),
            ),
            own=StageStatus(b"", 0, evil, source=evil, reason=evil, dropped={evil: 1}),
        ),
        weights=WeightsStatistics(
            enabled=True, phase=evil, outcomes={evil: 3}, judged={evil: 1}, pairs={evil: 2}
        ),
        network=NetworkStatistics(
            traffic=TrafficStatistics({evil: 1}, {evil: 2}),
            nat=NatStatistics(reach=ReachStatistics(verdict=evil), punch=PunchStatistics(1)),
        ),
        rollouts=msgspec.structs.replace(
            s.rollouts, admission=AdmissionStatistics(rejected={evil: 7}), unpublished={evil: 1}
        ),
        trainer=msgspec.structs.replace(
            s.trainer,
            report=msgspec.structs.replace(s.trainer.report, phase=evil, device=evil),
        ),
    )
    seen = await visit(tmp_path, lambda: snapshot, width=390)
    assert evil in seen.text
    assert re.findall(r"<script[^>]*>", seen.dom) == ['<script src="/app.js" defer="">']
    assert "<img" not in seen.dom
    assert not re.search(r"<title>owned", seen.dom)
    assert seen.errors == []
    assert seen.requests == REQUESTS


async def test_page_works_before_the_node_is_ready(tmp_path) -> None:
    empty = NodeSnapshot()
    node = msgspec.structs.replace(empty.node, swarm_name="evening")
    snapshot = msgspec.structs.replace(empty, node=node)
    seen = await visit(tmp_path, lambda: snapshot, history=History)
    assert "<title>evening · swarmnode</title>" in seen.dom
    assert "nothing measured yet" in seen.text
    assert "the policy is not loaded yet" in seen.text
    assert "No peers yet." in seen.text
    assert seen.errors == []


async def test_page_reports_a_node_that_stops_answering(tmp_path, monkeypatch) -> None:
    asked = 0

    def dying() -> NodeSnapshot:
        nonlocal asked
        asked += 1
        if asked > 2:  # the first point of the history and the first poll
            raise RuntimeError("gone")
        return example()

    monkeypatch.setattr(http, "TICK_SECONDS", math.inf)
    monkeypatch.setattr(http, "CACHE_SECONDS", 0.0)
    seen = await visit(tmp_path, dying, "document.body.dataset.state === 'stale'")
    assert "The node has not answered for" in seen.text
    assert "0.631" in seen.text


async def test_held_out_curve_has_an_error_band(tmp_path) -> None:
    seen = await visit(tmp_path)
    band = re.search(r'<path class="area band held-out" d="M([^"]+)Z"', seen.dom)
    assert band is not None
    heights = [float(point.split(" ")[1]) for point in band[1].split("L")]
    half = len(heights) // 2
    over, under = heights[:half], heights[half:][::-1]
    line = [float(point.split(" ")[1]) for point in seen.path("reward_held_out")[1:].split("L")]
    assert len(line) == half
    assert all(a < at < b for a, at, b in zip(over, line, under, strict=True))


async def test_page_says_step_age_and_warnings(tmp_path) -> None:
    def old() -> NodeSnapshot:
        s = example()
        report = msgspec.structs.replace(s.trainer.report, reward_held_out_step=160)
        quiet = [msgspec.structs.replace(line, level="info") for line in s.logs]
        trainer = msgspec.structs.replace(s.trainer, report=report)
        return msgspec.structs.replace(s, trainer=trainer, logs=quiet)

    def before_a_successor(s: NodeSnapshot) -> NodeSnapshot:
        """Let the tasks change in the middle of the history."""
        early = s.at < STARTED_AT + 450
        return (
            msgspec.structs.replace(s, node=msgspec.structs.replace(s.node, swarm="0" * 64))
            if early
            else s
        )

    seen = await visit(tmp_path, old, change=before_a_successor)
    shown = re.sub(r"\s+", " ", seen.text)
    for expected in (
        "at step 160, 90 steps old",
        "Step 250 of 1000 2.40 s per step, 30 min left",
        "own 0.659",
        "401 groups of this node, used by 2 peers, as they report",
        "803 groups of peers, used in training",
        "0.567 at step 250",
        "Warnings",
        "reason=seed",
    ):
        assert expected in shown, expected
    (mark,) = re.findall(r'<line class="mark" x1="([\d.]+)"', seen.dom)
    line = [float(point.split(" ")[0]) for point in seen.path("reward_held_out")[1:].split("L")]
    assert line[0] < float(mark) < line[-1]
    assert seen.errors == []


async def test_page_reports_an_unchanged_policy(tmp_path) -> None:
    def stuck() -> NodeSnapshot:
        s = example()
        since = {"not_finite": 9}
        drops = {"update": DropCounts(0, since, since)}
        report = msgspec.structs.replace(s.trainer.report, drops=drops)
        return msgspec.structs.replace(s, trainer=msgspec.structs.replace(s.trainer, report=report))

    seen = await visit(tmp_path, stuck)
    assert "needs a look" in seen.text
    assert "the policy has not changed for 9 steps: the gradient is not finite" in seen.text

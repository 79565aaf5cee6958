"""The status page in a real Chromium: its rendering, its handling of hostile names, and its network
requests."""

from __future__ import annotations

import html
import math
import re
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from swarmnode.drops import DropCounts
from swarmnode.observe import http
from swarmnode.observe.history import History
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.observe.watch import DiskStatistics
from swarmnode.p2p.summaries import SummaryStatistics
from swarmnode.stages.network.crew_service import StagesStatistics
from swarmnode.stages.network.crew_state import CrewStatistics
from swarmnode.weights.network.swaps import WeightsStatistics
from tests.support.browser import CHROMIUM, Tab, status_page
from tests.support.snapshots import PEERS, STARTED_AT, example

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]
REQUESTS = {"/", "/app.js", "/style.css", "/icon.svg", "/samples", "/status?points=360"}


LINES = """reward_own reward_external reward_held_out peers policy_version step_seconds grad_norm
completion_tokens completion_tokens_p95 completion_cut_share zero_advantage_share entropy
memory_trainer tokens_per_second"""
AREAS = "admitted ignored rejected bytes_in bytes_out cpu_network cpu_trainer"
SHOWN = [
    *("0.631", "±0.021", "+0.561 since the start", "kitchen-3090", "ready", "swarm local", "seed"),
    "Swarm (claimed, not verified) 4 nodes with a recent summary; the median of their held-out"
    " rewards is 0.567.",
    *("attic", "Küche 2", "gpu-box-7", "0.624", "5, 4 fragments", "of 186.3 GiB"),
    "distance 2.1 %",
    *("accepted 16, lagging 2", "applied done 16", "busy no partner 6", "failed no effect 2"),
    *("96.0 MiB, 24 s of CPU", "212.0 GiB free of 476.0 GiB", "/swarmnode/groups/1 4.5 MiB"),
    "Example GPU, 20.0 GiB of 24.0 GiB free, 3.0 GiB held by this node",
    *("0.4 s ahead of most peers'", "special ids own, not shared"),
]


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
    for series in LINES.split():
        assert seen.path(series).count("L") > 100, series
        assert seen.path(series).count("M") == 1, "no gap"
    assert "NaN" not in seen.dom
    for series in AREAS.split():
        assert seen.dom.count(f'data-series="{series}"') > 3, series
    text = re.sub(r"\s+", " ", seen.text)
    for value in SHOWN:
        assert value in text, value
    assert "received through another peer" in seen.dom
    for peer in PEERS:
        assert f"{peer[:8]}…{peer[-6:]}" in seen.text
    assert 'aria-label="Reward: own 0.659, peers\' 0.654, held-out 0.631"' in html.unescape(
        seen.dom
    ).replace("&#39;", "'")
    band = re.search(r'<path class="area band held-out" d="M([^"]+)Z"', seen.dom)
    assert band is not None
    heights = [float(point.split(" ")[1]) for point in band[1].split("L")]
    half = len(heights) // 2
    over, under = heights[:half], heights[half:][::-1]
    line = [float(point.split(" ")[1]) for point in seen.path("reward_held_out")[1:].split("L")]
    assert all(a < at < b for a, at, b in zip(over, line, under, strict=True))
    assert seen.errors == []
    assert seen.requests == REQUESTS


def recovering() -> NodeSnapshot:
    """The trainer of stage 2 is gone, and a node without a name loads stage 1."""
    s = example()
    states = ("active", "loading", "failed", "active")
    slots = [
        replace(slot, state=state) for slot, state in zip(s.stages.crew.slots, states, strict=True)
    ]
    slots[1] = replace(slots[1], peer=PEERS[2])
    crew = replace(s.stages.crew, state="preparing", slots=tuple(slots), stopped_seconds=42.0)
    return replace(s, stages=replace(s.stages, crew=crew))


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
    crew = CrewStatistics(offers=2)
    waiting = StagesStatistics(enabled=True, crew=crew, last_reason="12D3KooW is gone")
    line = "In no crew; 2 other nodes offer to hold a stage; 12D3KooW is gone."
    for name, stages in (("whole", StagesStatistics()), ("waiting", waiting)):
        (tmp_path / name).mkdir()
        snapshot = replace(example(), stages=stages)
        seen = await visit(tmp_path / name, lambda snapshot=snapshot: snapshot)
        assert bool(re.search(r'id="crew-card"[^>]*hidden', seen.dom)) == (name == "whole")
        assert (line in seen.text) == (name == "waiting")


async def test_page_shows_used_budget_and_full_disk(tmp_path) -> None:
    s = example()
    paused = {"quiet_hours": True, "month": True, "download": False}
    budget = replace(s.budget, paused=paused, level_bytes={"out": -2048.0})
    node = replace(s.node, invite="/dns4/example.org/tcp/9512/p2p/12D3KooWx/swarm/ab12")
    poor = replace(s, node=node, budget=budget, disk=DiskStatistics(2**29, 2**38))
    swarm = SummaryStatistics(clock_offset_seconds=95.0)
    poor = replace(poor, weights=WeightsStatistics(), swarm=swarm)
    seen = await visit(tmp_path, lambda: poor)
    for value in (
        "quiet hours, month",
        "out -2.0 KiB",
        "512.0 MiB free of 256.0 GiB",
        "the disk of the data directory has 512 MiB left",
        "this clock is 95 s behind those of most peers",
        "No summaries yet.",
        node.invite,
    ):
        assert value in seen.text, value
    assert 'data-state="paused"' in seen.dom
    assert re.search(r'id="no-weights"[^>]*>', seen.dom).group(0).count("hidden") == 0
    assert seen.errors == []


async def test_hostile_strings_are_inert(tmp_path) -> None:
    evil = (
        '"><script>document.title="owned"</script><img src="http://evil.example/x"'
        " onerror=\"document.title='owned'\">"
    )

    def spoilt(value):
        """Return the same value in which every text and every key is hostile."""
        if isinstance(value, msgspec.Struct):
            return replace(value, **{n: spoilt(getattr(value, n)) for n in value.__struct_fields__})
        if isinstance(value, dict):
            return {evil: spoilt(next(iter(value.values())))} if value else value
        if isinstance(value, list | tuple):
            return type(value)(map(spoilt, value))
        return evil if isinstance(value, str) else value

    seen = await visit(tmp_path, lambda: spoilt(example()), width=390)
    assert seen.text.count(evil) > 50
    assert re.findall(r"<script[^>]*>", seen.dom) == ['<script src="/app.js" defer="">']
    assert "<img" not in seen.dom
    assert not re.search(r"<title>owned", seen.dom)
    assert seen.errors == []
    assert seen.requests == REQUESTS


async def test_page_works_before_the_node_is_ready(tmp_path) -> None:
    empty = NodeSnapshot()
    snapshot = replace(empty, node=replace(empty.node, swarm_name="evening"))
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


async def test_page_says_step_age_and_troubles(tmp_path) -> None:
    def old() -> NodeSnapshot:
        s = example()
        since = {"not_finite": 9}
        report = replace(s.trainer.report, drops={"update": DropCounts(0, since, since)})
        report = replace(report, reward_held_out_step=160)
        quiet = [replace(line, level="info") for line in s.logs]
        return replace(s, trainer=replace(s.trainer, report=report), logs=quiet)

    def before_a_successor(s: NodeSnapshot) -> NodeSnapshot:
        """Let the tasks change in the middle of the history."""
        early = s.at < STARTED_AT + 450
        return replace(s, node=replace(s.node, swarm="0" * 64)) if early else s

    seen = await visit(tmp_path, old, change=before_a_successor)
    shown = re.sub(r"\s+", " ", seen.text)
    for expected in (
        "needs a look",
        "the policy has not changed for 9 steps: the gradient is not finite",
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

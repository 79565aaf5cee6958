"""The status page in use: on a phone, by keyboard, with selected text, and while the trainer or the
head of the crew is elsewhere."""

from __future__ import annotations

import msgspec
import pytest

from swarmnode.observe import http
from swarmnode.observe.samples import Answer, Sample, Turn
from swarmnode.observe.snapshot import NodeSnapshot, PeerRow
from swarmnode.observe.watch import ProcessStatistics
from swarmnode.p2p.budget import TrafficStatistics
from tests.support.browser import CHROMIUM, status_page
from tests.support.snapshots import OWN, PEERS, example

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]
replace = msgspec.structs.replace


async def test_nothing_is_clipped_or_overlaps_at_any_width(tmp_path) -> None:
    s = example()
    names = [f"/swarmnode/weights-manifest-{i}/1" for i in range(3)]
    traffic = TrafficStatistics(
        received=dict.fromkeys(names, 12_345_678), sent=dict.fromkeys(names, 2**33)
    )
    busy = replace(s, network=replace(s.network, traffic=traffic))
    wide = "document.documentElement.scrollWidth - innerWidth"
    # Cells of one row end where their neighbours start.
    overlaps = """[...document.querySelectorAll('tbody tr')].flatMap((row) => {
        const boxes = [...row.children].map((cell) => {
            const all = document.createRange(); all.selectNodeContents(cell); return all; })
          .flatMap((range, i) => [...range.getClientRects()].map((box) => ({ i, box })));
        return boxes.filter(({ i, box }) => boxes.some((other) =>
            other.i !== i && box.width && other.box.width
          && box.left < other.box.right - 1 && other.box.left < box.right - 1
          && box.top < other.box.bottom - 1 && other.box.top < box.bottom - 1))
          .map(() => row.textContent);
      })"""
    outside = """[...document.querySelectorAll('figure svg text')].filter((text) =>
        text.getBoundingClientRect().left < text.closest('figure').getBoundingClientRect().left + 1
        ).map((text) => text.textContent)"""
    async with status_page(tmp_path, lambda: busy) as tab:
        for width in (1280, 880, 600, 390, 320):
            await tab.look(width)
            await tab.js(
                "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
            )
            assert await tab.js(wide) <= 0, width
            assert await tab.js(overlaps) == [], width
            assert await tab.js(outside) == [], width
        assert tab.errors == []


MARKUP = (
    '</pre><script>document.title="owned"</script><img src="x"'
    ' onerror="document.title=1"><style>*{display:none}</style>'
)
HOSTILE = [
    MARKUP,
    "abc\u202egnp.exe\u2066\u200f",
    "\x1b]0;owned\x07\x1b[2J\x9b31m\rroot#",
    "x" * 50_000,
    "a" + "\u0301" * 900,
    "\u05d0\u05d1 (1) \u0645\u0631 [2]",
    "\n" * 900,
    "javascript:alert(1) https://evil.example/ &lt;b&gt; %3Cscript%3E",
]


def keep_samples(data_dir, texts):
    kept = []
    for at, text in enumerate(texts):
        peer, outcome = PEERS[at % 2] if at % 3 else "", text[:9] if at % 2 else "used"
        turns = [Turn(text, text)] * (1 + 31 * (at == 0))
        answers = [Answer(text, 9, "length", 0.5, surprise=1.25)]
        answers += [Answer("left", 4, "eos", 1.0, turns=turns)]
        kept.append(Sample(at, at, 3, "rg/gcd", text, answers, peer, outcome))
    (data_dir / "log").mkdir(parents=True)
    (data_dir / "log" / "samples.jsonl").write_bytes(
        b"".join(msgspec.json.encode(each) + b"\n" for each in kept)
    )


@pytest.mark.parametrize("width", [1280, 390])
async def test_hostile_completions_are_shown_as_text(tmp_path, width) -> None:
    keep_samples(tmp_path / "node", HOSTILE)
    async with status_page(tmp_path, width=width, data_dir=tmp_path / "node") as tab:
        await tab.until("document.querySelectorAll('#samples li').length > 0")
        texts = await tab.js(
            "[...document.querySelectorAll('#samples pre.question')].map((each) =>"
            " each.textContent)"
        )
        assert len(texts) == len(HOSTILE)
        assert texts[-1] == MARKUP
        assert texts[-2] == "abc⟨U+202E⟩gnp.exe⟨U+2066⟩⟨U+200F⟩"
        assert texts[-3] == "⟨U+001B⟩]0;owned⟨U+0007⟩⟨U+001B⟩[2J⟨U+009B⟩31m⟨U+000D⟩root#"
        assert "characters left out" in texts[-4]
        assert max(map(len, texts)) < 12_000
        talks = await tab.js(
            "[...document.querySelectorAll('#samples li')].map((each) =>"
            " [...each.querySelectorAll('pre.action, pre.observation')].map((one) =>"
            " one.textContent))"
        )
        assert talks[-2] == ["abc⟨U+202E⟩gnp.exe⟨U+2066⟩⟨U+200F⟩"] * 2
        assert len(talks[-1]) == 25, "the first and the last of 32 turns, and that some are missing"
        assert talks[-1][0] == MARKUP[:80] + talks[-1][0][80:]
        assert max(len(text) for talk in talks for text in talk) < 2_000
        made = "#samples script, #samples img, #samples style, #samples a"
        assert await tab.js(f"document.querySelectorAll('{made}').length") == 0
        assert await tab.js("document.title.includes('owned')") is False
        assert await tab.js("document.documentElement.scrollWidth - innerWidth") <= 0
        inside = (
            "[...document.querySelectorAll('#samples pre')].every((each) => each.scrollWidth <="
            " each.clientWidth + 1)"
        )
        assert await tab.js(inside) is True
        shown = await tab.text("samples")
        for value in ("own", "Küche 2", PEERS[1][-6:], "reward 0.50", "surprise 1.25", "refused"):
            assert value in shown, value
        assert "9 tokens, cut" in shown
        assert tab.errors == []


async def test_large_numbers_fit_beside_the_axis(tmp_path) -> None:
    """A label of 20000 clipped to 0000 shows a wrong value."""

    def busy(s: NodeSnapshot) -> NodeSnapshot:
        seconds = int(s.at) % 1000
        traffic = TrafficStatistics(
            received={"/swarmnode/groups/1": seconds * 700_000},
            sent={"/swarmnode/groups/1": seconds * 90_000},
        )
        return replace(s, network=replace(s.network, traffic=traffic))

    labels = "[...document.querySelectorAll('figure svg text[text-anchor=end]')]"
    async with status_page(tmp_path, change=busy) as tab:
        texts = ".map((text) => text.textContent)"
        assert "40 k" in await tab.js(labels + texts)
        assert await tab.js(f"{labels}.filter((text) => text.getBBox().x < 0){texts}") == []


async def test_charts_and_lists_are_reachable_by_keyboard(tmp_path) -> None:
    async with status_page(tmp_path) as tab:
        reached = []
        charts = await tab.js("document.querySelectorAll('figure svg').length")
        for _ in range(charts + 6):  # two lists, four links
            await tab.press("Tab")
            name = "((e) => e.id || e.getAttribute('class') || e.tagName)(document.activeElement)"
            reached.append(await tab.js(name))
        assert reached.count("svg") == charts
        assert {"logs", "scroll"} <= set(reached)
        focused = "document.activeElement.getAttribute('aria-label')"
        await tab.js("document.querySelector('figure svg').focus()")
        newest = await tab.js(focused)
        for key in ("ArrowLeft", "ArrowLeft"):
            await tab.press(key)
        label = await tab.js(focused)
        assert label.startswith("Reward: own")
        assert label.endswith(" s ago")
        await tab.press("Escape")
        assert await tab.js(focused) == newest


async def test_selection_survives_a_refresh(tmp_path) -> None:
    async with status_page(tmp_path) as tab:
        await tab.js("getSelection().selectAllChildren(document.querySelector('#identity code'))")
        await tab.js("window.before = answeredAt, 0")
        await tab.until("answeredAt > before")
        assert await tab.js("getSelection().toString()") == OWN


async def test_hides_speed_without_a_trainer(tmp_path) -> None:
    lost = lambda s: replace(
        s, trainer=replace(s.trainer, connected=False), stages=replace(s.stages, own=None)
    )
    async with status_page(tmp_path, change=lambda s: lost(s) if s.at % 1000 > 500 else s) as tab:
        tiles = await tab.text("tiles")
        assert "no trainer" in tiles
        assert "212" not in tiles
        assert "540" not in await tab.text("stage-facts")
        chart = "document.querySelector('figure svg').getAttribute('aria-label')"
        assert "own –" in await tab.js(chart)
        assert "the trainer is not connected" in await tab.text("notice")


async def test_member_shows_its_stage_without_empty_charts(tmp_path) -> None:
    third = lambda crew: replace(
        crew, stage=2, slots=tuple(replace(slot, layers=1) for slot in crew.slots)
    )
    member = lambda s: replace(s, stages=replace(s.stages, crew=third(s.stages.crew)))
    async with status_page(tmp_path, change=member) as tab:
        tiles, head = await tab.text("tiles"), "measured by the crew's head"
        for expected in (head, "Steps of the stage", "250", "Through the stage", "540"):
            assert expected in tiles
        assert head in await tab.js("document.querySelector('figure svg').textContent")
        assert "1 layer, step" in await tab.text("crew")
        named = await tab.js(
            "[...document.querySelectorAll('#crew bdi')].map((n) => n.textContent)"
        )
        # The effect of a right-to-left override ends with the name.
        assert named == ["attic", "Küche 2", "gpu-box-7"]


async def test_missing_values_are_not_shown_as_current(tmp_path) -> None:
    s = example()
    new = replace(s, peers=[PeerRow(PEERS[0], "in")], health=replace(s.health, draining=True))
    new = replace(new, processes={"scorer": ProcessStatistics(2**20, 0.2)})
    async with status_page(tmp_path, lambda: new) as tab:
        assert await tab.js("document.querySelector('#peers td:last-child').textContent") == "–"
        assert "1.0 MiB, under 1 s of CPU" in await tab.text("resources")
        assert await tab.js("document.body.dataset.state") == await tab.text("state") == "draining"


async def test_outdated_page_says_so(tmp_path, monkeypatch) -> None:
    async with status_page(tmp_path) as tab:
        monkeypatch.setattr(http, "status_json", lambda *asked: b'{"snapshot": {}}')
        await tab.until("document.body.dataset.state === 'stale'")
        assert "reload the page" in await tab.text("notice")
        assert len(tab.errors) >= 1


async def test_downtime_is_a_gap_in_the_lines(tmp_path) -> None:
    later = lambda s: replace(s, at=s.at + 120) if s.at % 1000 > 450 else s
    async with status_page(tmp_path, change=later) as tab:
        line = "document.querySelector('path.line[data-series=policy_version]')"
        assert (await tab.js(f"{line}.getAttribute('d')")).count("M") == 2

"""Samples with hostile text, read from disk, by /samples and in a terminal."""

from __future__ import annotations

import json

import msgspec
import pytest

from swarmnode import cli
from swarmnode.observe import samples
from swarmnode.observe.samples import Answer, Sample, newest, shortened, visible
from tests.support.snapshots import PEERS
from tests.unit.observe.test_observe_http import served

HOSTILE = {
    "markup": '</pre><script>document.title="owned"</script><img src=x onerror=alert(1)>',
    "bidi": "abc\u202egnp.exe\u2066\u2069\u200f\u061c",
    "terminal": "\x1b]0;owned\x07\x1b[2J\x9b31m\x08\x08\rroot#",
    "invisible": "a\u200b\u00ad\ufeff\U000e0041b\u2028c",
    "long": "x" * 100_000,
    "combining": "a" + "\u0301" * 500,
    "surrogate": "\ud800",
}
MOVING = list("\x1b\x07\x08\r\x9b\u202e\u2066\u2069\u200b\u00ad\ufeff\u2028\U000e0041\ud800")


def sample(step=7, text="17", peer="", **more) -> Sample:
    answers = [Answer(text, 2, "eos", 1.0, surprise=0.25)]
    return Sample(1000.0, step, 3, "rg/gcd", "gcd of 51 and 34?", answers, peer=peer, **more)


def keep(data_dir, kept, name="samples.jsonl") -> None:
    (data_dir / "log").mkdir(exist_ok=True)
    (data_dir / "log" / name).write_bytes(
        b"".join(msgspec.json.encode(each) + b"\n" for each in kept)
    )


def test_long_text_keeps_start_and_end() -> None:
    text = "think " * 2000 + "<answer>5</answer>"
    short = shortened(text, 400)
    assert short.startswith("think ")
    assert short.endswith("<answer>5</answer>")
    assert "characters left out" in short
    assert len(short) < 450
    assert shortened("x" * 400, 400) == "x" * 400


def test_invisible_and_control_characters_are_written_out() -> None:
    assert visible("a\x1b[1mb\u202ec") == "a⟨U+001B⟩[1mb⟨U+202E⟩c"
    assert visible("line\n\tline, ünïcode, 数, 🎉") == "line\n\tline, ünïcode, 数, 🎉"
    for text in HOSTILE.values():
        assert not any(moving in visible(text) for moving in MOVING)


def test_reads_newest_first_and_skips_a_cut_line(tmp_path) -> None:
    keep(tmp_path, [sample(step) for step in (1, 2, 3)], "samples.jsonl.1")
    keep(tmp_path, [sample(step) for step in (4, 5)])
    with (tmp_path / "log" / "samples.jsonl").open("ab") as file:
        file.write(b'{"at": 1.0, "step": 6, "pol')
    assert [each.step for each in newest(tmp_path, 4)] == [5, 4, 3, 2]
    assert newest(tmp_path / "none", 4) == []


def test_reads_are_bounded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(samples, "READ_BYTES", 2000)
    keep(tmp_path, [sample(step) for step in range(1000)])
    found = newest(tmp_path, 1000)
    assert found[0].step == 999
    assert 3 < len(found) < 20


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_page_gets_short_escaped_samples(text) -> None:
    answers = [Answer(text, 2, "eos", 1.0, {text[:40]: 1.0})] * 4
    hostile = Sample(1.0, 1, 1, "rg/gcd", text, answers, peer=PEERS[0])
    given = samples.for_page([hostile] * samples.PAGE_GROUPS)
    assert len(given) < 700_000
    assert not any(moving in given.decode() for moving in MOVING)


async def test_samples_are_served_from_the_data_directory(tmp_path) -> None:
    keep(tmp_path, [sample(step) for step in range(20)])
    async with served(data_dir=tmp_path) as client:
        answer = (await client.get("/samples")).json()
    assert [each["step"] for each in answer] == list(range(19, 19 - samples.PAGE_GROUPS, -1))


def test_command_shows_author_and_rewards(tmp_path, capsys) -> None:
    keep(tmp_path, [sample(1), sample(2, "five", PEERS[1], outcome="surprise")])
    assert cli.run(["samples", "-d", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    peers = out.index(f"…{PEERS[1][-6:]}, refused: surprise")
    assert peers < out.index("own · rg/gcd · step 1, policy version 3")
    assert "reward 1.00 surprise 0.25" in out
    assert "gcd of 51 and 34?" in out
    assert cli.run(["samples", "-d", str(tmp_path / "none")]) == 0
    assert "no samples" in capsys.readouterr().out


@pytest.mark.parametrize("text", [text for name, text in HOSTILE.items() if name != "surrogate"])
def test_completions_cannot_control_the_terminal(tmp_path, capsys, text) -> None:
    keep(tmp_path, [sample(1, text, text[:60], outcome=text[:20])])
    for more in ([], ["--json"]):
        assert cli.run(["samples", "-d", str(tmp_path), *more]) == 0
        out = capsys.readouterr().out
        assert not any(moving in out for moving in MOVING)
        assert more or max(map(len, out.splitlines())) < 400
    assert json.loads(out)[0]["completions"][0]["text"] == text

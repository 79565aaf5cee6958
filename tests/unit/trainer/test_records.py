"""Steps and samples on disk: their content, the bound of the files, and a failing disk."""

import json

import msgspec

from swarmnode.link.messages import Report
from swarmnode.observe import samples
from swarmnode.policy.ways import Row
from swarmnode.rollouts.groups import OwnGroup, join_turns
from swarmnode.rollouts.trainer.batch import TrainingGroup
from swarmnode.rollouts.trainer.judge import Judgement
from swarmnode.trainer import records
from swarmnode.trainer.records import Records, own_sample, peers_samples
from swarmnode.wire.messages import Completion, SamplingParams, TaskRef
from tests.support.groups import external_group

REPORT = Report(
    "training", step=7, reward_own=0.25, reward_by_task={"rg/gcd": 0.25}, peers_used={"12D3KooW": 3}
)


def group(size=6, text="17"):
    completions = [Completion(text, 2, -1.0, "eos") for _ in range(size)]
    return OwnGroup(
        TaskRef("rg/gcd", "00" * 8, 1, 0),
        5,
        9,
        SamplingParams(1.0, 1.0, 8),
        completions,
        [1.0] + [0.0] * (size - 1),
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_steps_and_first_completions(tmp_path):
    kept = Records(tmp_path)
    kept.step(1000.0, REPORT)
    kept.sample(own_sample(1000.0, 7, "gcd of 51 and 34?", group(text="x" * 9000)))
    kept.close()
    (step,) = lines(tmp_path / "log" / "steps.jsonl")
    assert (step["at"], step["step"], step["reward_by_task"]) == (1000.0, 7, {"rg/gcd": 0.25})
    assert not {"peers_used", "type", "phase"} & step.keys()
    (sample,) = lines(tmp_path / "log" / "samples.jsonl")
    assert (sample["task"], sample["step"], sample["prompt"]) == ("rg/gcd", 7, "gcd of 51 and 34?")
    assert [completion["reward"] for completion in sample["completions"]] == [1.0, 0.0, 0.0, 0.0]
    assert samples.TEXT <= len(sample["completions"][0]["text"]) < samples.TEXT + 50
    assert sample["completions"][0]["surprise"] == 0.5
    (read,) = samples.newest(tmp_path, 5)
    assert (read.peer, read.outcome, read.policy_version) == ("", "used", 5)


def test_an_episode_is_kept_as_a_conversation(tmp_path):
    text, turns = join_turns(["left", "x" * 900, "ri"], [2, 2, 1])
    completion = Completion(text, 5, -1.0, "length", turns=turns)
    own = msgspec.structs.replace(group(2), completions=[completion] * 2)
    sample = own_sample(1.0, 1, "Cross the lake.", own, [["ice", "\x1b[2Ja hole"]] * 2)
    answer = sample.completions[0]
    assert [turn.observation for turn in answer.turns] == ["ice", "\x1b[2Ja hole", ""]
    assert answer.turns[0].action == "left"
    assert len(answer.turns[1].action) < samples.TURN_TEXT + 50
    (shown, _) = samples.displayable(sample).completions
    assert shown.turns[1].observation == "⟨U+001B⟩[2Ja hole"
    long = msgspec.structs.replace(answer, turns=answer.turns[:1] * 32)
    (cut,) = samples.displayable(msgspec.structs.replace(sample, completions=[long])).completions
    assert len(cut.turns) == samples.PAGE_TURNS + 1
    assert "20 turns left out" in cut.turns[samples.PAGE_TURNS // 2].observation


def test_record_files_are_bounded_and_survive_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "STEPS_BYTES", 10_000)
    monkeypatch.setattr(records, "SAMPLES_BYTES", 10_000)
    for _ in range(3):
        kept = Records(tmp_path)
        for number in range(40):
            kept.step(float(number), REPORT)
            kept.sample(own_sample(float(number), number, "?", group(text="x" * 500)))
        kept.close()
    files = sorted((tmp_path / "log").iterdir())
    assert [file.name for file in files] == [
        "samples.jsonl",
        "samples.jsonl.1",
        "steps.jsonl",
        "steps.jsonl.1",
    ]
    assert all(file.stat().st_size <= 10_000 for file in files)
    assert lines(tmp_path / "log" / "steps.jsonl")[-1]["at"] == 39.0


def test_a_file_that_cannot_be_written_costs_lines(tmp_path):
    kept = Records(tmp_path)
    (tmp_path / "log" / "steps.jsonl").mkdir()
    kept.step(1.0, REPORT)
    (tmp_path / "log" / "steps.jsonl").rmdir()
    kept.step(2.0, REPORT)
    kept.close()
    assert [line["at"] for line in lines(tmp_path / "log" / "steps.jsonl")] == [2.0]


def test_missing_log_directory_is_ignored(tmp_path):
    (tmp_path / "file").write_text("")
    kept = Records(tmp_path / "file")
    kept.step(1.0, REPORT)
    kept.sample(own_sample(1.0, 1, "?", group()))
    kept.close()


def test_records_first_used_and_first_refused_peer_group():
    refused, used, more = (
        external_group(f"12D3KooW{number}", number, text=f"answer {number}") for number in (1, 2, 3)
    )
    ours = [[-0.5, -1.5], [-2.0, -2.0]]
    row = Row([1, 2], [3, 4])
    accepted = [
        TrainingGroup([row, row], each, [0.0, 1.0], [1.0, 1.0], "x")
        for each in (ours, [[-9.0], [-9.0]])
    ]
    judgement = Judgement(
        accepted,
        [(refused, "surprise"), (used, "used"), (more, "used"), (more, "no_ids")],
        {"surprise": "5.0 nats"},
    )
    first, second = peers_samples(5.0, 8, judgement)
    assert (first.detail, second.detail) == ("5.0 nats", "")
    assert (first.peer, first.outcome, first.completions[0].surprise) == (
        refused.peer,
        "surprise",
        None,
    )
    assert (second.peer, second.outcome, [each.surprise for each in second.completions]) == (
        used.peer,
        "used",
        [1.0, 2.0],
    )
    assert [each.reward for each in second.completions] == [0.0, 1.0]
    assert second.completions[0].text == "answer 2"
    assert peers_samples(5.0, 8, Judgement()) == []

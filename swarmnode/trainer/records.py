"""Records of steps for the operator, in `<data_dir>/log`, as JSON lines.

    steps.jsonl      all measurements of a step, as on the status page, with the reward by task
    samples.jsonl    per step one own group, one peer's group that was trained on, and one that was
                     rejected; per evaluation its first question (`observe.samples`)

A full file is renamed to `.jsonl.1` and replaces the former one, so that the size is bounded. If
the disk is full, lines are lost, and training continues.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from swarmnode.link.messages import Report
from swarmnode.observe.logfile import FileHandler, log_file
from swarmnode.observe.samples import Answer, Sample, shortened, to_turns
from swarmnode.rollouts.groups import ExternalGroup, OwnGroup, actions
from swarmnode.rollouts.trainer.judge import Judgement
from swarmnode.trainer.episodes import sampled_tokens
from swarmnode.trainer.evaluate import HeldOutReward
from swarmnode.trainer.state import Counters
from swarmnode.wire.messages import Completion

STEPS_BYTES = 8 * 2**20
"""Size of a file, for about ten thousand steps."""
SAMPLES_BYTES = 8 * 2**20
COMPLETIONS = 4
LEFT_OUT = (
    "peers_used",
    "weights",
    "reward_errors",
    "last_reward_error",
    "refusals",
    "last_refusal",
    "phase",
    "activity",
    "max_steps",
)
"""Fields of a report that do not belong to a single step."""


class Records:
    """Writes both files. Errors of the disk are not raised."""

    def __init__(self, data_dir: Path) -> None:
        self._steps = _file(data_dir, "steps", STEPS_BYTES)
        self._samples = _file(data_dir, "samples", SAMPLES_BYTES)

    def step(self, at: float, report: Report) -> None:
        """Record the report of a step that ended at `at`, Unix seconds."""
        measured = {
            name: value
            for name, value in msgspec.to_builtins(report).items()
            if name not in (*LEFT_OUT, "type")
        }
        _write(self._steps, {"at": round(at, 3), **measured})

    def sample(self, sample: Sample) -> None:
        _write(self._samples, msgspec.to_builtins(sample))

    def close(self) -> None:
        for file in (self._steps, self._samples):
            if file is not None:
                file.close()


def own_sample(
    at: float,
    step: int,
    prompt: str,
    group: OwnGroup,
    observations: Sequence[Sequence[str]] = (),
) -> Sample:
    """Return the policy's first completions of one question of a step, for display.

    They are not the best ones, so that they show typical behaviour.

    Args:
        observations: The environment's texts for each episode; empty for answers.
    """
    surprise = [-completion.logprob / max(completion.tokens, 1) for completion in group.completions]
    answers = _answers(group.completions, group.rewards, group.components, surprise, observations)
    return Sample(
        round(at, 3), step, group.policy_version, group.task.id, shortened(prompt), answers
    )


def held_out_sample(at: float, counters: Counters, held_out: HeldOutReward) -> Sample:
    """Return the answers to the first question of an evaluation, which is always the same."""
    answers = [
        Answer(shortened(done.text), sampled_tokens(done), done.finish, reward)
        for done, reward in zip(held_out.completions, held_out.rewards, strict=True)
    ]
    return Sample(
        round(at, 3),
        counters.step,
        counters.policy_version,
        held_out.task,
        shortened(held_out.prompt),
        answers,
        held_out=True,
    )


def peers_samples(at: float, step: int, judgement: Judgement) -> list[Sample]:
    """Return the first trained group and the first refused group from peers, if they exist."""
    found: dict[bool, Sample] = {}
    for group, outcome in judgement.outcomes:
        used = outcome == "used"
        if used not in found:
            logprobs_here = judgement.accepted[0].sampler_logprobs if used else []
            rows = judgement.accepted[0].rows if used else []
            surprise = [
                -sum(logprobs) / max(row.tokens, 1)
                for row, logprobs in zip(rows, logprobs_here, strict=True)
            ]
            detail = judgement.details.get(outcome, "")
            found[used] = _peers_sample(at, step, group, outcome, surprise, detail)
    return list(found.values())


def _peers_sample(
    at: float,
    step: int,
    group: ExternalGroup,
    outcome: str,
    surprise: Sequence[float],
    detail: str,
) -> Sample:
    answers = _answers(
        group.group.completions, group.rewards, group.components, surprise, group.observations
    )
    sampled = group.group
    return Sample(
        round(at, 3),
        step,
        sampled.policy_version,
        sampled.task.id,
        shortened(group.prompt),
        answers,
        peer=group.peer,
        detail=detail,
        outcome=outcome,
    )


def _answers(
    completions: Sequence[Completion],
    rewards: Sequence[float],
    components: Sequence[dict[str, float]],
    surprise: Sequence[float],
    observations: Sequence[Sequence[str]],
) -> list[Answer]:
    rewarded, made_of, surprising, seen = (
        dict(enumerate(rewards)),
        dict(enumerate(components)),
        dict(enumerate(surprise)),
        dict(enumerate(observations)),
    )
    return [
        Answer(
            shortened("\n".join(actions(completion))),
            completion.tokens,
            completion.finish,
            rewarded.get(number),
            made_of.get(number, {}),
            surprising.get(number),
            to_turns(actions(completion), seen.get(number, ())) if completion.turns else [],
        )
        for number, completion in enumerate(completions[:COMPLETIONS])
    ]


def _file(data_dir: Path, name: str, most: int) -> FileHandler | None:
    """Open a log file; return None if the directory cannot be created."""
    try:
        return FileHandler(log_file(data_dir, name), most)
    except OSError:
        return None


def _write(file: FileHandler | None, line: dict[str, object]) -> None:
    if file is not None:
        file.emit(logging.makeLogRecord({"msg": msgspec.json.encode(line).decode()}))

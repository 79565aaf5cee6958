"""Environments of verifiers whose policy only takes turns, played as episodes. With verifiers where
it is installed, else with a stand-in of the same signatures.

pytest tests/unit/tasks/test_taskset_episodes.py
"""

import pytest

from swarmnode.config import DatasetConfig
from swarmnode.errors import ConfigError
from swarmnode.tasks import dataset, determinism, episodes, registry
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.frames import Episode, Question
from tests.support.fakes.scorer import InProcessScorer
from tests.support.registered import ref

NAME, SOURCE = "data/guess", "verifiers:guess-of-mine"
GUESS = """
from __future__ import annotations

import random

import verifiers.v1 as vf


class GuessState(vf.State):
    guesses: list[int] = []


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData, GuessState]):
    async def setup(self, trace, runtime) -> None:
        trace.state.guesses = []

    @vf.stop
    async def found(self, trace: vf.Trace) -> bool:
        return self.data.secret in trace.state.guesses

    @vf.metric
    async def asked(self, trace) -> float:
        return float(trace.num_turns)

    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.secret in trace.state.guesses)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                number = int(segment.last_reply) if segment.last_reply.isdigit() else 0
                interaction.trace.state.guesses.append(number)
                said = "Right." if number == task.data.secret else f"Not {number}."
                segment = await interaction.turn(said)

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        turns = max(1.0, trace.metrics["asked"])
        trace.record_reward("quick", trace.rewards["right"].score / turns, 0.25)


class Guesses(vf.Taskset[GuessTask]):
    def load(self):
        for number in range(20):
            secret = random.Random(number).randint(1, 9)
            yield GuessTask(
                GuessData(prompt=f"Guess number {number}.", system_prompt="Play.", secret=secret)
            )


__all__ = ["Guesses", "GuessEnv"]
"""
AGENTS = "player: vf.AgentConfig = vf.AgentConfig()"
FIRST_TURN = "segment = await interaction.turn()"


@pytest.fixture
def written(site):
    """Return a function that writes the environment with some changes."""

    def write(*changes):
        text = GUESS
        for was, now in changes:
            assert was in text
            text = text.replace(was, now)
        (site / "guess_of_mine.py").write_text(text)

    return write


def installed(tmp_path, turns=4, **settings):
    config = DatasetConfig(source=SOURCE, turns=turns, **settings)
    registry.install_datasets({NAME: config}, tmp_path / "datasets")
    return registry.TASKS[NAME]


def played(tmp_path, *histories, **settings):
    """The first question, played in this process as the child plays it."""
    spec = installed(tmp_path, **settings)
    task = dataset.build_task(
        NAME, spec.rows, dataset.Settings.from_settings(spec.settings), spec.source
    )
    if task.turns > 1:
        episodes.check_episode(NAME, task)
    question = Question(NAME, 4 << 20, 0, [], actions=[list(history) for history in histories])
    return episodes.Player().play(task, question)


GUESSES = [[str(number)] * 4 for number in range(1, 10)]
"""Histories of all guesses; one of them is right."""


def test_taskset_environment_is_scored_at_its_end(tmp_path, written):
    written()
    right = str(1 + played(tmp_path, *GUESSES).rewards.index(1.0))
    scored = played(tmp_path, [right], ["0", right], ["0"], ["0"] * 4, ["0", right, right])
    assert scored.prompt.startswith("Play.\n\nGuess number ")
    assert scored.rewards == pytest.approx([1.0, 0.9, 0.0, 0.0, 0.9]), "weights 1 and 0.25"
    assert scored.episodes == [
        Episode(["Right."], True),
        Episode(["Not 0.", "Right."], True),
        Episode(["Not 0."], False),
        Episode(["Not 0."] * 4, True),
        Episode(["Not 0.", "Right."], True),
    ]
    assert scored.errors == 0


async def test_the_sandbox_plays_the_same_as_this_process(tmp_path, written):
    written()
    installed(tmp_path)
    with Scorer() as scorer:
        scored = scorer.score(ref(NAME), GUESSES)
        assert set(scorer.statistics().layers) >= {"rlimits", "audit"}
    assert sorted(scored.rewards) == [0.0] * 8 + [1.0]
    (found,) = await InProcessScorer().score_many([(ref(NAME), GUESSES)])
    assert found == scored


def test_code_and_turns_are_part_of_the_version(tmp_path, written, monkeypatch):
    monkeypatch.setattr(determinism, "transcript_hash", lambda spec: "0" * 16)
    versions = set()
    for changes, turns in ([], 4), ([], 5), ([("randint(1, 9)", "randint(1, 8)")], 4):
        written(*changes)
        installed(tmp_path, turns=turns)
        versions.add(registry.task_version(NAME))
    assert len(versions) == 3


def test_an_agents_own_limit_of_turns_ends_the_episode(tmp_path, written):
    written((AGENTS, "player: vf.AgentConfig = vf.AgentConfig(max_turns=2)"))
    assert played(tmp_path, ["0"] * 4).episodes == [Episode(["Not 0."] * 2, True)]


def test_an_environment_can_open_the_conversation(tmp_path, written):
    written(
        ('prompt=f"Guess number {number}.", ', ""),
        (FIRST_TURN, 'segment = await interaction.turn("Guess.")'),
    )
    scored = played(tmp_path, ["0"], template="<{prompt}>")
    assert (scored.prompt, scored.errors) == ("<Play.\n\nGuess.>", 0)


@pytest.mark.parametrize(
    ("was", "now", "problem"),
    [
        (
            AGENTS,
            AGENTS + "\n    user: vf.AgentConfig = vf.AgentConfig()",
            "GuessEnv has the agents player, user: one is the policy, the others are models",
        ),
        (
            "class Guesses(",
            "GuessTask.toolsets = classmethod(lambda cls, config: ['search'])\nclass Guesses(",
            "GuessEnv has tool servers, which need a network",
        ),
        ('__all__ = ["Guesses", "GuessEnv"]', '__all__ = ["Guesses"]', "leave turns out"),
        ("trace: vf.Trace) -> bool", "request: vf.Request) -> bool", "has hooks on"),
        (
            "async with agents.player.interaction(task) as interaction:",
            "await agents.player.run(task)\n        if True:",
            "agents.player.run: the policy can only take turns",
        ),
        ("trace.state.guesses = []", "await runtime.run(['ls'], {})", "the sandbox has no"),
        (
            FIRST_TURN,
            FIRST_TURN + "; import asyncio; await asyncio.sleep(1)",
            "no running event loop",
        ),
        (
            "interaction.turn(said)",
            'interaction.turn([{"role": "system", "content": said}])',
            "a turn has only texts of the role user",
        ),
        (FIRST_TURN, "return  # no turn", "the environment ended before its first turn"),
    ],
)
def test_an_environment_that_needs_more_than_turns_is_refused(tmp_path, written, was, now, problem):
    written((was, now))
    with pytest.raises(ConfigError) as refused:
        played(tmp_path)
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("was", "now", "problem"),
    [
        ("float(self", "9 * float(self", "a reward of "),
        ("segment.last_reply.isdigit()", "segment.last_reply", "ValueError: invalid literal"),
    ],
)
def test_a_failing_environment_costs_its_episode_alone(tmp_path, written, was, now, problem):
    written((was, now))
    scored = played(tmp_path, *GUESSES, ["a"])
    assert problem in scored.error
    assert scored.errors == 1
    assert set(scored.rewards) <= {0.0, 1.0}


def test_a_multi_turn_environment_without_turns_says_so(tmp_path, written):
    written()
    with pytest.raises(ConfigError, match="GuessEnv plays several turns: set turns"):
        played(tmp_path, turns=1)

"""Gymnasium's toy text games against the library used the ordinary way, in the scorer's sandbox.

pytest tests/unit/tasks/test_games.py
"""

import re

import pytest

from swarmnode.errors import ConfigError, Unavailable
from swarmnode.swarm import manifest, requirements
from swarmnode.tasks import determinism, registry
from swarmnode.tasks.client import Scorer, check_tasks
from swarmnode.tasks.games import GAMES
from swarmnode.tasks.seeds import evaluation_seed
from swarmnode.wire.messages import TaskEntry
from tests.support.registered import ref

LAKE, TAXI, CLIFF, BLACKJACK = (name for name in GAMES if name.startswith("gym/"))
SEED = 4 << 20


@pytest.fixture
def named(tasks_as_before):
    """Return a function that installs a game, like `task.names` and `task.settings`."""

    def install(task, **settings):
        registry.install([], {task: settings} if settings else {}, [task])
        return task

    yield install
    registry._LOADED_GAMES.clear()


@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium", reason="pip install gymnasium")


def test_game_runs_in_the_whole_sandbox(gymnasium, named):
    task = named(LAKE)
    version = registry.task_version(task)
    with Scorer() as scorer:
        first = scorer.score(ref(task), [["right"] * 5, ["down"]])
        assert set(scorer.statistics().layers) >= {"env", "rlimits", "audit"}
    registry.task_version.cache_clear()
    assert registry.task_version(task) == version
    with Scorer() as scorer:
        assert scorer.score(ref(task), [["right"] * 5, ["down"]]) == first


def test_a_lake_is_crossed(gymnasium, named):
    task = named(LAKE, is_slippery=False)
    way = ["down", "down", "right", "right", "down", "right"]
    with Scorer() as scorer:
        scored = scorer.score(
            ref(task), [way, ["I go down.", "Right, I say: RIGHT"], ["jump", *way], way[:-1]]
        )
    assert scored.rewards == [1.0, 0.0, 1.0, 0.0]
    assert scored.prompt.endswith("Say one of: left, down, right, up.\nYFFF\nFHFH\nFFFH\nHFFG")
    over, fell, jumped, _ = scored.episodes
    assert over.observations[-1] == "SFFF\nFHFH\nFFFH\nHFFY\nYou reached the goal."
    assert fell.observations[-1].endswith("You fell into a hole.")
    assert jumped.observations[0] == "That is no action. Say one of: left, down, right, up."


def test_a_map_of_its_own_for_each_question(gymnasium, named):
    task = named(LAKE, map_name="random", size=5)
    with Scorer() as scorer:
        maps = {scorer.score(ref(task, index), []).prompt for index in range(20)}
        held_out = {
            scorer.score(ref(task, index, evaluation_seed(task)), []).prompt for index in range(20)
        }
    assert len(maps) > 15
    assert not maps & held_out


def test_cards_are_worth_half_in_a_draw(gymnasium, named):
    task = named(BLACKJACK)
    with Scorer() as scorer:
        asked = [(ref(task, index), [["stick"], ["hit"] * 12]) for index in range(64)]
        rewards = {reward for each in scorer.score_many(asked) for reward in each.rewards}
    assert rewards == {0.0, 0.5, 1.0}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"slippery": True}, "'slippery' cannot be set; there are extract, turns,"),
        ({"is_slippery": "no"}, "is_slippery is 'no', not a value such as True"),
        ({"turns": 40}, "turns is 40, not a whole number, 1 to 32"),
        ({"extract": "nowhere"}, "extract is 'nowhere', not one of auto"),
    ],
)
def test_settings_that_are_none(named, settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        named(LAKE, **settings)


def test_a_map_that_is_none_is_one_line(gymnasium, named):
    task = named(LAKE, map_name="5x5")
    with pytest.raises(ConfigError, match=r"'gym/FrozenLake-v1' does not work: KeyError: '5x5'"):
        check_tasks([task])


def test_without_its_library_a_game_is_one_line(named, monkeypatch):
    def missing(package):
        raise registry.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(registry.importlib.metadata, "version", missing)
    with pytest.raises(Unavailable, match="needs gymnasium, which is not installed: pip install"):
        check_tasks([named(LAKE)])
    (problem,) = requirements.task_problems(TaskEntry(LAKE, "0" * 16, ""))
    assert "needs gymnasium" in problem


def test_a_member_with_other_settings_is_told_both(named, monkeypatch):
    monkeypatch.setattr(determinism, "transcript_hash", lambda spec: "0" * 16)
    monkeypatch.setattr(registry, "_installed_version", lambda package, task: "1.4.0")
    named(LAKE, is_slippery=False)
    theirs = TaskEntry(LAKE, registry.task_version(LAKE), manifest.settings_text(LAKE))
    assert requirements.task_problems(theirs) == []
    named(LAKE, is_slippery=True)
    (problem,) = requirements.task_problems(theirs)
    assert '"is_slippery": false' in problem
    assert '"is_slippery": true' in problem


def test_a_game_that_nobody_named_is_not_loaded(named):
    named("builtin/copy")
    assert registry.loaded_games() == []

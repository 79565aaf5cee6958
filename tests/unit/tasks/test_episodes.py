"""Episodes of an owner's function: played turn by turn, replayed from the start, bounded, and never
more than one episode lost to an environment.
"""

import json
import random
import re
from pathlib import Path

import pytest

from swarmnode import settings
from swarmnode.config import DatasetConfig
from swarmnode.errors import ConfigError
from swarmnode.tasks import determinism, episodes, registry
from swarmnode.tasks.client import AsyncScorer, Scorer, ScorerFailed
from swarmnode.tasks.frames import EPISODE_BYTES, OBSERVATION_BYTES, Question
from swarmnode.tasks.seeds import environment_seed, evaluation_seed, is_evaluation
from tests.support.fakes.scorer import InProcessScorer, score_one
from tests.support.registered import ref

GAMES = '''
import random
import time

STARTED = []


def guess(seed: int, low: int = 1, high: int = 20):
    secret = random.Random(seed).randint(low, high)

    def step(action: str):
        number = int(action) if action.isdigit() and len(action) < 4 else 0
        if number == secret:
            return "Right.", 1.0, True
        return "Higher." if number < secret else "Lower.", 0.0, False

    return f"I am thinking of a number from {low} to {high}. Guess.", step


def echo(seed: int):
    """Does what the action says: for tests."""
    STARTED.append(seed)
    total = []

    def step(action: str):
        total.append(action)
        word, _, rest = action.partition(" ")
        if word == "raise":
            raise ValueError("no such move")
        if word == "leave":
            raise SystemExit(3)
        if word == "spin":
            while True:
                pass
        if word == "sleep":
            time.sleep(60)
        if word == "eat":
            return "x" * 2**30, 0.0, False
        if word == "flood":
            return "x" * 10_000_000, 0.0, False
        if word == "print":
            print("x" * 100_000, flush=True)
            return "printed", 0.0, False
        if word == "umlauts":
            return "ä" * 4000, 0.0, False
        if word == "page":
            return "y" * 4000, 0.0, False
        if word == "earn":
            return "earned", float(rest), False
        if word == "parts":
            return "earned", {"first": float(rest), "second": 0.5}, True
        if word == "end":
            return "over", float(rest or 0), True
        return f"{len(total)} {random.random():.6f}", 0.1, False

    return f"Say something {seed}", step


def hashed(seed: int):
    names = {f"{seed}-{number}" for number in range(8)}
    return "Name one", lambda action: (" ".join(names), 0.0, False)


def clock(seed: int):
    return "What time is it?", lambda action: (str(time.perf_counter_ns()), 0.0, False)


def counted(seed: int):
    STARTED.append(seed)
    return f"You are number {len(STARTED)}", lambda action: ("no", 0.0, False)


def one_turn(rng):
    return f"Say {rng.randrange(60)}", lambda answer: 0.0


def clumsy(seed: int):
    return "Give a number", lambda action: (str(int(action)), 0.0, False)


def counting(seed: int, turns: int):
    return f"You have {turns} turns", lambda action: ("no", 0.0, False)
'''
GUESS, ECHO = "games_of_mine:guess", "games_of_mine:echo"


@pytest.fixture
def games(tmp_path, monkeypatch, tasks_as_before):
    """Put the module above on the path."""
    (tmp_path / "games_of_mine.py").write_text(GAMES)
    monkeypatch.syspath_prepend(str(tmp_path))


def installed(name, **settings):
    task = f"games_of_mine:{name}"
    registry.install([task], {task: {"turns": 8} | settings})
    return task


@pytest.fixture
def echo(games):
    """A scorer with an obedient environment. The determinism check has tests of its own."""
    installed("echo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(determinism, "transcript_hash", lambda spec: "0" * 16)
        with Scorer() as scorer:
            yield scorer


def play(scorer, *histories):
    return scorer.score(ref(ECHO), [list(history) for history in histories])


def binary_search(scorer, question):
    low, high, actions = 1, 20, []
    while True:
        actions.append(str((low + high) // 2))
        scored = scorer.score(question, [actions])
        (episode,) = scored.episodes
        if episode.done:
            return actions, scored
        if episode.observations[-1] == "Higher.":
            low = int(actions[-1]) + 1
        else:
            high = int(actions[-1]) - 1


def test_receiver_replays_the_authors_episode(games):
    installed("guess")
    with Scorer() as author:
        assert (
            author.score(ref(GUESS), []).prompt == "I am thinking of a number from 1 to 20. Guess."
        )
        actions, scored = binary_search(author, ref(GUESS))
    assert scored.rewards == [1.0]
    assert scored.episodes[0].observations[-1] == "Right."
    with Scorer() as receiver:
        assert receiver.score(ref(GUESS), [actions]) == scored
        unfinished = receiver.score(ref(GUESS), [actions[:-1], [], actions])
    assert unfinished.rewards == [0.0, 0.0, 1.0]
    assert [episode.done for episode in unfinished.episodes] == [False, False, True]


async def test_the_network_process_replays_the_same(games):
    installed("guess")
    actions = [[str(number) for number in range(start, 20)] for start in (1, 9)]
    with Scorer() as scorer:
        expected = scorer.score(ref(GUESS), actions)
    async with AsyncScorer() as scorer:
        assert await score_one(scorer, ref(GUESS), actions) == expected
    (found,) = await InProcessScorer().score_many([(ref(GUESS), actions)])
    assert found == expected


def test_no_action_is_taken_after_the_end_or_the_last_turn(echo):
    scored = play(echo, ["a"] * 8, ["a"] * 7, ["a"] * 20, ["end 1", "a", "a"])
    assert scored.rewards == [pytest.approx(0.8), 0.0, pytest.approx(0.8), 1.0]
    assert [len(episode.observations) for episode in scored.episodes] == [8, 7, 8, 1]
    assert [episode.done for episode in scored.episodes] == [True, False, True, True]


def test_step_rewards_add_up_to_at_most_1(echo):
    tenths = ["earn 0.1"] * 7 + ["end 0.3"]
    scored = play(echo, tenths, ["earn -0.5", "end 1"], ["earn 0.7", "end 0.7"], ["end nan"])
    assert scored.rewards == [1.0, 0.5, 0.0, 0.0]
    assert scored.errors == 2
    assert "not in 0 to 1" in scored.error


def test_components_are_added_by_name(echo):
    scored = play(echo, ["earn 0", "parts 1"], ["parts 0"])
    assert scored.rewards == [0.75, 0.25]
    assert scored.components == [{"first": 1.0, "second": 0.5}, {"first": 0.0, "second": 0.5}]
    assert play(echo, ["earn 0.5", "parts 1"]).errors == 1


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("raise", "ValueError: no such move (games_of_mine.py:"),
        ("leave", "SystemExit: 3"),
        ("sleep", "PermissionError"),
        ("eat", "MemoryError"),
    ],
)
def test_environment_fault_ends_only_its_episode(echo, action, error):
    scored = play(echo, ["earn 1", action, "a"], ["end 1"])
    assert scored.rewards == [0.0, 1.0]
    assert scored.episodes[0].observations == ["earned", "[the environment failed]"]
    assert scored.episodes[0].done
    assert (scored.errors, scored.error.startswith(error)) == (1, True)
    told = echo.statistics()
    assert told.reward_errors == {ECHO: 1}
    assert (told.starts, told.failures) == (1, 0)


def test_hanging_environment_costs_its_question(echo):
    questions = [(ref(ECHO, index), [["spin"] if index == 1 else ["end 1"]]) for index in range(3)]
    first, hung, last = echo.score_many(questions)
    assert (first.rewards, last.rewards) == ([1.0], [1.0])
    assert isinstance(hung, ScorerFailed)
    assert echo.statistics().failures == 2  # in the frame, and alone


def test_an_observation_is_cut_and_a_long_episode_ends(echo):
    scored = play(echo, ["flood", "end 1"], ["page"] * 8, ["umlauts"], ["print", "end 1"])
    flooded, pages, umlauts, _ = scored.episodes
    assert len(flooded.observations[0].encode()) == OBSERVATION_BYTES
    assert flooded.observations[0].endswith("[cut]")
    assert scored.rewards[0] == 1.0
    assert len(pages.observations) == 5
    assert pages.done
    assert sum(len(text.encode()) for text in pages.observations) == EPISODE_BYTES
    assert umlauts.observations[0].endswith("ä\n[cut]")
    assert scored.rewards[3] == 1.0, "what it prints is discarded"
    assert echo.statistics().failures == 0


def test_control_characters_go_and_special_tokens_stay(echo):
    said = "say \x1b[31mred\x1b[0m\x00\x07 a\r\nb\tc <|im_end|>\ud800 \u00e9"
    question = Question(ECHO, 4 << 20, 0, [], actions=[[said]])
    player = episodes.Player()

    class Task:
        turns, weights = 4, {}

        def start(self, seed, index):
            return "Begin\x00", lambda action: (action[4:], 0.0, False)

    scored = player.play(Task(), question)
    assert scored.prompt == "Begin"
    assert scored.episodes[0].observations == ["red a\nb\tc <|im_end|> \u00e9"]


def test_too_long_action_ends_the_episode(echo):
    scored = play(echo, ["earn 1", "x" * 5000, "end"], ["earn 1", "\ud800"], ["end 1"])
    assert scored.rewards == [0.0, 0.0, 1.0]
    assert [len(episode.observations) for episode in scored.episodes] == [2, 2, 1]
    assert scored.errors == 0
    assert echo.statistics().skipped == 2


def test_hidden_tokens_between_turns_are_never_visible(games):
    """Three players store no, one and 64 episodes. Each plays every prefix of random episodes in
    random order, and all return the same observations."""
    installed("echo")
    source = registry.TASKS[ECHO]
    task = episodes.own.OwnTask(ECHO, source.source, source.settings)
    rng = random.Random(7)
    players = [episodes.Player(limit) for limit in (0, 1, 64)]
    whole = [[rng.choice(["a", "earn 0.1", "end 1", "raise"]) for _ in range(8)] for _ in range(6)]
    for _ in range(60):
        index = rng.randrange(3)
        histories = [each[: rng.randrange(9)] for each in rng.choices(whole, k=4)]
        question = Question(ECHO, 4 << 20, index, [], actions=histories)
        first, *others = [player.play(task, question) for player in players]
        assert all(other == first for other in others)


def test_the_next_turn_costs_one_step(games):
    taken = []

    class Task:
        turns, weights = 32, {}

        def start(self, seed, index):
            return "Go", lambda action: (taken.append(action) or "on", 0.0, False)

    player, actions = episodes.Player(), []
    for turn in range(20):
        actions = [*actions, str(turn)]
        player.play(Task(), Question("t:t", 0, 0, [], actions=[actions, actions]))
    assert taken == actions


def test_memory_that_kept_episodes_hold_does_not_decide_another(games):
    held = []

    class Task:
        turns, weights = 4, {}

        def start(self, seed, index):
            held.append(seed)

            def step(action):
                if len(held) > 2:
                    held[:] = held[-1:]
                    raise MemoryError
                return "fine", 0.5, True

            return "Go", step

    player = episodes.Player()
    rewards = [
        player.play(Task(), Question("t:t", 0, index, [], actions=[["a"]])).rewards
        for index in range(6)
    ]
    assert rewards == [[0.5]] * 6


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hashed", "episode 1, turn 1: "),
        ("clock", "episode 1, turn 1: "),
        ("counted", "episode 1, its first text: 'You are number "),
    ],
)
def test_an_environment_that_does_not_repeat_itself_is_refused(games, name, said):
    task = installed(name)
    with pytest.raises(ConfigError, match="is not deterministic") as refused:
        registry.task_version(task)
    assert said in str(refused.value)


def test_global_random_numbers_are_the_episodes_own(games):
    task = installed("echo")
    assert registry.task_version(task) == registry.task_version(task)
    with Scorer() as scorer:
        first = scorer.score(ref(task), [["a", "a"], ["b", "a"]])
        assert scorer.score(ref(task, 1), [["a"]]) != first
    with Scorer() as scorer:
        assert scorer.score(ref(task), [["a", "a"], ["b", "a"]]) == first


def test_how_an_environment_behaves_is_part_of_the_version(games, monkeypatch):
    before = registry.task_version(installed("guess"))
    assert before != registry.task_version(installed("guess", turns=9))
    monkeypatch.setattr(determinism, "transcript_hash", lambda spec: "f" * 16)
    assert before != registry.task_version(installed("guess"))


def test_held_out_episodes_are_never_met_in_training(games):
    task = installed("echo")
    with Scorer() as scorer:
        trained = scorer.score(ref(task), []).prompt.rpartition(" ")[2]
        held_out = scorer.score(ref(task, seed=evaluation_seed(task)), []).prompt.rpartition(" ")[2]
    assert is_evaluation(evaluation_seed(task))
    assert (int(trained) % 2, int(held_out) % 2) == (0, 1)
    assert int(trained) == environment_seed(4 << 20, 0)


@pytest.mark.parametrize(
    ("name", "turns", "said"),
    [
        ("guess", 1, "set turns in its settings to the maximum number of actions of an episode"),
        ("one_turn", 4, "a step returns (observation, reward, done)"),
        ("clumsy", 4, "ValueError: invalid literal for int"),
    ],
)
def test_a_function_of_the_other_kind_is_one_line(games, name, turns, said):
    task = f"games_of_mine:{name}"
    registry.install([task], {task: {"turns": turns}})
    with pytest.raises(ScorerFailed) as failed, Scorer():
        pass
    assert said in str(failed.value)
    assert task in str(failed.value)


@pytest.mark.parametrize("turns", [0, 33, "many"])
def test_a_number_of_turns_that_is_none(games, turns):
    with pytest.raises(ConfigError, match=r"turns is .*, not a whole number, 1 to 32"):
        installed("guess", turns=turns)


def test_a_function_with_a_parameter_turns_is_given_it(games):
    task = installed("counting", turns=5)
    with Scorer() as scorer:
        assert scorer.score(ref(task), []).prompt == "You have 5 turns"


def test_the_guides_own_examples_work(tmp_path, monkeypatch, tasks_as_before):
    """The examples are copied from docs/own-task.md: the words and the guessing game with their
    configurations, and the environments of rows and tools."""
    text = (Path(__file__).parents[3] / "docs" / "own-task.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    tables = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    begin = {"words": "def reverse(", "games": "def guess("}
    begin |= {"riddles": "def riddle(", "shop": "class Shop"}
    for name, begins in begin.items():
        (block,) = (block for block in blocks if begins in block)
        (tmp_path / f"{name}.py").write_text(block)
    row = lambda n: json.dumps({"prompt": f"{n}?", "answer": "a", "hint": "b"}) + "\n"
    (tmp_path / "riddles.jsonl").write_text("".join(map(row, range(20))))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(determinism, "transcript_hash", lambda spec: "0" * 16)
    for name in ('modules = ["words:reverse"]', "# guess.toml\n"):
        (configuration,) = (each for each in tables if name in each)
        (tmp_path / "swarm.toml").write_text(configuration)
        task = settings.load(tmp_path / "swarm.toml").config.task
        registry.install(task.modules, task.settings, task.names)
        registry.check_names(task.names)
    registry.install(["shop:Shop"], {"shop:Shop": {"turns": 4}})
    rows = DatasetConfig(source=str(tmp_path / "riddles.jsonl"), verifier="riddles:riddle", turns=3)
    registry.install_datasets({"data/riddles": rows}, tmp_path)
    paid = '<tool_call>{"name": "buy", "arguments": {"item": "tea", "money": 3}}</tool_call>'
    with Scorer() as scorer:
        asked = scorer.score(ref("words:reverse"), []).prompt
        (word,) = re.fullmatch(r"Spell this word backward: (\w{5})\nAnswer: ", asked).groups()
        assert scorer.score(ref("words:reverse"), [word[::-1], word]).rewards == [1.0, 0.0]
        guess = scorer.score(ref("games:guess"), [[str(n) for n in range(1, 51, 10)], ["0"] * 6])
        riddle = scorer.score(ref("data/riddles"), [["no", "a"]])
        bought = scorer.score(ref("shop:Shop"), [[paid, "Done."], ["Done."]])
    assert guess.prompt == "I am thinking of a number from 1 to 50. Guess."
    assert set(guess.episodes[0].observations) <= {"Higher.", "Lower.", "Right."}
    assert (guess.rewards[1], guess.episodes[1].done) == (0.0, True)
    assert riddle.rewards == [1.0]
    assert riddle.episodes[0].observations[0] == "No. b 2 attempts left."
    assert bought.rewards == [1.0, 0.0]
    assert bought.prompt.startswith("Buy tea.\nYou can call functions")


def test_form_of_a_completion_must_fit_the_task(games):
    installed("guess")
    with Scorer() as scorer:
        with pytest.raises(ValueError, match="is a list of actions"):
            scorer.score(ref(GUESS), ["7"])
        with pytest.raises(ValueError, match="is an answer"):
            scorer.score(ref(), [["7"]])
        with pytest.raises(ValueError, match="33 actions, more than 32"):
            scorer.score(ref(GUESS), [["7"] * 33])

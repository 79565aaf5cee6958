"""Classes for TRL's `environment_factory`: a policy calls their public methods as tools, in the
scorer's sandbox.
"""

import json
import re

import pytest

from swarmnode.config import DatasetConfig
from swarmnode.errors import ConfigError
from swarmnode.tasks import determinism, registry
from swarmnode.tasks.client import Scorer, ScorerFailed
from swarmnode.tasks.determinism import transcript_hash
from swarmnode.tool_prompt import split
from tests.support.fakes.scorer import InProcessScorer
from tests.support.registered import ref, tasks_restored

pytest.importorskip("transformers", reason="its parser reads the calls")

SHOP = '''
import random


class Shop:
    def __init__(self):
        self.paid = None

    def reset(self, wanted="tea", seed=0, **row):
        self._wanted = wanted
        self._price = random.Random(seed).randrange(1, 9)
        self._noted = []
        return f" Buy {wanted} for its price."

    def price(self, item: str) -> int:
        """Ask what an item costs.

        Args:
            item: What to buy.
        """
        if item == "secret":
            raise KeyError("not for sale")
        return self._price

    async def buy(self, item: str, money: int) -> str:
        """Buy an item.

        Args:
            item: What to buy.
            money: How much to pay.
        """
        self.paid = item == self._wanted and money == self._price
        return "Thank you." if self.paid else "No."

    def eat(self) -> str:
        """Allocate without bound."""
        return "x" * 2**30

    def _hidden(self):
        raise AssertionError

    def get_reward(self) -> float:
        return float(bool(self.paid))


class NoTools:
    def reset(self):
        return None

    def get_reward(self):
        return 1.0


class Undocumented(Shop):
    def steal(self, item):
        return "no"


class Elsewhere(Shop):
    """Its models write calls in another form."""

    response_template = {
        "start_anchor": "x",
        "fields": {
            "tool_calls": {
                "open": "[CALL]",
                "close": "[/CALL]",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        },
    }


class Malformed(Shop):
    response_template = {"fields": {"tool_calls": {"open_pattern": "("}}, "start_anchor": "x"}


class Callless(Shop):
    response_template = {"fields": {"content": {"content": "text"}}, "start_anchor": "x"}


def riddle(prompt, answer, turns):
    """A function over the columns of a dataset."""
    left = turns

    def step(action):
        nonlocal left
        left -= 1
        return f"{left} left", float(action == answer), action == answer

    return f"{prompt} You have {turns} attempts.", step
'''
NAME, TURNS = "shop_of_mine:Shop", 6


@pytest.fixture
def shop(tmp_path, monkeypatch, tasks_as_before):
    (tmp_path / "shop_of_mine.py").write_text(SHOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """One for all tests: its child imports transformers. The determinism check is in a test."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop_of_mine.py").write_text(SHOP)
    with pytest.MonkeyPatch.context() as patch, tasks_restored():
        patch.syspath_prepend(str(folder))
        patch.setattr(determinism, "transcript_hash", lambda spec: "0" * 16)
        registry.install([NAME], {NAME: {"turns": TURNS}})
        with Scorer() as scorer:
            yield scorer


def price_of(scorer):
    (episode,) = scorer.score(ref(NAME), [[call("price", item="tea")]]).episodes
    return int(episode.observations[0])


def test_first_text_describes_the_tools(scorer):
    prompt = scorer.score(ref(NAME), []).prompt
    assert prompt.startswith(" Buy tea for its price.\nYou can call functions")
    assert '<tool_call>{"name": "...", "arguments": {...}}</tool_call>' in prompt
    described = [json.loads(line) for line in prompt.splitlines() if line.startswith('{"name')]
    assert [each["name"] for each in described] == ["buy", "eat", "price"]
    assert described[0]["parameters"]["properties"]["money"]["type"] == "integer"


def test_tool_calls_are_rewarded_at_the_last_turn(scorer):
    price = price_of(scorer)
    bought, too_little, asked = (
        [call("price", item="tea"), f"I pay. {call('buy', item='tea', money=price)}", "Done."],
        [call("buy", item="tea", money=price + 1), "Done."],
        [call("price", item="tea") + call("price", item="milk")],
    )
    scored = scorer.score(ref(NAME), [bought, too_little, asked])
    assert scored.rewards == [1.0, 0.0, 0.0]
    assert scored.episodes[0].observations == [str(price), "Thank you.", ""]
    assert scored.episodes[2].observations == [f"{price}\n{price}"]
    assert not scored.episodes[2].done
    assert (scored.errors, scored.error) == (0, "")


def test_the_reward_counts_when_the_turns_are_used_up(scorer):
    bought = call("buy", item="tea", money=price_of(scorer))
    scored = scorer.score(ref(NAME), [[bought, *[call("price", item="tea")] * (TURNS - 1)]])
    assert (scored.rewards, scored.episodes[0].done) == ([1.0], True)


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("<tool_call>{bad}</tool_call>", "That call cannot be read"),
        ("<tool_call>" + "[" * 2000 + "</tool_call>", "That call cannot be read"),
        (call("_hidden"), "There is no such function: _hidden."),
        (call("__class__"), "There is no such function: __class__."),
        (call("price"), "price failed: TypeError: Shop.price() missing 1 required"),
        (call("price", item="secret"), "price failed: KeyError: 'not for sale'"),
        (call("price", item="tea") * 20, "Only the first 8 calls of a turn are made."),
    ],
)
def test_failed_call_continues_the_episode(scorer, action, said):
    price = price_of(scorer)
    scored = scorer.score(ref(NAME), [[action, call("buy", item="tea", money=price), "Done."]])
    assert said in scored.episodes[0].observations[0]
    assert scored.rewards == [1.0]
    assert scored.errors == 0


def test_a_tool_that_allocates_without_bound_costs_its_episode(scorer):
    scored = scorer.score(ref(NAME), [[call("eat")], [call("price", item="tea")]])
    assert scored.episodes[0].done
    assert scored.errors == 1
    assert scored.error.startswith("MemoryError")
    assert not scored.episodes[1].done


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NoTools", "it needs public methods"),
        ("Undocumented", "its tools: DocstringParsingExc"),
        ("Malformed", "its response_template: ValueError: Field 'tool_calls': invalid open"),
        ("Callless", "its response_template: ValueError: it has no field tool_calls"),
    ],
)
def test_a_class_that_is_no_environment_is_one_line(shop, name, said):
    task = f"shop_of_mine:{name}"
    registry.install([task], {task: {"turns": 4}})
    with pytest.raises(ScorerFailed) as failed, Scorer():
        pass
    assert said in str(failed.value)


def test_a_class_may_name_another_form_of_a_call(shop, monkeypatch):
    task = "shop_of_mine:Elsewhere"
    monkeypatch.setattr(determinism, "transcript_hash", lambda spec: "0" * 16)
    registry.install([task], {task: {"turns": TURNS}})
    theirs = lambda *names, **given: (
        call(*names, **given).replace("tool_call>", "CALL]").replace("<", "[")
    )
    with Scorer() as scorer:
        first = split(scorer.score(ref(task), []).prompt)
        played = scorer.score(
            ref(task), [[theirs("price", item="tea")], [call("price", item="tea")]]
        ).episodes
    assert json.loads(first.form)["fields"]["tool_calls"]["open"] == "[CALL]"
    assert [tool["function"]["name"] for tool in first.tools] == ["buy", "eat", "price"]
    assert played[0].observations[0].isdecimal()
    assert (played[1].observations, played[1].done) == ([""], True)


def dataset(shop, verifier, **changes):
    rows = [{"prompt": f"Row {n}.", "answer": str(n), "wanted": f"item {n}"} for n in range(40)]
    (shop / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DatasetConfig(source=str(shop / "rows.jsonl"), verifier=verifier, **changes)
    registry.install_datasets({"data/shop": config}, shop)
    return "data/shop"


async def test_reset_is_given_the_columns_of_a_row(shop):
    task = dataset(shop, NAME, turns=TURNS, template="{prompt} Hurry.")
    with Scorer() as scorer:
        prompt = scorer.score(ref(task), []).prompt
        row = prompt.partition(".")[0].removeprefix("Row ")
        assert prompt.startswith(f"Row {row}. Hurry. Buy item {row} for its price.\nYou can")
        actions = [call("price", item="x"), call("buy", item=f"item {row}", money=0), "Done."]
        price = scorer.score(ref(task), [actions[:1]]).episodes[0].observations[0]
        actions[1] = call("buy", item=f"item {row}", money=int(price))
        scored = scorer.score(ref(task), [actions])
    assert scored.rewards == [1.0]
    (found,) = await InProcessScorer().score_many([(ref(task), [actions])])
    assert found == scored


def test_a_function_is_given_the_columns_that_it_names(shop):
    task = dataset(shop, "shop_of_mine:riddle", turns=3)
    with Scorer() as scorer:
        prompt = scorer.score(ref(task), []).prompt
        row = prompt.partition(".")[0].removeprefix("Row ")
        assert prompt == f"Row {row}. You have 3 attempts."
        scored = scorer.score(ref(task), [["no", row], ["no"] * 3])
    assert scored.rewards == [1.0, 0.0]
    assert scored.episodes[1].observations == ["2 left", "1 left", "0 left"]


def test_the_same_calls_have_the_same_results(shop):
    registry.install([NAME], {NAME: {"turns": TURNS}})
    assert re.fullmatch("[0-9a-f]{16}", transcript_hash(registry.TASKS[NAME]))


def test_turns_are_not_for_a_verifier(shop):
    with pytest.raises(ConfigError, match="turns is for an own environment"):
        dataset(shop, "exact", turns=3)

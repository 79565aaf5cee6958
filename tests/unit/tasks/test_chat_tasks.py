"""Tasks for instruct models: variety of the questions, and which answers earn."""

import pytest

from swarmnode.tasks import builtin, chat
from swarmnode.tasks.registry import TASKS
from swarmnode.tasks.seeds import evaluation_seed


def builtin_item(name):
    return lambda seed: builtin.GENERATORS[name](seed, **TASKS[f"builtin/{name}"].settings)


@pytest.mark.parametrize(
    "make", [*chat.GENERATORS.values(), *map(builtin_item, builtin.GENERATORS)]
)
def test_prompts_are_ascii_and_right_answers_earn(make):
    for address in range(300):
        item = make(address)
        assert item.prompt.isascii()
        assert item.reward(item.answer) == 1.0
        assert item.reward("") == 0.0


@pytest.mark.parametrize("name", chat.GENERATORS)
def test_held_out_questions_are_not_the_training_ones(name):
    make, seed = chat.GENERATORS[name], evaluation_seed(f"chat/{name}")
    held_out = {make(seed + index).prompt for index in range(128)}
    trained = {make((number << 20) + number).prompt for number in range(160)}  # 40 steps of 4
    assert len(held_out) > 110
    assert len(held_out & trained) <= 0.2 * len(held_out)

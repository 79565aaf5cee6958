"""Tasks for instruct models: variety of the questions, and which answers earn."""

import json

import pytest

from swarmnode.tasks import chat
from swarmnode.tasks.seeds import evaluation_seed

PERSON = {"name": "Anna", "age": 34, "city": "Paris"}
RIGHT = json.dumps(PERSON)


@pytest.mark.parametrize("name", chat.GENERATORS)
def test_prompts_are_ascii_and_right_answers_earn(name):
    for address in range(300):
        item = chat.GENERATORS[name](address)
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


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (RIGHT, True),
        (f"```json\n{RIGHT}\n```", True),
        (f"```\n{json.dumps(PERSON, indent=2)}\n```\n", True),
        (f" {RIGHT}\n```", True),
        (f"```json\n{RIGHT}", True),
        ('{"city": "Paris", "age": 34.0, "name": "Anna"}', True),
        (f"Sure:\n{RIGHT}", False),
        (f"{RIGHT}\n\nIn this example", False),
        (f"```json\n{RIGHT}\n```\nDone.", False),
        (f"```python\n{RIGHT}\n```", False),
        (f"```json\n{RIGHT}\n``````", False),
        (f"{RIGHT} {RIGHT}", False),
        (f"[{RIGHT}]", False),
        (RIGHT.replace("{", '{"name": "Hanna", '), False),
        (RIGHT.replace("{", '{"name": "Anna", '), False),
        (RIGHT.replace("34", '"34"'), False),
        (RIGHT.replace("34", "35"), False),
        (RIGHT.replace("}", ', "country": "France"}'), False),
        (RIGHT.replace('"', "'"), False),
        (RIGHT[:-1], False),
        (RIGHT[1:], False),
        ("}{", False),
        ("{}", False),
        ("{" + "[" * 4000 + "}", False),
        ("{NaN}", False),
        ("{" + " }" * 2000, False),
    ],
)
def test_an_answer_is_the_json_object_alone(text, right):
    assert chat.is_json_of(PERSON, text) is right

"""Vectors of tasks, for `vectors.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from protocol.generate.frames import Vector, derived
from swarmnode.tasks import chat
from swarmnode.tasks.builtin import GENERATORS, Item
from swarmnode.tasks.client import prepare
from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.scorer import judge
from swarmnode.tasks.statement import states
from swarmnode.wire.messages import TaskRef

BUILTIN = ("builtin/copy", "builtin/sum")
ADDRESSES = ((0, 0), (5 << 20, 7), ((2**42 - 1) << 20, 2**20 - 1))


def item(task: str, seed: int, index: int) -> Item:
    spec = TASKS[task]
    if spec.kind == "chat":
        return chat.GENERATORS[spec.generator](seed + index)
    return GENERATORS[spec.generator](seed + index, **spec.settings)


def worth(task: str, seed: int, index: int, text: str) -> float:
    question = prepare(TaskRef(task, task_version(task), seed, index), [text])
    return judge(question, item).rewards[0]


def tasks() -> Iterator[Vector]:
    for task in BUILTIN:
        yield from _of_task(task, "builtin", ADDRESSES, answers)


def chat_tasks() -> Iterator[Vector]:
    addresses = (*ADDRESSES, *((number << 20, number) for number in range(1, 9)))
    for name in chat.GENERATORS:
        yield from _of_task(f"chat/{name}", "chat", addresses, CHAT_ANSWERS[name])


def statements() -> Iterator[Vector]:
    for right, texts in STATEMENTS.items():
        for text in texts:
            given = {"text": text, "right": right}
            yield derived(f"{right}: {text}", "states", given, states(text, right))


def _of_task(
    task: str,
    kind: str,
    addresses: Sequence[tuple[int, int]],
    texts: Callable[[str], Iterator[tuple[str, str]]],
) -> Iterator[Vector]:
    """Yield the vectors of a task: its version, its questions at `addresses`, and the rewards of
    `texts` (right answer → name, text) at the last address.
    """
    yield derived(f"version of {task}", f"{kind}_version", {"task": task}, task_version(task))
    for seed, index in addresses:
        asked = {"task": task, "seed": seed, "index": index}
        made = item(task, seed, index)
        yield derived(
            f"{task} at {seed} + {index}", f"{kind}_question", asked, [made.prompt, made.answer]
        )
    for name, text in texts(made.answer):
        yield derived(
            f"{task}: {name}",
            f"{kind}_reward",
            {**asked, "text": text},
            worth(task, seed, index, text),
        )


def answers(right: str) -> Iterator[tuple[str, str]]:
    yield "right", right
    yield "right, in a tag", f"I think.\n<answer>\u2003{right}\n</answer>"
    yield "right, in a tag, and more after it", f"<answer>{right}</answer> Yes."
    yield "the last of two tags", f"<answer>x</answer><answer>{right}</answer>"
    yield "right, with a space and no tag", f"{right} "
    yield "a tag that does not begin", f"{right}</answer>"
    yield "a tag that does not end", f"<answer>{right}"
    yield "one digit too many", f"{right}0"
    yield "one digit", right[:1]
    yield "first digit wrong", chr((ord(right[0]) - ord("0") + 1) % 10 + ord("0")) + right[1:]
    yield (
        "white space in Python but not in JavaScript",
        f"<answer>\u001c\u0085{right}\u001f</answer>",
    )
    yield "white space in JavaScript only", f"<answer>\ufeff{right}</answer>"
    yield "another alphabet", f"{right}\U0001f98b"
    yield "nothing", ""
    yield "nothing, in a tag", "<answer> </answer>"
    yield "right, and 256 bytes in all", right + "a" * (256 - len(right))
    yield "right, and 257 bytes in all", right + "a" * (257 - len(right))


def json_answers(right: str) -> Iterator[tuple[str, str]]:
    yield "right", right
    yield "right, in a tag", f"<answer>{right}</answer>"
    yield "right, in a tag, and more after it", f"<answer>{right}</answer> Yes."
    yield "right, in a fenced block", f"```json\n{right}\n```"
    yield "right, in a block without a language", f"```\n{right}\n```"
    yield "right, between sentences", f"Here it is:\n\n```json\n{right}\n```\n\nIs that all?"
    yield "right, indented", json.dumps(json.loads(right), indent=4)
    yield "right, and text after it", f"{right}\n\nIn this example"
    yield "right, in a fenced block, and text after it", f"```json\n{right}\n```\n\nThis is"
    yield "right, and a closing fence", f"{right}\n```\n"
    yield "right, and an opening fence", f"```json\n{right}"
    yield "right, in a block of another language", f"```python\n{right}\n```"
    yield "right, with a key that occurs twice", right.replace("{", '{"name": "Zoe", ')
    yield "right, in another order", json.dumps(dict(reversed(json.loads(right).items())))
    yield "right, twice", f"{right}\n{right}"
    yield (
        "right, with a number as text",
        right.replace(' "age": ', ' "age": "').replace(", ", '", '),
    )
    yield "right, with another key", right.replace("}", ', "job": "baker"}')
    yield "right, with a comma too many", right.replace("}", ",}")
    yield "right, in a list", f"[{right}]"
    yield "right, inside another object", f'{{"person": {right}}}'
    yield "right, with single quotes", right.replace('"', "'")
    yield "without its end", right[:-1]
    yield "without its beginning", right[1:]
    yield "without a key", '{"name": "Zoe"}'
    yield "another value", right.replace('"age": ', '"age": 1')
    yield "a whole number with a decimal point", right.replace(', "city"', '.0, "city"')
    yield "nothing", ""
    yield "right, and 4096 bytes in all", right + " " * (4096 - len(right))
    yield "right, and 4097 bytes in all", right + " " * (4097 - len(right))
    yield "nested deeply", '{"name": ' + "[" * 2000 + "]" * 2000 + "}"


def date_answers(right: str) -> Iterator[tuple[str, str]]:
    yield "right", right
    yield "right, in a sentence", f"The date is {right}."
    yield "right, in bold", f"Sure!\n\n**{right}**"
    yield "right, in bold, in a sentence that was cut", f"**{right}** is the date in"
    yield "with slashes", right.replace("-", "/")
    yield "the year alone", right[:4]


def number_answers(right: str) -> Iterator[tuple[str, str]]:
    yield "right", right
    yield "right, in a tag", f"I add.\n<answer>{right}</answer>"
    yield "right, in a tag, and more after it", f"<answer>{right}</answer> Yes."
    yield "right, in a sentence", f"The answer is {right}."
    yield "right, in a sentence that was cut", f"The answer is {right}, an example of how we"
    yield "right, but the last sentence has another one", f"It is {right}. No, it is 1."
    yield "one more", str(int(right) + 1)
    yield "nothing", ""


CHAT_ANSWERS = {
    "json_fields": json_answers,
    "date": date_answers,
    "units": number_answers,
    "sum": number_answers,
}
STATEMENTS = {
    "5": [
        *("5", "5.", "**5**", "$5$", " 5", "=5", "= 5", "+5", "05", "5a", "5.0", "-5", "5/", "5 6"),
        *("\\boxed{5}", "It is $\\boxed{5}$. No.", "\\boxed{5} \\boxed{6}", "\\boxed{ {5} }"),
        *("\\boxed{5", "\\boxed{5} is the result", "\\boxed{The answer is 5}"),
        *("7 \u2212 2 equals 5.", "7 - 2 = 5", "7 - 2 = 5 apples.", "7 - 2 equals to 5"),
        *("The answer is 5.", "The answer is **5**.", "**Answer:** 5", "Answer: 5", "Is it 5?"),
        *("4 is too small.\n\nIt is 5.", "It is 4. No, it is 5.", "It is 5. No, it is 4.", "5\n4"),
        *("It is 5, because 5 divides both.", "There are 5 primes between 3 and 14 (inclusive)."),
        *("5 primes lie between 3 and 14.", "It appears 5 times.", "It is 5 (binary)", "5 apples"),
        *("It is 5 or 6.", "It is not 5.", "It isn't 5.", "It is 5, 6", "It is 5 x 2", "3 + 2"),
        *("It is 5 times 2", "between 5 and 9", "The LCM of 1 and 5", "It is 5\n", "x: 5; y: 6"),
        *("It is 5\u00a0legs", "It is \u0665.", "1:5", "base-5"),
    ],
    "-3": ["4 - 7 = \u22123", "-3", "\u20133", "It is 3", "It is -3."],
    "1024": ["It is 1,024.", "It is 10,24.", "1 024"],
    "5/7": ["5/7", "20/28 = 5/7", "\\dfrac{5}{7}", "It is $\\frac{5}{7}$.", "10/14", "It is 5/7/1"],
    "eert": [
        *("eert.", '"eert"', "**eert**", "EERT", "tree eert", "e-e-r-t", "eert\n\nDone."),
        *(
            'The word "tree" spelled backward is "eert."',
            "Backward: eert",
            "`eert` it is",
            "is eert",
        ),
        *('"eert" and "tree"', "It is eert tree", "**eert** is the word."),
    ],
    "GO ON": ["GO ON", "It says: GO ON.", "The text is:\n\nGO ON", "=GO ON", "It is **GO** ON"],
}

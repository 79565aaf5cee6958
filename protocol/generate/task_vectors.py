"""Vectors of tasks, for `vectors.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol.generate.frames import Vector
from swarmnode.tasks.answers import find_answer, has_text_after
from swarmnode.tasks.builtin import GENERATORS, Item
from swarmnode.tasks.registry import TASKS, task_version

BUILTIN = ("builtin/copy", "builtin/sum")
ADDRESSES = ((0, 0), (5 << 20, 7), ((2**42 - 1) << 20, 2**20 - 1))


def item(task: str, seed: int, index: int) -> Item:
    spec = TASKS[task]
    return GENERATORS[spec.generator](seed + index, **spec.settings)


def worth(task: str, seed: int, index: int, text: str) -> float:
    answer = find_answer(text)
    return (
        item(task, seed, index).reward(answer)
        if len(answer.encode()) <= TASKS[task].max_answer_bytes and not has_text_after(text, "tag")
        else 0.0
    )


def derived(name: str, what: str, given: dict[str, Any], output: object) -> Vector:
    return {"name": name, "derive": what, "input": given, "output": output}


def tasks() -> Iterator[Vector]:
    for task in BUILTIN:
        yield derived(f"version of {task}", "builtin_version", {"task": task}, task_version(task))
        for seed, index in ADDRESSES:
            asked = {"task": task, "seed": seed, "index": index}
            made = item(task, seed, index)
            yield derived(
                f"{task} at {seed} + {index}", "builtin_question", asked, [made.prompt, made.answer]
            )
        for name, text in answers(made.answer):
            yield derived(
                f"{task}: {name}",
                "builtin_reward",
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

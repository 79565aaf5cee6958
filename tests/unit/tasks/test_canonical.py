"""Text after a tag, and other notations of an answer, earn nothing in the built-in tasks."""

import pytest

from swarmnode.tasks.answers import has_text_after
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.seeds import task_seed
from swarmnode.wire.messages import TaskRef


@pytest.mark.parametrize(
    ("text", "how", "tail"),
    [
        ("<answer>7</answer>", "tag", False),
        ("I think. <answer> 7 </answer>", "tag", False),
        ("<answer>7</answer>.", "tag", True),
        ("<answer>7</answer> ", "tag", True),
        ("7 ", "tag", False),
        ("so \\boxed{7}", "boxed", False),
        ("so \\boxed{7}!", "boxed", True),
        ("it is 7", "last_number", False),
        ("it is 7.", "last_number", True),
        ("choose B", "last_letter", False),
        ("choose B)", "last_letter", True),
        ("a\nb", "last_line", False),
        ("a\nb ", "last_line", True),
        ("anything ", "whole", False),
        ("\\boxed{7} #", "auto", True),
        ("<answer>7</answer>#", "auto", True),
        ("7 #", "auto", False),
    ],
)
def test_text_after_an_answer_is_found(text, how, tail):
    assert has_text_after(text, how) is tail


@pytest.mark.parametrize("task", [name for name in TASKS if name.startswith("rg/")])
def test_a_bare_answer_and_a_sentence_earn_and_other_notations_do_not(task):
    ref = TaskRef(task, task_version(task), *task_seed(bytes(32), "peer", 3, task))
    with Scorer() as scorer:
        answer = scorer.score_many([(ref, [])], reveal=True)[0].answer
        paid = [
            answer,
            f"<answer>{answer}</answer>",
            f"think <answer>{answer}</answer>",
            f"{answer}.",
            f"The answer is {answer}.",
            f"The answer is **{answer}**.",
            f"Let me think.\n\n\\boxed{{{answer}}}",
        ]
        unpaid = [
            f"+{answer}",
            f"={answer}",
            f"0{answer}",
            f"{answer} or {answer}1",
            f"The answer is {answer}.\nOr not",
            f"<answer>{answer}</answer>.",
            f"<answer>{answer}</answer> ",
        ]
        (scored,) = scorer.score_many([(ref, [*paid, *unpaid])])
    assert scored.rewards == [1.0] * len(paid) + [0.0] * len(unpaid)

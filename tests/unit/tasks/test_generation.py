"""Questions are equal on all nodes, and the right answers are reasoning-gym's."""

import hashlib
import json
import subprocess
import sys

from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.seeds import INDEX_SPAN, evaluation_seed
from swarmnode.wire.messages import TaskRef
from tests.support.one_turn import ONE_TURN_TASKS
from tests.support.whole_gym import IMPORT

GYM = [task for task in TASKS if task.startswith("rg/")]
ADDRESSES = [
    (2347347902506991616, 0),
    (2347347902506991616, 1),
    (2347347902506991616, 1048575),
    (4337131653191172096, 0),
    (4577882918044565504, 4242),
]

# Calls the library in a separate process as its users do: a new dataset for every question, and an
# answer with full reward.
REFERENCE = (
    IMPORT
    + """
import json
found = []
for name, settings, seed, index, texts in json.load(sys.stdin):
    dataset = reasoning_gym.create_dataset(name, seed=seed, size=2**20, **settings)
    entry = dataset[index]
    answer = entry["answer"]
    texts = [answer if text is None else text.replace("ANSWER", answer) for text in texts]
    found.append([entry["question"], texts, [dataset.score_answer(text, entry) for text in texts]])
json.dump(found, sys.stdout)
"""
)


def ref(task, address):
    return TaskRef(task, task_version(task), *address)


def test_questions_are_what_other_nodes_get(scorer):
    refs = [ref(task, address) for task in ONE_TURN_TASKS for address in ADDRESSES]
    prompts = [scored.prompt for scored in scorer.score_many([(each, []) for each in refs])]
    digest = hashlib.blake2b("\0".join(prompts).encode(), digest_size=8).hexdigest()
    assert digest == "d8ed37cc0716aad1", "a question has changed"


def test_questions_and_answers_are_reasoning_gyms(scorer):
    """The adapter loads each dataset alone and keeps one object. Users of the library make one
    dataset per seed. Both must agree, up to 63-bit seeds."""
    texts = [None, "ANSWER", "ANSWER ", "=ANSWER", "ANSWERANSWER", "abc", ""]
    texts += ["0", "1", "1,0", "+2", "2.0", "10", "4/8"]
    addresses = [
        *ADDRESSES,
        (0, 0),
        (evaluation_seed("x"), INDEX_SPAN - 1),
        (2**63 - INDEX_SPAN, INDEX_SPAN - 1),
    ]
    jobs = [
        (TASKS[task].generator.split(".")[1], dict(TASKS[task].settings), *address, texts)
        for task in GYM
        for address in addresses
    ]
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=True,
    )
    references = json.loads(done.stdout)
    refs = [ref(task, address) for task in GYM for address in addresses]
    scored = scorer.score_many(
        [(question, answers) for question, (_, answers, _) in zip(refs, references, strict=True)]
    )
    assert [result.prompt for result in scored] == [question for question, _, _ in references]
    # among the answers with full reward from the library, the form that the library writes
    assert [result.rewards for result in scored] == [
        [float(text.strip() == texts[0]) for text in texts] for _, texts, _ in references
    ]
    assert all(marks[0] >= 1 for _, _, marks in references)
    assert all(result.rewards[0] == 1.0 for result in scored)  # the library's own answer


def test_order_and_repetition_do_not_change_a_question(scorer):
    refs = [ref(task, address) for task in ONE_TURN_TASKS for address in ADDRESSES]
    forward = scorer.score_many([(r, []) for r in refs])
    backward = scorer.score_many([(r, []) for r in reversed(refs)])
    assert forward == backward[::-1]

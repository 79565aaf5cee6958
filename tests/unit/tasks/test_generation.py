"""Questions are equal on all nodes, and the right answers are reasoning-gym's."""

import hashlib
import json
import subprocess
import sys

import pytest

from swarmnode.tasks.builtin import GENERATORS
from swarmnode.tasks.client import Scorer
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

# blake2b-64 of the prompts at ADDRESSES, joined by NUL.
GOLDEN = {
    "builtin/copy": "6ab081863cd57c38",
    "builtin/sum": "28f376f8db996a97",
    "chat/json_fields": "ab9fa289f924a3aa",
    "chat/date": "7654b2dadc53dbea",
    "chat/units": "7495ae63d3626eca",
    "chat/sum": "88c6260bde0e78e0",
    "rg/chain_sum": "151860bc30705b7e",
    "rg/basic_arithmetic": "41d266e65294958d",
    "rg/base_conversion": "0fad81944141e597",
    "rg/spell_backward": "afc44116d7f94c52",
    "rg/gcd": "98471e161d54520c",
    "rg/lcm": "ffb2f9b603515c4a",
    "rg/count_bits": "9eaf528060f00679",
    "rg/fraction_simplification": "4d2215c05e27319d",
    "rg/products": "5559c58a6ebbf17d",
    "rg/leg_counting": "129ef03547779057",
    "rg/count_primes": "d425a9ed0e27f15a",
    "rg/letter_counting": "496e889ce9faf822",
    "rg/caesar_cipher": "af6118b0e8c3fcc8",
    "rg/binary_alternation": "af0e463d93c33bd3",
    "rg/string_synthesis": "3cd6296838b8767c",
}

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


@pytest.fixture(scope="module")
def scorer():
    with Scorer() as scorer:
        yield scorer


def ref(task, address):
    return TaskRef(task, task_version(task), *address)


@pytest.mark.parametrize("task", ONE_TURN_TASKS)
def test_questions_are_what_other_nodes_get(scorer, task):
    prompts = [scorer.score(ref(task, address), []).prompt for address in ADDRESSES]
    assert hashlib.blake2b("\0".join(prompts).encode(), digest_size=8).hexdigest() == GOLDEN[task]


def test_questions_and_answers_are_reasoning_gyms(scorer):
    """The adapter loads each dataset alone and keeps one object. Users of the library make one
    dataset per seed. Both must agree, up to 63-bit seeds."""
    texts = [
        None,
        "ANSWER",
        "ANSWER ",
        "=ANSWER",
        "0",
        "1",
        "1,0",
        "+2",
        "2.0",
        "10",
        "4/8",
        "abc",
        "",
        "ANSWERANSWER",
    ]
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


def test_reward_is_for_the_answer_alone(scorer):
    for task in GYM:
        assert scorer.score(
            ref(task, ADDRESSES[0]), ["0 1 2 3 4 5 6 7 8 9 10 11 1/2 2/3 a b c"]
        ).rewards == [0.0]


@pytest.mark.parametrize("name", GENERATORS)
def test_builtin_prompts_are_printable_ascii(name):
    settings = TASKS[f"builtin/{name}"].settings
    for seed in range(200):
        item = GENERATORS[name](seed, **settings)
        assert item.prompt.isascii()
        assert item.prompt.isprintable()
        assert item.reward(item.answer) == 1.0

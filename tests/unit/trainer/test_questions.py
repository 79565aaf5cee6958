"""The series of questions, in swarms with and without a choice."""

from collections import Counter

import pytest

from swarmnode.config import Config
from swarmnode.swarm.manifest import members_choose_difficulty, required_protocols
from swarmnode.tasks import registry
from swarmnode.tasks.seeds import choose_task, is_address, is_evaluation, task_seed
from swarmnode.trainer.questions import Questions
from swarmnode.trainer.state import Counters
from swarmnode.wire.ids import CHOICE_PROTOCOLS, PROTOCOLS
from tests.support.manifests import founded

NAMES = ["rg/gcd", "rg/lcm"]
SWARM, PEER = bytes(range(32)), "12D3KooWPeer"


@pytest.fixture(autouse=True)
def levels():
    registry.install([], {"rg/gcd": {"max_value": [20, 200, 900]}})
    yield
    registry.install([], {"rg/gcd": {}})


def series(chooses=True, count=400):
    questions = Questions(NAMES, Counters(peer=PEER, swarm=SWARM.hex()), chooses)
    return questions, [questions.next() for _ in range(count)]


def test_without_a_choice_everything_follows_from_the_number():
    _, asked = series(chooses=False)
    for sequence, ref in asked:
        assert (ref.id, ref.difficulty) == (choose_task(NAMES, SWARM, PEER, sequence), 0)
        assert (ref.seed, ref.index) == task_seed(SWARM, PEER, sequence, ref.id)


def test_choice_covers_all_tasks_and_difficulties_evenly():
    _, asked = series()
    assert [sequence for sequence, _ in asked] == list(range(400))
    counts = Counter((ref.id, ref.difficulty) for _, ref in asked)
    assert set(counts) == {("rg/gcd", 0), ("rg/gcd", 1), ("rg/gcd", 2), ("rg/lcm", 0)}
    assert max(counts.values()) < 2 * min(counts.values())
    for sequence, ref in asked:
        choice = (ref.id, ref.difficulty)
        assert (ref.seed, ref.index) == task_seed(SWARM, PEER, sequence, *choice)
        assert is_address(ref.seed, ref.index)
        assert not is_evaluation(ref.seed)


def test_number_determines_the_question():
    assert series()[1][:5] == series()[1][:5]


def test_choice_requires_difficulties():
    assert required_protocols(["rg/lcm"]) == PROTOCOLS
    assert required_protocols(NAMES) == CHOICE_PROTOCOLS
    assert not members_choose_difficulty(None, ["rg/lcm"])
    assert members_choose_difficulty(None, NAMES)
    assert founded().manifest.protocols == sorted(PROTOCOLS)
    chosen = founded(config=Config.model_validate({"task": {"names": NAMES}}))
    assert chosen.manifest.protocols == sorted(CHOICE_PROTOCOLS)
    assert members_choose_difficulty(chosen, ["rg/lcm"])  # its manifest decides

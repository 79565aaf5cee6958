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


def series(chooses=True, curriculum=False, count=400):
    questions = Questions(NAMES, Counters(peer=PEER, swarm=SWARM.hex()), chooses, curriculum)
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
    assert series(curriculum=True)[1][:5] == series(curriculum=True)[1][:5]


def test_own_rewards_decide_the_next_questions():
    questions, asked = series(curriculum=True, count=40)
    for _, ref in asked * 5:
        questions.answered(ref, [1.0, 0.0] if ref.difficulty == 1 else [0.0, 0.0])
    signals = questions.signals()
    assert max(signals, key=signals.get) == "rg/gcd 1"
    evidence = questions.evidence()
    assert evidence.keys() == signals.keys()
    assert evidence["rg/gcd 1"] == pytest.approx(10.0, abs=0.1), "about the last ten groups"
    assert series()[0].evidence() == {}, "no expectations without a curriculum"
    later = Counter(ref.difficulty for _, ref in (questions.next() for _ in range(200)))
    assert later[1] > 140


def test_curriculum_without_choice_selects_tasks_at_difficulty_0():
    _, asked = series(chooses=False, curriculum=True)
    assert {(ref.id, ref.difficulty) for _, ref in asked} == {(name, 0) for name in NAMES}
    for sequence, ref in asked:
        assert (ref.seed, ref.index) == task_seed(SWARM, PEER, sequence, ref.id)


def test_choice_requires_difficulties_or_a_founder_curriculum():
    assert required_protocols(["rg/lcm"], ["cosine"]) == PROTOCOLS
    assert required_protocols(NAMES, []) == CHOICE_PROTOCOLS
    assert required_protocols(["rg/lcm"], ["curriculum"]) == CHOICE_PROTOCOLS
    assert not members_choose_difficulty(None, ["rg/lcm"], [])
    assert members_choose_difficulty(None, NAMES, [])
    assert founded().manifest.protocols == sorted(PROTOCOLS)
    chosen = founded(config=Config.model_validate({"task": {"names": NAMES}}))
    assert chosen.manifest.protocols == sorted(CHOICE_PROTOCOLS)
    assert members_choose_difficulty(chosen, ["rg/lcm"], [])  # its manifest decides

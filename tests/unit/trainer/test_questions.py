"""Which question a node asks next, in swarms with and without a choice. pytest
tests/unit/trainer/test_questions.py"""

from collections import Counter
from types import SimpleNamespace

import pytest

from swarmnode.config import Config
from swarmnode.swarm.manifest import protocols_of, spoken
from swarmnode.tasks import registry
from swarmnode.tasks.seeds import (
    bucket_seed,
    check_seed,
    choose_task,
    is_address,
    is_evaluation,
    task_seed,
)
from swarmnode.trainer.judge import Judgement
from swarmnode.trainer.questions import Questions
from swarmnode.trainer.state import Counters
from swarmnode.wire.ids import BUCKET_PROTOCOLS, PROTOCOLS, Spoken, spoken_in
from tests.support.manifests import founded

NAMES = ["rg/gcd", "rg/lcm"]
SWARM, PEER = bytes(range(32)), "12D3KooWPeer"
CHOOSES = spoken_in(BUCKET_PROTOCOLS)


@pytest.fixture(autouse=True)
def levels():
    registry.install([], {"rg/gcd": {"max_value": [20, 200, 900]}})
    yield
    registry.install([], {"rg/gcd": {}})


def series(spoken_there=CHOOSES, curriculum=False, count=400):
    questions = Questions(NAMES, Counters(peer=PEER, swarm=SWARM.hex()), spoken_there, curriculum)
    return questions, [questions.next() for _ in range(count)]


def test_without_a_choice_everything_follows_from_the_number():
    _, asked = series(Spoken())
    for sequence, ref in asked:
        assert (ref.seed, ref.index) == task_seed(SWARM, PEER, sequence)
        assert (ref.id, ref.difficulty) == (choose_task(NAMES, ref.seed, ref.index), 0)


def test_with_a_choice_all_tasks_and_difficulties_are_asked_alike_and_the_seed_is_for_them():
    _, asked = series()
    assert [sequence for sequence, _ in asked] == list(range(400))
    counts = Counter((ref.id, ref.difficulty) for _, ref in asked)
    assert set(counts) == {("rg/gcd", 0), ("rg/gcd", 1), ("rg/gcd", 2), ("rg/lcm", 0)}
    assert max(counts.values()) < 2 * min(counts.values())
    for sequence, ref in asked:
        chosen = (ref.id, ref.difficulty)
        assert check_seed(SWARM, PEER, sequence, ref.seed, ref.index, chosen)
        assert not check_seed(
            SWARM, PEER, sequence, ref.seed, ref.index, (ref.id, ref.difficulty + 1)
        )
        assert not check_seed(SWARM, PEER, sequence, ref.seed, ref.index)
        assert is_address(ref.seed, ref.index)
        assert not is_evaluation(ref.seed)


def test_the_same_number_after_a_restart_is_the_same_question():
    assert series(curriculum=True)[1][:5] == series(curriculum=True)[1][:5]


def test_what_own_groups_earned_decides_what_is_asked():
    questions, asked = series(curriculum=True, count=40)
    for _, ref in asked * 5:
        questions.answered(ref, [1.0, 0.0] if ref.difficulty == 1 else [0.0, 0.0])
    signals = questions.signals()
    assert max(signals, key=signals.get) == "rg/gcd 1"
    evidence = questions.evidence()
    assert evidence.keys() == signals.keys()
    assert evidence["rg/gcd 1"] == (pytest.approx(10.0, abs=0.1), 0.0), (
        "about the last ten groups, and none of a peer"
    )
    assert series()[0].evidence() == {}, "where all are asked alike nothing is expected"
    later = Counter(ref.difficulty for _, ref in (questions.next() for _ in range(200)))
    assert later[1] > 140


def test_peers_groups_that_are_trained_on_are_hints_and_refused_ones_are_not():
    def judged(outcome, difficulty):
        task = SimpleNamespace(id="rg/gcd", difficulty=difficulty)
        return [
            (
                SimpleNamespace(
                    peer=f"p{n}", group=SimpleNamespace(task=task), rewards=[1.0, 0.0] * 4
                ),
                outcome,
            )
            for n in range(8)
        ]

    questions, _ = series(curriculum=True, count=0)
    for _ in range(4):
        questions.take_hints(Judgement([], judged("used", 1) + judged("surprise", 2)))
    counts = Counter((ref.id, ref.difficulty) for _, ref in (questions.next() for _ in range(600)))
    assert counts["rg/gcd", 1] > 1.2 * max(
        counts["rg/gcd", 2], counts["rg/lcm", 0], counts["rg/gcd", 0]
    )


def test_in_a_swarm_without_a_choice_a_curriculum_chooses_among_tasks_at_difficulty_0():
    _, asked = series(Spoken(), curriculum=True)
    assert {ref.difficulty for _, ref in asked} == {0}
    assert all((ref.seed, ref.index) == task_seed(SWARM, PEER, sequence) for sequence, ref in asked)


def test_a_swarm_has_a_choice_where_a_task_has_difficulties_or_its_founder_a_curriculum():
    assert protocols_of(["rg/lcm"], ["cosine"]) == PROTOCOLS
    assert protocols_of(NAMES, []) == BUCKET_PROTOCOLS
    assert protocols_of(["rg/lcm"], ["curriculum"]) == BUCKET_PROTOCOLS
    assert (spoken(None, ["rg/lcm"], []).chooses, spoken(None, NAMES, []).chooses) == (False, True)
    assert founded().manifest.protocols == sorted(PROTOCOLS)
    chosen = founded(config=Config.model_validate({"task": {"names": NAMES}}))
    assert chosen.manifest.protocols == sorted(BUCKET_PROTOCOLS)
    assert spoken(chosen, ["rg/lcm"], []).chooses  # its manifest decides
    assert not spoken_in(PROTOCOLS).chooses


@pytest.mark.parametrize("difficulty", [-1, 256])
def test_a_difficulty_that_no_message_can_carry_has_no_address(difficulty):
    with pytest.raises(ValueError, match="difficulty"):
        bucket_seed(SWARM, PEER, 0, "rg/gcd", difficulty)
    assert not check_seed(SWARM, PEER, 0, 0, 0, ("rg/gcd", difficulty))

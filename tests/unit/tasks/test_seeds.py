"""Question addresses: each node has its own, and a peer cannot use another node's."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.tasks.registry import TASKS
from swarmnode.tasks.seeds import (
    INDEX_SPAN,
    SEED_LIMIT,
    SEQUENCE_LIMIT,
    check_seed,
    choose_task,
    evaluation_seed,
    is_address,
    is_evaluation,
    task_seed,
)
from swarmnode.wire.messages import TaskRef

SWARM, TASK = bytes(range(32)), "rg/gcd"
peers = st.text(
    alphabet="123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", min_size=1, max_size=60
)
sequences = st.integers(0, SEQUENCE_LIMIT - 1)
names = st.sampled_from(sorted(TASKS))


def reference(seed, index, task=TASK):
    return TaskRef(task, "v", seed, index)


streams = st.tuples(peers, st.integers(0, 2**43 - 1), names)


@given(st.sets(streams, min_size=2, max_size=40))
@settings(max_examples=200)
def test_no_two_streams_share_an_item(streams):
    """Item i of a block is drawn from Random(seed + i), so the ranges seed..seed+2**20-1 of nodes,
    epochs and evaluation are disjoint."""
    starts = [task_seed(SWARM, peer, epoch * INDEX_SPAN, task)[0] for peer, epoch, task in streams]
    starts += [evaluation_seed(task, block) for task in TASKS for block in range(2)]
    starts.sort()
    assert all(left + INDEX_SPAN <= right for left, right in itertools.pairwise(starts))


@given(peers, sequences, names)
def test_training_address_is_never_held_out(peer, sequence, task):
    seed, index = task_seed(SWARM, peer, sequence, task)
    assert is_address(seed, index)
    assert not is_evaluation(seed)
    assert not is_evaluation(seed + index)


@given(st.text(min_size=1, max_size=20), st.integers(0, 2**64 - 1))
def test_an_evaluation_address_is_an_address_and_held_out(task, block):
    seed = evaluation_seed(task, block)
    assert is_address(seed, INDEX_SPAN - 1)
    assert is_evaluation(seed)


@given(peers, sequences)
def test_consecutive_questions_differ(peer, sequence):
    if sequence + 1 < SEQUENCE_LIMIT:
        assert task_seed(SWARM, peer, sequence, TASK) != task_seed(SWARM, peer, sequence + 1, TASK)


hostile = st.integers(-(2**90), 2**90)


@given(st.binary(max_size=40), st.text(max_size=10), hostile, hostile, hostile)
def test_checking_hostile_numbers_refuses_and_never_raises(swarm, peer, sequence, seed, index):
    assert check_seed(swarm, peer, sequence, reference(seed, index, TASK)) is False


def test_checking_text_that_is_not_unicode_refuses():
    assert check_seed(SWARM, "\ud800", 0, reference(0, 0)) is False
    assert check_seed(SWARM, "peer", 0, reference(0, 0, task="\ud800")) is False


@pytest.mark.parametrize("sequence", [-1, SEQUENCE_LIMIT])
def test_sequence_outside_its_range_is_an_error(sequence):
    with pytest.raises(ValueError, match="sequence"):
        task_seed(SWARM, "peer", sequence, TASK)
    with pytest.raises(ValueError, match="sequence"):
        choose_task([TASK], SWARM, "peer", sequence)


@pytest.mark.parametrize(
    ("seed", "index"), [(1, 0), (-INDEX_SPAN, 0), (SEED_LIMIT, 0), (0, -1), (0, INDEX_SPAN)]
)
def test_invalid_seed_addresses_are_rejected(seed, index):
    assert not is_address(seed, index)


def test_tasks_are_chosen_evenly():
    counts = dict.fromkeys(TASKS, 0)
    for sequence in range(1000 * len(TASKS)):
        counts[choose_task(list(TASKS), SWARM, "peer", sequence)] += 1
    assert all(850 < count < 1150 for count in counts.values())


@given(st.permutations(list(TASKS)), peers, sequences)
def test_choice_ignores_the_order_of_names(shuffled, peer, sequence):
    assert choose_task(shuffled, SWARM, peer, sequence) == choose_task(
        sorted(TASKS), SWARM, peer, sequence
    )


def test_choosing_from_nothing_is_an_error():
    with pytest.raises(ValueError, match="no task"):
        choose_task([], SWARM, "peer", 0)

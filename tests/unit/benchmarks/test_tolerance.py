"""benchmarks.tolerance: what it calls honest is, what it calls made up is, and shares are of what
was judged."""

import random

import pytest
import torch

from benchmarks.simulator import PAYLOAD, Arm, Node
from benchmarks.tolerance import CLAIMED, Group, distances, made_up, quantile, refused, sent, sweep
from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.policy.load import load_policy


@pytest.fixture(scope="module")
def node():
    torch.set_num_threads(1)
    return Node(
        0,
        load_policy(PolicyConfig(devices="cpu", threads=1)),
        Arm("alone"),
        TrainingConfig(),
        b"s" * 32,
        1,
    )


@pytest.fixture(scope="module")
def honest(node):
    return [sent(sample) for sample in node.sample(["What is 1 + 2?", "Spell sun backward."])]


def test_a_policy_believes_its_own_samples(node, honest):
    for gap, surprise in distances(node.policy, node, honest):
        assert gap < 0.01
        assert surprise < 1.5


def test_made_up_text_is_far_off_and_claims_what_it_says(node, honest):
    attacks = {
        name: (groups, truthful)
        for name, groups, truthful in made_up(node.policy, honest, random.Random(1))
    }
    claimed, truthful = attacks["payload, claimed"], attacks["payload, truthful"]
    assert {x for row in claimed[0][0].claimed for x in row} == {CLAIMED}
    assert PAYLOAD in node.policy.decode(claimed[0][0].rows[0][1])
    assert distances(node.policy, node, *claimed)[0][0] > 3.0
    gap, surprise = distances(node.policy, node, *truthful)[0]
    assert gap == 0.0
    assert surprise > 4.0


def test_a_diluted_group_is_honest_but_for_its_first_completions(node, honest):
    attacks = {name: groups for name, groups, _ in made_up(node.policy, honest, random.Random(1))}
    for count in (4, 2, 1):
        rows = attacks[f"{count} of 8 payload"][0].rows
        assert rows[count:] == honest[0].rows[count:]
        assert all(
            mine != theirs for mine, theirs in zip(rows[:count], honest[0].rows, strict=False)
        )


def test_shares_are_of_what_was_judged():
    found = [(0.1, 0.0), (3.5, 0.0), (0.0, 4.5), (0.0, 0.0)]
    assert refused(found, 3.0, 4.0) == "50.0%"
    assert refused([], 3.0, 4.0) == "–"
    assert quantile([1.0, 2.0, 3.0], 0.99) == 3.0
    rows = [
        {"kind": "trained apart, both", "steps": 200, "distances": found},
        {"kind": "payload, claimed", "steps": 0, "distances": [(9.0, 9.0)]},
    ]
    line = next(line for line in sweep(rows).splitlines() if line.startswith("| spot check 3 "))
    assert [cell.strip() for cell in line.split("|")[2:5]] == ["–", "25.0%", "100.0%"]


def test_a_group_keeps_its_shape_on_the_wire(honest):
    assert isinstance(honest[0], Group)
    assert [len(ids) for _, ids in honest[0].rows] == [len(values) for values in honest[0].claimed]

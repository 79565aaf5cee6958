"""Averaging between parties that hold different layers of one policy: stages of crews with
different splits, and whole nodes."""

import random
import threading

import pytest
import torch

from swarmnode.config import WeightsConfig
from swarmnode.weights import local
from swarmnode.weights.fragments import block_of, common, pack, unpack, within
from swarmnode.weights.trainer.averaged import AveragedTensors
from swarmnode.weights.trainer.gate import Losses
from tests.support.replica import TrainerHalf, settle

LAYERS = 4
FRAGMENTS = 2
ENDS = {"model.embed_tokens.weight": (20, 4), "model.norm.weight": (4,), "lm_head.weight": (20, 4)}
SHAPES = ENDS | {f"model.layers.{i}.w": (8, 4) for i in range(LAYERS)}
WHOLE = range(LAYERS + 2)
HEAD, TAIL = {0, 2, 3}, {1, 4, 5}
"""Two layers each, by blocks."""
SHORT, LONG = {0, 2}, {1, 3, 4, 5}
"""The same policy, cut after the first layer."""


class Agreeable:
    """A probe that finds every average as good as the own weights."""

    after = 1.0

    def measure(self, mine, mean, answer):
        self.judged = set(mine), set(mean)
        answer(Losses(1.0, self.after))
        return True


class Party(TrainerHalf):
    """A party that holds `blocks`."""

    def __init__(self, directory, blocks, seed, shapes=SHAPES, sync_every=4):
        base = torch.Generator().manual_seed(0)
        start = {name: torch.randn(shape, generator=base) for name, shape in shapes.items()}
        parameters = {
            name: torch.nn.Parameter(tensor)
            for name, tensor in start.items()
            if block_of(name) in blocks
        }
        config = WeightsConfig(fragments=FRAGMENTS, sync_every=sync_every)
        directory.mkdir()
        self.said, agrees = [], lambda tensors: Agreeable()
        super().__init__(
            parameters, config, directory, agrees, self.said.append, seed=seed, layers=LAYERS
        )
        self.facts = self.replica.facts(False)

    def do(self, message):
        """Handle a message and its consequences. Return the sent messages."""
        self.said.clear()
        self.replica.receive(message)
        for _ in range(3):
            settle(self.replica.receive, self.said)
            self.replica.between_steps(True, 0.1, stepped=False)
        return list(self.said)


def blocks_shared(one, other):
    return common(one.facts.blocks(), other.facts.blocks())


def exchange(one, other, fragment, session):
    """Both copy their common blocks of the fragment and exchange them. Return both outcomes."""
    blocks, ended = blocks_shared(one, other), []
    copies = [party.do(local.TakeSnapshot(session, fragment, blocks))[0] for party in (one, other)]
    for party, theirs in ((one, copies[1]), (other, copies[0])):
        said = party.do(
            local.ApplyPayload(session, fragment, "peer", theirs.outer_step, theirs.path)
        )
        ended += [message.outcome for message in said if isinstance(message, local.SwapEnded)]
    return ended


@pytest.fixture
def parties(tmp_path):
    made = []

    def make(*held, **options):
        made.extend(
            Party(tmp_path / str(len(made) + i), blocks, 1 + len(made) + i, **options)
            for i, blocks in enumerate(held)
        )
        return made[-len(held) :]

    yield make
    for party in made:
        party.replica.close()


def test_common_blocks_are_averaged_and_no_others(parties):
    head, long = parties(HEAD, LONG)
    for party in (head, long):
        party.step()
    before, start = [party.weights() for party in (head, long)], head.phi()["model.layers.1.w"]
    assert exchange(head, long, 1, b"s" * 16) == ["accepted"] * 2
    shared = {"model.layers.1.w"}  # of fragment 1, which has the odd layers and the end
    assert [party.probe.judged for party in (head, long)] == [(shared, shared)] * 2
    for party, old in zip((head, long), before, strict=True):
        mean = (before[0]["model.layers.1.w"] + before[1]["model.layers.1.w"]) / 2
        torch.testing.assert_close(
            party.weights()["model.layers.1.w"], start + 0.7 * (mean - start), atol=2e-3, rtol=0
        )
        assert all(
            torch.equal(t, old[name]) for name, t in party.weights().items() if name not in shared
        )
        assert torch.equal(party.phi()["model.layers.1.w"], party.weights()["model.layers.1.w"])
        clocks = dict(zip(party.tensors.blocks, party.counters.outer_clocks, strict=True))
        assert clocks == {block: int(block == 3) for block in party.tensors.blocks}


def test_only_due_blocks_are_reported(parties):
    (whole,) = parties(WHOLE, sync_every=16)
    whole.counters.step = 7
    whole.step()
    whole.do(local.SoloStep(0, pack({2})))
    assert whole.counters.outer_clocks == [0, 0, 1, 0, 0, 0]
    assert whole.counters.solo_steps_total == 1
    whole.replica.between_steps(True, 0.1)
    assert whole.said[-1] == local.OuterStepDue(0, 0, 8, 0.1, pack({0, 4}))
    whole.replica.between_steps(False, 0.1)  # without a network process
    whole.do(local.DropSwap(b"x" * 16))
    assert whole.counters.outer_clocks == [1, 0, 1, 0, 1, 0]


def spread(parties):
    """The largest standard deviation of a tensor among its holders."""
    held = {
        name: [party.weights()[name] for party in parties if name in party.parameters]
        for name in SHAPES
    }
    return max(
        float(torch.stack(copies).std(0).norm() / copies[0].numel() ** 0.5)
        for copies in held.values()
    )


def test_differently_cut_crews_and_a_whole_node_converge(parties):
    everybody = parties(WHOLE, HEAD, TAIL, SHORT, LONG)
    alone = parties(WHOLE, HEAD, TAIL, SHORT, LONG)
    rng, names = random.Random(0), iter(range(10**6))

    def take_part(fragment):
        free = rng.sample(everybody, len(everybody))
        while free:
            one = free.pop()
            partner = next(
                (p for p in free if within(blocks_shared(one, p), fragment, FRAGMENTS)), None
            )
            if partner is None:
                one.do(local.SoloStep(fragment, one.facts.blocks()))
                continue
            free.remove(partner)
            ended = exchange(one, partner, fragment, next(names).to_bytes(16, "big"))
            assert ended == ["accepted"] * 2
            for party in (one, partner):  # as their network processes do
                left = unpack(party.facts.blocks()) - unpack(blocks_shared(one, partner))
                party.do(local.SoloStep(fragment, pack(left)))

    def learn(rounds, size):
        for _ in range(rounds):
            for party in everybody:
                party.step(size)
            for fragment in range(FRAGMENTS):
                take_part(fragment)

    learn(12, 0.01)
    for party in alone:
        for _ in range(12):
            party.step()
    together, apart = spread(everybody), spread(alone)
    assert together < 0.6 * apart
    learn(8, 0.001)
    assert spread(everybody) < 0.2 * apart


def test_tensor_of_another_shape_or_base_is_refused(parties):
    (whole,) = parties(WHOLE)
    (other,) = parties(HEAD, shapes={**SHAPES, "model.layers.1.w": (4, 8)})
    before = whole.weights()
    assert exchange(whole, other, 1, b"s" * 16) == ["shape"] * 2
    (stranger,) = parties(TAIL)
    stranger.step(size=1.0)
    elsewhere = AveragedTensors(stranger.parameters, FRAGMENTS, threading.Lock(), LAYERS)
    stranger.tensors.encode = elsewhere.encode  # it means the difference to something else
    assert exchange(whole, stranger, 0, b"t" * 16)[0] == "payload"
    assert all(torch.equal(t, before[name]) for name, t in whole.weights().items())


def test_what_is_sent_beyond_what_both_hold_is_refused(parties):
    head, long = parties(HEAD, LONG)
    blocks = blocks_shared(head, long)
    head.do(local.TakeSnapshot(b"s" * 16, 1, blocks))
    (everything,) = long.do(local.TakeSnapshot(b"s" * 16, 1, long.facts.blocks()))[:1]
    before = head.weights()
    said = head.do(local.ApplyPayload(b"s" * 16, 1, "peer", 0, everything.path))
    assert [message.outcome for message in said if isinstance(message, local.SwapEnded)] == [
        "payload"
    ]
    assert all(torch.equal(t, before[name]) for name, t in head.weights().items())

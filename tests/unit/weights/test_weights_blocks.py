"""Averaging between parties that hold different layers of one policy: stages of crews with
different splits, and whole nodes."""

import random
import threading

import pytest
import torch

from swarmnode.averaging.averaged import AveragedTensors
from swarmnode.averaging.gate import Losses
from swarmnode.config import WeightsConfig
from swarmnode.trainer.state import Counters
from swarmnode.trainer.weights import Replica
from swarmnode.weights import local
from swarmnode.weights.discovery import Discovery
from swarmnode.weights.fragments import block_of, common, pack, within
from swarmnode.weights.local import LocalReplica
from swarmnode.weights.messages import Here
from tests.support.replica import settle

LAYERS = 4
FRAGMENTS = 2
ENDS = {"model.embed_tokens.weight": (20, 4), "model.norm.weight": (4,), "lm_head.weight": (20, 4)}
SHAPES = ENDS | {f"model.layers.{i}.w": (8, 4) for i in range(LAYERS)}
WHOLE = range(LAYERS + 2)
HEAD, TAIL = {0, 2, 3}, {1, 4, 5}
"""Two layers each, by blocks."""
SHORT, LONG = {0, 2}, {1, 3, 4, 5}
"""The same policy, cut after the first layer."""


class StubNetwork:
    def __init__(self, peer_id, peers):
        self.peer_id, self._peers = peer_id, peers

    def connected(self):
        return self._peers

    def is_allowed(self, peer):
        return True


class Agreeable:
    """A probe that finds every average as good as the own weights."""

    after = 1.0

    def measure(self, mine, mean, answer):
        self.judged = set(mine), set(mean)
        answer(Losses(1.0, self.after))
        return True


class Party:
    """The trainer's half of a party that holds `blocks`. The test takes its steps."""

    def __init__(self, directory, blocks, seed, shapes=SHAPES, sync_every=4):
        held = {name: shape for name, shape in shapes.items() if block_of(name) in blocks}
        base = torch.Generator().manual_seed(0)
        start = {name: torch.randn(shape, generator=base) for name, shape in shapes.items()}
        self.parameters = {name: torch.nn.Parameter(start[name]) for name in held}
        self.tensors = AveragedTensors(self.parameters, FRAGMENTS, threading.Lock(), LAYERS)
        self.counters, self.probe, self.said = Counters(step=1), Agreeable(), []
        config = WeightsConfig(rule="gossip", fragments=FRAGMENTS, sync_every=sync_every)
        directory.mkdir()
        self.replica = Replica(
            self.tensors,
            config,
            self.counters,
            directory,
            send=self.said.append,
            probe=self.probe,
        )
        self.facts = self.replica.facts(False)
        self._generator = torch.Generator().manual_seed(seed)

    def train(self, size=0.01):
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.add_(size * torch.randn(parameter.shape, generator=self._generator))
        self.counters.step += 1

    def weights(self):
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def phi(self):
        return {
            name.removeprefix("phi."): t
            for name, t in self.replica.tensors().items()
            if name.startswith("phi.")
        }

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
            local.ApplyPayload(session, fragment, "peer", theirs.outer_step, theirs.path, blocks)
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


def test_common_blocks_are_averaged_and_the_rest_steps_alone(parties):
    head, long = parties(HEAD, LONG)
    for party in (head, long):
        party.train()
    before = [party.weights() for party in (head, long)]
    assert exchange(head, long, 1, b"s" * 16) == ["accepted"] * 2
    shared = {"model.layers.1.w"}  # of fragment 1, which has the odd layers and the end
    assert [party.probe.judged for party in (head, long)] == [(shared, shared)] * 2
    for party, old in zip((head, long), before, strict=True):
        mean = (before[0]["model.layers.1.w"] + before[1]["model.layers.1.w"]) / 2
        torch.testing.assert_close(
            party.weights()["model.layers.1.w"],
            mean,
            atol=2e-3,
            rtol=0,
        )
        assert all(
            torch.equal(t, old[name]) for name, t in party.weights().items() if name not in shared
        )
        assert party.counters.outer_clocks == [0, 1]
        for name in party.tensors.names(1):
            # what was learnt alone is in its slow weights too
            assert torch.equal(party.phi()[name], party.weights()[name])


ODD = {"model.layers.1.w"}
"""Fragment 1 as HEAD has it."""
LEFT = {"model.layers.3.w", "model.norm.weight", "lm_head.weight"}
"""And what HEAD lacks of it."""


def moved(party, before):
    """Names of the tensors that have taken an outer step since φ was `before`."""
    return {name for name, phi in party.phi().items() if phi is not before[name]}


def met_half(parties):
    """One that has everything, after an exchange of fragment 1 with one that has half of it, and
    one that has the rest."""
    whole, head, tail = parties(WHOLE, HEAD, TAIL, sync_every=16)
    for party in (whole, head, tail):
        party.counters.step = 15
        party.train()
    for _ in range(3):
        assert not whole.replica.observe(0.5)
    before = whole.phi()
    assert exchange(whole, head, 1, b"s" * 16) == ["accepted"] * 2
    assert moved(whole, before) == ODD
    return whole, head, tail


def test_missing_blocks_are_averaged_with_a_second_partner(parties):
    whole, _, tail = met_half(parties)
    asked = []
    for _ in range(4):
        whole.train()
        tail.train()
        whole.replica.between_steps(True, 0.1)
        asked += [
            (whole.counters.step, m.fragment, m.blocks)
            for m in whole.said
            if isinstance(m, local.OuterStepDue)
        ]
    assert asked == [(20, 1, pack({1, 5}))]
    before, weights, theirs = whole.phi(), whole.weights(), tail.weights()
    assert exchange(whole, tail, 1, b"t" * 16) == ["accepted"] * 2
    assert moved(whole, before) == LEFT
    for name in LEFT:
        torch.testing.assert_close(
            whole.weights()[name], (weights[name] + theirs[name]) / 2, atol=5e-3, rtol=0
        )
    assert all(
        torch.equal(t, weights[name]) for name, t in whole.weights().items() if name not in LEFT
    )


def test_leftover_blocks_belong_to_the_same_outer_step(parties):
    whole, head, tail = met_half(parties)
    assert whole.counters.outer_clocks == [0, 1]
    exchange(whole, tail, 1, b"t" * 16)
    assert [party.counters.outer_clocks for party in (whole, head, tail)] == [[0, 1]] * 3, (
        "nobody met one that was ahead"
    )
    exchange(whole, tail, 1, b"u" * 16)
    assert [party.counters.outer_clocks for party in (whole, tail)] == [[0, 2]] * 2


def test_fallen_reward_reverts_both_parts_of_a_step(parties):
    whole, _, tail = met_half(parties)
    (other,) = parties(WHOLE, sync_every=16)
    other.train(0.0)
    before = {name: t for name, t in whole.phi().items() if name in LEFT}
    exchange(whole, tail, 1, b"t" * 16)
    whole.train()
    after = whole.weights()
    assert whole.replica.observe(0.1)
    for name, phi in whole.phi().items():
        assert torch.equal(phi, other.weights()[name]), "as before the first outer step"
    assert all(whole.phi()[name] is phi for name, phi in before.items())
    assert {
        name for name, t in whole.weights().items() if not torch.equal(t, after[name])
    } == ODD | LEFT


@pytest.mark.parametrize("refused", [False, True])
def test_what_nobody_has_takes_its_step_alone_once(parties, refused):
    whole, _, tail = met_half(parties)
    before = whole.phi()
    if refused:
        whole.probe.after = 9.0
        assert exchange(whole, tail, 1, b"t" * 16)[0] == "probe"
        assert moved(whole, before) == set()
    whole.do(local.SoloStep(1))
    assert moved(whole, before) == LEFT
    assert whole.counters.outer_clocks == [0, 1]
    assert whole.counters.revert.peers == ("peer",), (
        "the exchange that it belongs to can be taken back still"
    )
    before = whole.phi()
    whole.do(local.SoloStep(1))
    assert moved(whole, before) == ODD | LEFT
    assert whole.counters.outer_clocks == [0, 2]
    assert whole.counters.revert.peers == ("peer",)


def test_repeated_half_partner_withholds_no_block(parties):
    whole, head, _ = met_half(parties)
    taken = []
    for number in range(4):
        for party in (whole, head):
            party.train()
        before = whole.phi()
        exchange(whole, head, 1, bytes([number]) * 16)
        taken.append(moved(whole, before))
    assert taken == [ODD | LEFT, ODD, ODD | LEFT, ODD]


def test_abandons_an_exchange_that_omits_newly_due_blocks(parties):
    whole, _, _ = met_half(parties)
    (long,) = parties({5}, sync_every=16)
    blocks = blocks_shared(whole, long)
    theirs = long.do(local.TakeSnapshot(b"t" * 16, 1, blocks))[0]
    whole.do(local.TakeSnapshot(b"t" * 16, 1, blocks))
    whole.replica.receive(local.ApplyPayload(b"t" * 16, 1, "peer", 0, theirs.path, blocks))
    settle(whole.replica.receive, whole.said)
    whole.counters.step, before = 32, whole.phi()
    # judged, as some of what is left; and then all of the fragment is due
    whole.replica.between_steps(True, 0.1)
    assert whole.probe.judged == ({"model.layers.3.w"},) * 2
    settle(whole.replica.receive, whole.said)
    whole.replica.between_steps(True, 0.1, stepped=False)
    assert moved(whole, before) == set()
    assert whole.said[-1] == local.SwapEnded(b"t" * 16, 0, "", "local", False, 0)


def test_stage_averages_only_its_own_blocks(parties):
    short, tail, whole = parties(SHORT, TAIL, WHOLE)
    assert blocks_shared(short, tail) == b""
    assert blocks_shared(whole, tail) == tail.facts.blocks()
    assert {
        party.facts.fingerprint(bytes(32), bytes(32), bytes(32)) for party in (short, tail, whole)
    } == {whole.facts.fingerprint(bytes(32), bytes(32), bytes(32))}
    assert (
        len(
            {
                party.facts.state_fingerprint(bytes(32), bytes(32), bytes(32))
                for party in (short, tail, whole)
            }
        )
        == 3
    )
    # of fragment 1 it holds nothing at all, and a step of it asks nobody, changes nothing and is
    # counted
    assert within(short.facts.blocks(), 1, FRAGMENTS) == b""
    before, version = short.weights(), short.counters.policy_version
    short.counters.step = 4
    short.replica.between_steps(True, 0.1)
    short.do(local.DropSwap(b"x" * 16))
    assert not any(isinstance(message, local.OuterStepDue) for message in short.said)
    assert (
        short.counters.outer_clocks,
        short.counters.solo_steps_total,
        short.counters.policy_version,
    ) == ([0, 1], 0, version)
    assert all(torch.equal(t, before[name]) for name, t in short.weights().items())


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


def test_differently_cut_crews_and_a_whole_node_converge(
    parties,
):
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
                one.do(local.SoloStep(fragment))
                continue
            free.remove(partner)
            assert set(exchange(one, partner, fragment, next(names).to_bytes(16, "big"))) <= {
                "accepted",
                "clipped",
            }

    def learn(rounds, size):
        for _ in range(rounds):
            for party in everybody:
                party.train(size)
            for fragment in range(FRAGMENTS):
                take_part(fragment)

    learn(12, 0.01)
    for party in alone:
        for _ in range(12):
            party.train()
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
    stranger.train(size=1.0)
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
    said = head.do(local.ApplyPayload(b"s" * 16, 1, "peer", 0, everything.path, blocks))
    assert [message.outcome for message in said if isinstance(message, local.SwapEnded)] == [
        "payload"
    ]
    assert all(torch.equal(t, before[name]) for name, t in head.weights().items())
    assert everything.blocks == pack({1, 3, 5})


async def test_partners_with_the_whole_fragment_are_asked_first(
    parties,
):
    whole, head = parties(WHOLE, HEAD)
    replica = LocalReplica()
    held = {"w1": WHOLE, "h": HEAD, "w2": WHOLE, "s": SHORT, "l": LONG, "far": WHOLE, "none": {500}}
    network = StubNetwork("me", [*held, "other"])
    asked = Discovery(network, replica, bytes(32), lambda: 0.0)
    for party, expected in (
        (whole, ({"w1", "w2", "l"}, {"h"})),
        (head, ({"w1", "w2", "h", "l"}, set())),
    ):
        replica.start(party.facts, bytes(32), bytes(32), bytes(32))
        for peer, blocks in held.items():
            asked.received(
                peer, Here(replica.fingerprint, 100 if peer == "far" else 3, pack(blocks))
            )
        asked.received("other", Here(b"x" * 32, 3, pack(WHOLE)))
        first, then = expected
        order, best = asked.partners(1, 3)
        assert [set(order[: len(first)]), set(order[len(first) : -1]), order[-1]] == [
            first,
            then,
            "far",
        ]
        assert best == len(first)
    assert set(asked.alike()) == {"h"}

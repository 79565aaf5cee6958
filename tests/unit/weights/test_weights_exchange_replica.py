"""The trainer's half by itself: what a kill leaves behind, what is taken back, what a missing network process costs, who is asked."""

import hashlib
import threading
from types import SimpleNamespace

import pytest
import torch

from swarmnode.averaging import codecs
from swarmnode.config import WeightsConfig
from swarmnode.trainer import state
from swarmnode.trainer.state import Counters
from swarmnode.trainer.weights import Replica
from swarmnode.weights import local
from swarmnode.weights.manifest import TensorHash
from swarmnode.weights.members import ASK_SECONDS, FRESH_SECONDS, MAX_PEERS, Members
from tests.support.replica import Judge, Tiny, identical

CFG = WeightsConfig(rule="noloco", codec="float32", fragments=2, sync_every=4)


class Made:
    def __init__(self, directory, cfg=CFG):
        self.model = Tiny()
        self.counters = Counters(step=1)
        self.said = []
        self.directory = directory
        self.replica = Replica(
            SimpleNamespace(model=self.model), cfg, self.counters, Judge(self.model), directory,
            lock=threading.Lock(), send=self.said.append,
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.rng = torch.Generator()

    def weights(self):
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def step(self, seed=1, size=0.1):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(size * torch.randn(p.shape, generator=generator))
        self.counters.step += 1

    def settle(self):
        """Until the worker thread has done everything before this."""
        done = threading.Event()
        self.replica._jobs.put(done.set)
        assert done.wait(10)

    def exchange(self, partner, session=b"s" * 16, fragment=0):
        """With `partner`'s weights as they are, up to the gate."""
        self.replica.receive(local.TakeSnapshot(session, fragment))
        self.settle()
        names = self.replica._names[fragment]
        part = self.replica._parts[fragment]
        path = self.directory / "in-x.bin"
        path.write_bytes(codecs.encode({n: partner.weights()[n] for n in names}, part, "float32", fragment=fragment))
        self.replica.receive(local.JudgePayload(session, fragment, "peer", 0, str(path)))
        self.settle()
        self.replica.between_steps(True, 0.1, stepped=False)
        self.settle()
        return next(m for m in reversed(self.said) if isinstance(m, local.Gated))

    def commit(self, session=b"s" * 16):
        self.replica.receive(local.CommitExchange(session))
        return self.replica.between_steps(True, 0.1, stepped=False)

    def solo(self, fragment):
        self.replica.receive(local.SoloStep(fragment))
        self.settle()
        changed = self.replica.between_steps(True, 0.1, stepped=False)
        self.settle()  # it offers what it stepped from, and says so from the worker thread
        return changed

    def save(self, path):
        path.mkdir(exist_ok=True)
        state.write(path, state.take(self.model, self.optimizer, self.rng, self.counters, "f", self.replica.tensors()))

    def load(self, path):
        outer = {}
        self.counters = state.restore(path, self.model, self.optimizer, self.rng, "f", outer.update)
        self.replica.counters(self.counters)
        self.replica.restore(outer)


@pytest.fixture
def made(tmp_path):
    replicas = []

    def make(name="a", cfg=CFG):
        directory = tmp_path / name
        directory.mkdir()
        replicas.append(Made(directory, cfg))
        return replicas[-1]

    yield make
    for each in replicas:
        each.replica.close()


def test_a_killed_trainer_comes_back_with_its_slow_weights_and_goes_on_bit_by_bit(made, tmp_path):
    a, b, partner = made("a"), made("b"), made("c")
    a.step()
    partner.step(seed=2)
    assert a.exchange(partner).ok
    a.commit()
    a.save(tmp_path / "s")
    b.load(tmp_path / "s")
    assert b.counters.outer_clocks == [1, 0]
    assert identical(a.weights(), b.weights())
    for each in (a, b):
        each.step(seed=3)
        assert each.exchange(partner, fragment=1).ok
        assert each.commit()
    assert identical(a.weights(), b.weights())
    assert identical(a.replica.tensors(), b.replica.tensors())


@pytest.mark.parametrize("when", ["copied", "judged"])
def test_a_kill_before_the_commit_loses_the_exchange_whole(when, made, tmp_path):
    a, b, partner = made("a"), made("b"), made("c")
    a.step()
    partner.step(seed=2)
    before = a.weights()
    if when == "copied":
        a.replica.receive(local.TakeSnapshot(b"s" * 16, 0))
        a.settle()
    else:
        assert a.exchange(partner).ok
    a.save(tmp_path / "s")
    b.load(tmp_path / "s")
    assert identical(b.weights(), before)
    assert not b.commit()
    assert b.said[-1] == local.Gated(b"s" * 16, False, "local", "")
    assert identical(b.weights(), before)


def test_a_state_from_before_averaging_starts_at_its_own_weights(made, tmp_path):
    a, b = made("a"), made("b")
    a.step()
    (tmp_path / "s").mkdir()
    state.write(tmp_path / "s", state.take(a.model, a.optimizer, a.rng, Counters(step=5), "f"))
    b.load(tmp_path / "s")
    assert identical(b.replica._outer.phi, a.weights())
    assert b.counters.outer_clocks == [0, 0]


def test_a_dropped_exchange_is_not_applied_any_more(made):
    a, partner = made("a"), made("c")
    partner.step(seed=2)
    assert a.exchange(partner).ok
    before = a.weights()
    a.replica.receive(local.CommitExchange(b"s" * 16))
    a.replica.receive(local.DropExchange(b"s" * 16))
    assert not a.replica.between_steps(True, 0.1, stepped=False)
    assert identical(a.weights(), before)


class Asked:
    """Who judges averages for a replica that cannot."""

    def __init__(self, replica):
        self.tell = None
        replica._ask = self

    def __call__(self, mine, mean, tell):
        self.mine, self.mean, self.tell = mine, mean, tell
        return True


def asked_for(a, partner):
    """An exchange of a replica that asks others, up to the question."""
    asked = Asked(a.replica)
    with pytest.raises(StopIteration):  # nothing is said before the verdict
        a.exchange(partner)
    assert asked.tell is not None
    return asked


def after(a):
    a.replica.between_steps(True, 0.1, stepped=False)
    a.settle()
    return a.said[-1]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((1.0, 0.9), local.Gated(b"s" * 16, True, "accepted", "peer")),
        ((1.0, 1.05), local.Gated(b"s" * 16, True, "accepted", "peer")),  # within the tolerance
        ((1.0, 1.5), local.Gated(b"s" * 16, False, "probe", "peer")),
        ((1.0, float("inf")), local.Gated(b"s" * 16, False, "probe", "peer")),
        (None, local.Gated(b"s" * 16, False, "local", "peer")),
    ],
)  # fmt: skip
def test_a_replica_that_cannot_judge_asks_and_takes_nothing_before_the_verdict(made, losses, expected):
    a, partner = made("a"), made("c")
    a.step()
    partner.step(seed=2)
    before = a.weights()
    asked = asked_for(a, partner)
    names = a.replica._names[0]
    assert identical(asked.mine, {n: before[n] for n in names})
    assert all(torch.allclose(asked.mean[n], 0.5 * (before[n] + partner.weights()[n]), atol=1e-6) for n in names)
    assert identical(a.weights(), before)
    a.said.clear()
    asked.tell(losses)
    assert not a.said, "said between two steps only"
    assert after(a) == expected
    assert a.commit() == expected.ok
    assert identical(a.weights(), before) != expected.ok
    assert a.replica.report().outcomes.get("probe", 0) == (expected.outcome == "probe")


@pytest.mark.parametrize("meanwhile", ["dropped", "overtaken"])
def test_a_verdict_on_an_exchange_that_is_over_changes_nothing(made, meanwhile):
    a, partner = made("a"), made("c")
    a.step()
    partner.step(seed=2)
    asked = asked_for(a, partner)
    if meanwhile == "dropped":
        a.replica.receive(local.DropExchange(b"s" * 16))
    else:
        a.solo(0)
    before = a.weights()
    asked.tell((1.0, 0.9))
    assert after(a) == local.Gated(b"s" * 16, False, "local", "")
    assert not a.commit()
    assert identical(a.weights(), before)


def test_a_fall_of_reward_takes_the_exchange_back(made):
    a, partner = made("a"), made("c")
    partner.step(seed=2)
    for reward in (0.5, 0.5, 0.5):
        assert not a.replica.observe(reward)
    before, version = a.weights(), a.counters.policy_version
    assert a.exchange(partner).ok
    a.commit()
    assert not identical(a.weights(), before)
    assert a.replica.observe(0.1)
    assert identical(a.weights(), before)
    assert a.counters.policy_version == version + 2
    assert a.said[-1] == local.Gated(b"", False, "reverted", "peer")


def test_without_a_network_process_the_outer_step_is_taken_alone(made):
    a = made("a")
    a.step()
    assert a.counters.step == 2
    assert not a.replica.between_steps(False, 0.1)  # the step is computed while the next one is trained
    a.settle()
    assert a.replica.between_steps(False, 0.1, stepped=False)
    assert a.counters.solo_steps_total == 1
    assert a.counters.outer_clocks == [1, 0]


def test_a_step_alone_that_an_exchange_overtakes_starts_from_where_that_has_led(made):
    a, b, partner = made("a"), made("b"), made("c")
    partner.step(seed=2)
    for each in (a, b):
        each.step()
        assert each.exchange(partner).ok
    a.replica.receive(local.CommitExchange(b"s" * 16))
    a.replica.receive(local.SoloStep(0))
    a.settle()  # what the step alone would be, from φ as it is before the commit
    assert a.replica.between_steps(True, 0.1, stepped=False)
    b.commit()
    b.solo(0)
    assert a.counters.outer_clocks == b.counters.outer_clocks == [2, 0]
    assert identical(a.weights(), b.weights())
    assert identical(a.replica.tensors(), b.replica.tensors())


def test_an_exchange_that_a_step_alone_overtakes_is_not_applied(made):
    a, partner = made("a"), made("c")
    partner.step(seed=2)
    a.step()
    assert a.exchange(partner).ok
    a.solo(0)
    before = a.weights()
    assert not a.commit()
    assert identical(a.weights(), before)
    assert a.said[-1] == local.Gated(b"s" * 16, False, "local", "")


def test_nothing_is_corrected_against_weights_that_a_revert_has_undone(made):
    a, partner = made("a"), made("c")
    partner.step(seed=2)
    for reward in (0.5, 0.5, 0.5):
        a.replica.observe(reward)
    before = a.weights()
    assert a.exchange(partner).ok
    a.commit()
    assert a.exchange(partner, session=b"t" * 16).ok
    assert a.replica.observe(0.1)
    assert not a.commit(b"t" * 16)
    assert identical(a.weights(), before)


def test_what_goes_wrong_in_the_worker_thread_is_not_lost(made, monkeypatch):
    a = made("a")
    monkeypatch.setattr(codecs, "encode", lambda *args, **options: 1 / 0)
    a.replica.receive(local.TakeSnapshot(b"s" * 16, 0))
    a.settle()
    with pytest.raises(ZeroDivisionError):
        a.replica.between_steps(True, 0.1, stepped=False)


def test_each_fragment_is_due_once_in_sync_every_steps(made):
    a = made("a")
    due = []
    for _ in range(8):
        a.step(size=0.0)
        a.replica.between_steps(True, 0.1)
        due += [(a.counters.step, m.fragment) for m in a.said if isinstance(m, local.Due)]
        a.said.clear()
    assert due == [(2, 0), (4, 1), (6, 0), (8, 1)]


@pytest.mark.parametrize(("ago", "due"), [(1, []), (2, [(4, 1)])])
def test_a_step_that_a_partner_had_us_take_counts_for_the_one_that_is_due(ago, due, made):
    a, partner = made("a"), made("c")
    partner.step(seed=2)
    a.counters.step = 4 - ago - 1
    a.step(size=0.0)
    assert a.exchange(partner, fragment=1).ok
    assert a.commit()
    a.said.clear()
    while a.counters.step < 4:
        a.step(size=0.0)
        a.replica.between_steps(True, 0.1)
    assert [(4, m.fragment) for m in a.said if isinstance(m, local.Due) and m.fragment == 1] == due


def adopt(a, other, step=30, wrong=""):
    tensors = other.replica.tensors()
    hashes = {n: hashlib.sha256(codecs.to_bytes(t, "<f4")).digest() for n, t in tensors.items()}
    if wrong == "hash":
        hashes = dict.fromkeys(hashes, bytes(32))
    if wrong == "nan":
        tensors = {n: t * float("nan") for n, t in tensors.items()}
        hashes = {n: hashlib.sha256(codecs.to_bytes(t, "<f4")).digest() for n, t in tensors.items()}
    names = [spec.name for spec in a.replica._layout]
    path = a.directory / "in-state.bin"
    path.write_bytes(codecs.encode(tensors, local.state_layout(a.replica._layout), "float32"))
    if wrong == "payload":
        path.write_bytes(path.read_bytes()[:-1])
    listed = [TensorHash(n, hashes[f"phi.{n}"], hashes[f"delta.{n}"]) for n in names]
    a.replica.receive(local.AdoptState("peer", str(path), step, listed))
    a.settle()
    a.replica.between_steps(True, 0.1, stepped=False)
    return a.said[-1].outcome


def test_a_neighbours_state_is_taken_bit_by_bit_and_on_probation(made):
    a, other = made("a"), made("b")
    other.step(seed=5)
    other.solo(0)
    assert adopt(a, other) == "adopted"
    assert identical(a.weights(), other.replica._outer.phi)
    assert identical(a.replica.tensors(), other.replica.tensors())
    assert a.counters.probation
    assert a.counters.outer_clocks == [30, 30]


@pytest.mark.parametrize(("wrong", "outcome"), [("hash", "hash"), ("nan", "norm_ratio"), ("payload", "payload")])
def test_a_state_that_is_not_what_was_signed_changes_nothing(wrong, outcome, made):
    a, other = made("a"), made("b")
    other.step(seed=5)
    before = a.weights()
    assert adopt(a, other, wrong=wrong) == outcome
    assert identical(a.weights(), before)
    assert a.counters.outer_clocks == [0, 0]


def test_a_state_that_makes_the_policy_worse_is_given_up_again(made):
    a, other = made("a"), made("b")
    a.counters.reward_held_out = 0.5
    other.step(seed=5)
    other.solo(0)
    other.solo(1)
    before = a.weights()
    assert adopt(a, other) == "adopted"
    assert not identical(a.weights(), before)
    assert a.replica.observe(0.1)
    assert identical(a.weights(), before)
    assert a.said[-1].outcome == "worse"


def test_candidates_are_connected_alike_and_heard_of_lately():
    members = Members()
    members.said("a", b"f", 3, 0.0)
    members.said("b", b"g", 3, 0.0)
    members.said("c", b"f", 3, 0.0)
    assert members.candidates(["a", "b"], b"f", 1.0) == ["a"]
    assert members.candidates(["a"], b"f", FRESH_SECONDS) == []
    assert members.to_ask(["a", "d"], ASK_SECONDS - 1) == ["d"]
    assert members.to_ask(["a", "d"], ASK_SECONDS) == ["a", "d"]


def test_members_are_bounded():
    members = Members()
    for number in range(2 * MAX_PEERS):
        members.said(str(number), b"f", 0, 0.0)
    assert len(members._members) == MAX_PEERS


def test_files_do_not_pile_up_where_nobody_serves_them(made, monkeypatch):
    from swarmnode.trainer import weights as trainer_weights

    monkeypatch.setattr(trainer_weights, "FILES", 3)
    a = made("a")
    for _ in range(8):
        a.solo(0)
    a.settle()
    assert len(list((a.directory / "weights").iterdir())) == 3

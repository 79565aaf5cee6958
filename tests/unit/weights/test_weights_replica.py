"""The trainer's half by itself: kills, a missing network process, adopted states."""

import msgspec
import pytest
import torch

from swarmnode.config import WeightsConfig
from swarmnode.trainer import state
from swarmnode.trainer.state import Counters
from swarmnode.weights import local
from swarmnode.weights.fingerprint import LoraShape
from swarmnode.weights.fragments import blocks_of
from swarmnode.weights.trainer import codecs
from swarmnode.weights.trainer.gate import Losses
from tests.support.replica import Judge, Tiny, TrainerHalf, identical, probe_of, settle

SESSION = b"s" * 16
BLOCKS = blocks_of(["layers.0.w", "layers.1.w"])

CFG = WeightsConfig(rule="noloco", fragments=2, sync_every=4)


class Asking:
    """A probe that the test answers."""

    def __init__(self):
        self.answer = None

    def measure(self, mine, mean, answer):
        self.mine, self.mean, self.answer = mine, mean, answer
        return True


class Verdict:
    """A probe that answers with `losses`. None: it has nothing to judge by."""

    def __init__(self, losses):
        self.losses = losses

    def measure(self, mine, mean, answer):
        if self.losses is not None:
            answer(self.losses)
        return self.losses is not None


class Made(TrainerHalf):
    def __init__(self, directory, cfg=CFG, probe=None, adapter=None):
        self.model = Tiny()
        self.said = []
        self.directory = directory
        super().__init__(
            dict(self.model.named_parameters()),
            cfg,
            directory,
            lambda tensors: probe or probe_of(self.model, Judge(self.model), tensors),
            self.said.append,
            adapter=adapter,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.rng = torch.Generator()

    def step(self, seed=1, size=0.1):
        super().step(size, seed)

    def settle(self):
        settle(self.replica.receive, self.said)

    def between(self):
        """Handle the messages between two steps until the worker is idle."""
        changed = self.replica.between_steps(True, 0.1, stepped=False)
        self.settle()
        return changed

    def fetched(self, partner, session=SESSION, fragment=0, peer="peer", outer_step=0):
        """An exchange with `partner`'s weights as they are, until they have been examined."""
        self.replica.receive(local.TakeSnapshot(session, fragment, BLOCKS))
        self.settle()
        path = self.directory / "in-x.bin"
        path.write_bytes(
            partner.tensors.encode(
                fragment, {n: partner.weights()[n] for n in partner.tensors.names(fragment)}
            )
        )
        self.replica.receive(local.ApplyPayload(session, fragment, peer, outer_step, str(path)))
        self.settle()

    def exchange(self, partner, session=SESSION, fragment=0):
        """The same until all is ready to be committed."""
        self.fetched(partner, session, fragment)
        self.between()
        assert not [m for m in self.said if isinstance(m, local.SwapEnded) and m.session == session]

    def advance(self, when, partner):
        """Begin an exchange and stop where it is `copied`, `examined` or `prepared`."""
        if when == "copied":
            self.replica.receive(local.TakeSnapshot(SESSION, 0, BLOCKS))
            self.settle()
        else:
            (self.fetched if when == "examined" else self.exchange)(partner)

    def solo(self, fragment):
        self.replica.receive(local.SoloStep(fragment, BLOCKS))
        self.settle()
        return self.between()

    def save(self, path):
        path.mkdir(exist_ok=True)
        state.write(
            path,
            state.take(
                self.model, self.optimizer, self.rng, self.counters, "f", self.replica.tensors()
            ),
        )

    def load(self, path):
        outer = {}
        self.counters = state.restore(path, self.model, self.optimizer, self.rng, "f", outer.update)
        self.replica.set_counters(self.counters)
        self.replica.restore(outer)


@pytest.fixture
def made(tmp_path):
    replicas = []

    def make(name="a", **options):
        directory = tmp_path / name
        directory.mkdir()
        replicas.append(Made(directory, **options))
        return replicas[-1]

    yield make
    for each in replicas:
        each.replica.close()


ENDED_LOCALLY = local.SwapEnded(SESSION, 0, "", "local", False, 0)


def test_killed_trainer_resumes_bit_identically(made, tmp_path):
    a, b, partner = made("a"), made("b"), made("c")
    a.step()
    partner.step(seed=2)
    a.exchange(partner)
    assert a.between()
    a.save(tmp_path / "s")
    b.load(tmp_path / "s")
    assert b.counters.outer_clocks == [1, 0]
    assert identical(a.weights(), b.weights())
    for each in (a, b):
        each.step(seed=3)
        each.exchange(partner, session=b"t" * 16, fragment=1)
        assert each.between()
    assert identical(a.weights(), b.weights())
    assert identical(a.replica.tensors(), b.replica.tensors())


@pytest.mark.parametrize("when", ["copied", "examined", "prepared"])
def test_a_kill_before_the_commit_loses_the_exchange_whole(when, made, tmp_path):
    a, b, partner = made("a"), made("b"), made("c")
    a.step()
    partner.step(seed=2)
    before = a.weights()
    a.advance(when, partner)
    a.save(tmp_path / "s")
    b.load(tmp_path / "s")
    assert identical(b.weights(), before)
    assert not b.between()
    assert identical(b.weights(), before)


def test_state_without_averaging_starts_at_its_weights(made, tmp_path):
    a, b = made("a"), made("b")
    a.step()
    (tmp_path / "s").mkdir()
    state.write(tmp_path / "s", state.take(a.model, a.optimizer, a.rng, Counters(step=5), "f"))
    b.load(tmp_path / "s")
    assert identical(b.phi(), a.weights())
    assert b.counters.outer_clocks == [0, 0]


@pytest.mark.parametrize("when", ["copied", "examined", "prepared"])
def test_a_dropped_exchange_is_not_applied_any_more(when, made):
    a, partner = made("a"), made("c")
    partner.step(seed=2)
    before = a.weights()
    a.advance(when, partner)
    a.replica.receive(local.DropSwap(SESSION))
    assert not a.between()
    assert not a.between()
    assert identical(a.weights(), before)
    assert (ENDED_LOCALLY in a.said) == (when != "copied")


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (Losses(1.0, 0.9), local.SwapEnded(SESSION, 0, "peer", "accepted", True, 1)),
        # within the tolerance
        (Losses(1.0, 1.05), local.SwapEnded(SESSION, 0, "peer", "accepted", True, 1)),
        (Losses(1.0, 1.5), local.SwapEnded(SESSION, 0, "peer", "probe", False, 0)),
        (Losses(1.0, float("inf")), local.SwapEnded(SESSION, 0, "peer", "probe", False, 0)),
        (None, local.SwapEnded(SESSION, 0, "peer", "local", False, 0)),
    ],
)
def test_replica_without_a_probe_waits_for_the_verdict(made, losses, expected):
    a, partner = made("a", probe=Asking()), made("c")
    a.step()
    partner.step(seed=2)
    before = a.weights()
    a.exchange(partner)
    assert identical(a.probe.mine, {n: before[n] for n in a.tensors.names(0)})
    assert all(
        torch.allclose(a.probe.mean[n], 0.5 * (before[n] + partner.weights()[n]), atol=1e-6)
        for n in a.tensors.names(0)
    )
    assert not a.between()
    a.said.clear()
    a.probe.answer(losses)
    assert not a.said, "said between two steps only"
    # the worker may be done before the first or the second
    assert any([a.between(), a.between()]) == expected.committed
    assert a.said == [expected]
    assert identical(a.weights(), before) != expected.committed


def test_nothing_is_taken_that_could_not_be_judged(made):
    a, partner = made("a", probe=Verdict(None)), made("c")
    partner.step(seed=2)
    before = a.weights()
    a.fetched(partner)
    assert not a.between()
    assert identical(a.weights(), before)
    assert ENDED_LOCALLY in [
        msgspec.structs.replace(m, peer="") for m in a.said if isinstance(m, local.SwapEnded)
    ]


def test_outer_step_is_solo_without_a_network_process(made):
    a = made("a")
    a.step()
    assert a.counters.step == 2
    # the step is computed while the next one is trained
    assert not a.replica.between_steps(False, 0.1)
    a.settle()
    assert not a.replica.between_steps(False, 0.1, stepped=False)
    assert a.counters.solo_steps_total == 1
    assert a.counters.outer_clocks == [1, 0]


def test_lone_node_trains_as_without_averaging(made):
    a, off = made("a"), made("b")
    version = a.counters.policy_version
    for seed in range(20):
        for each in (a, off):
            each.step(seed=seed)
        assert not a.replica.between_steps(False, 0.1)
        for each in (a, off):  # trains on while the worker copies
            each.step(seed=100 + seed)
        a.settle()
        assert not a.replica.between_steps(False, 0.1, stepped=False)
        assert identical(a.weights(), off.weights())
    assert a.counters.outer_clocks == [10, 10]
    assert a.counters.solo_steps_total == 20
    assert a.counters.policy_version == version
    assert not any(bool(t.any()) for n, t in a.replica.tensors().items() if n.startswith("delta."))
    for fragment in (0, 1):
        a.solo(fragment)
    assert identical(a.phi(), a.weights())


def test_lagging_partner_changes_nothing(made):
    a, partner = made("a"), made("c")
    partner.step(seed=2)
    a.exchange(partner)
    assert a.between()
    a.step(seed=3)
    a.counters.outer_clocks = [100, 100]
    before, version = a.weights(), a.counters.policy_version
    momentum = {n: t for n, t in a.replica.tensors().items() if n.startswith("delta.")}
    assert any(bool(t.any()) for t in momentum.values())
    a.fetched(partner, b"z" * 16, peer="late")
    for _ in range(2):
        assert not a.between()
    assert a.said[-1].outcome == "lagging"
    assert a.counters.outer_clocks == [101, 100]
    assert a.counters.policy_version == version
    assert identical(a.weights(), before)
    assert all(torch.equal(a.phi()[n], before[n]) for n in a.tensors.names(0))
    assert all(torch.equal(a.replica.tensors()[n], t) for n, t in momentum.items())


def test_a_step_alone_that_an_exchange_overtakes_is_dropped(made):
    a, b, partner = made("a"), made("b"), made("c")
    partner.step(seed=2)
    for each in (a, b):
        each.step()
        each.exchange(partner)
    a.replica.receive(local.SoloStep(0, BLOCKS))
    a.settle()  # what the step alone would record is from before the commit
    assert a.between()
    assert b.between()
    assert a.counters.outer_clocks == b.counters.outer_clocks == [1, 0]
    assert a.counters.solo_steps_total == 0
    assert identical(a.weights(), b.weights())
    assert identical(a.replica.tensors(), b.replica.tensors())


def test_worker_error_reaches_the_trainer(made, monkeypatch):
    a = made("a")
    monkeypatch.setattr(codecs, "encode_smallest", lambda *args, **options: 1 / 0)
    a.replica.receive(local.TakeSnapshot(SESSION, 0, BLOCKS))
    a.settle()
    with pytest.raises(ZeroDivisionError):
        a.replica.between_steps(True, 0.1, stepped=False)


def adopt(a, other, step=30, wrong="", trained=0):
    a.counters.step = trained
    tensors = other.phi()
    if wrong == "nan":
        tensors = {n: t * float("nan") for n, t in tensors.items()}
    path = a.directory / "in-state.bin"
    path.write_bytes(b"".join(codecs.encode(tensors, a.tensors.layout, "bfloat16")))
    if wrong == "payload":
        path.write_bytes(path.read_bytes()[:-1])
    a.replica.receive(local.AdoptState("peer", str(path), step))
    a.settle()
    a.replica.between_steps(True, 0.1, stepped=False)
    return a.said[-1].outcome


def test_untrained_node_adopts_a_state(made):
    a, other = made("a"), made("b")
    other.step(seed=5)
    other.solo(0)
    assert adopt(a, other) == "adopted"
    rounded = {name: phi.to(torch.bfloat16).float() for name, phi in other.phi().items()}
    assert identical(a.weights(), rounded)
    delta = {name: torch.zeros_like(phi) for name, phi in rounded.items()}
    assert identical(
        a.replica.tensors(),
        {f"phi.{n}": t for n, t in rounded.items()} | {f"delta.{n}": t for n, t in delta.items()},
    )
    assert a.counters.outer_clocks == [30, 30]


def test_untrained_adapter_adopts_a_trained_state(made):
    adapter = LoraShape(2, 4, ("q_proj",))
    a, other = made("a", probe=Verdict(Losses(1.0, 1.0)), adapter=adapter), made("b")
    with torch.no_grad():
        for p in a.model.parameters():
            p.zero_()
    a.replica.restore({})
    other.step(seed=5)
    other.solo(0)
    assert adopt(a, other) == "adopted"


@pytest.mark.parametrize("adapter", [LoraShape(2, 4, ("q_proj",)), None])
def test_only_an_adapter_averages_with_weights_of_another_norm(made, adapter):
    a, other = made("a", probe=Verdict(Losses(1.0, 1.0)), adapter=adapter), made("b")
    with torch.no_grad():
        for p in a.model.parameters():
            p.mul_(0.1)
    a.replica.restore({})
    a.fetched(other)
    a.between()
    a.between()
    (ended,) = [m for m in a.said if isinstance(m, local.SwapEnded)]
    assert ended.outcome == ("accepted" if adapter else "norm_ratio")


@pytest.mark.parametrize("losses", [Losses(1.0, 7.5), Losses(1.0, float("nan")), None])
def test_state_that_unlearns_own_completions_is_refused(made, losses):
    a, other = made("a", probe=Verdict(losses)), made("b")
    other.step(seed=5)
    before = a.weights()
    assert adopt(a, other) == "worse"
    assert identical(a.weights(), before)


@pytest.mark.parametrize(
    ("wrong", "trained", "outcome"),
    [("nan", 0, "not_finite"), ("payload", 0, "payload"), ("", 1, "local")],
)
def test_damaged_state_and_any_after_a_step_are_refused(wrong, trained, outcome, made):
    a, other = made("a"), made("b")
    other.step(seed=5)
    before = a.weights()
    assert adopt(a, other, wrong=wrong, trained=trained) == outcome
    assert identical(a.weights(), before)
    assert a.counters.outer_clocks == [0, 0]

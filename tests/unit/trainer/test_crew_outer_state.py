"""What a stage averages by goes into its journal with its weights, and a stage that comes back goes
on from both."""

import threading

import msgspec
import pytest
import torch
import trio
from swarmnode.stages.transfer import (
    RecoverySettings,
    Sharing,
    SnapshotRecorder,
    SourceKind,
    StageState,
    load_weights,
    trained,
)

from swarmnode.config import Config
from swarmnode.errors import StateError
from swarmnode.policy.build_deep import write_deep_model
from swarmnode.stages import transfer
from swarmnode.stages.recovery import Restored
from swarmnode.stages.trainer import CLOCKS, Stage, StageRecovery, recovery_settings
from swarmnode.stages.wire import NO_HASH, Assigned, Taken
from tests.support.crew_models import averaging_of, opened
from tests.support.foreign import until
from tests.support.replica import settle

CREW = b"c" * 32
WEIGHTS = {"rule": "noloco", "fragments": 1, "sync_every": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    path = write_deep_model(tmp_path_factory.mktemp("model"), layers=3)
    config = Config.model_validate(
        {
            "policy": {"model": str(path), "device": "cpu"},
            "stages": {"mode": "always"},
            "weights": WEIGHTS,
        }
    )
    with opened(config) as model:
        yield config, model


class Node:
    """One process of a node that holds the middle stage. Steps and outer steps alone are real;
    there is nobody else."""

    def __init__(self, model, directory):
        config, crew_model = model
        config = config.model_copy(
            update={"node": config.node.model_copy(update={"data_dir": directory})}
        )
        assigned = Assigned(CREW, b"l" * 32, 1, (1, 1, 1), ("a", "b", "c"), 0, NO_HASH, Taken(), "")
        self.assigned = assigned
        self.stage = Stage(
            assigned, crew_model.build((1, 1, 1), 1), crew_model.settings(), crew_model.limits()
        )
        self.said = []
        self.averaging = averaging_of(config, self.stage, self.said.append, connected=lambda: False)
        settings = recovery_settings(config.stages, crew_model.run)
        self.recovery = StageRecovery(
            directory / "trainer", settings, crew_model, lambda: self.averaging
        )
        self.recovery.prepare(assigned)
        self.recovery.built(self.stage)
        self.journal = self.recovery._journal
        self.step_of_journal = self.journal.step

    def begin(self, outer=()):
        self.averaging.begin(dict(outer))
        self.stage.observers.insert(0, self.averaging)

    def come_back(self):
        """As `restore` does with R0, but for asking the others."""
        kept = self.journal.read()
        load_weights(self.stage.runtime, kept.state.weights)
        restored = Restored(SourceKind.JOURNAL, kept.state.step, None, None, (), (), kept)
        restored.install(self.stage.worker)
        self.stage.worker.participant.step = kept.state.step
        self.begin(kept.outer)

    def train(self, steps):
        for _ in range(steps):
            member = self.stage.worker
            generator = torch.Generator().manual_seed(member.participant.step)
            for parameter in self.stage.runtime.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            member.participant.step += 1
            member.step(1.0, 1e-3)
            # what is due is computed, and taken at the next step
            settle(self.averaging.receive, self.said)
            self.journal.flush()

    def end(self):
        self.recovery.close()
        self.averaging.close()


@pytest.fixture
def node(model, tmp_path):
    nodes = []

    def start(name="a"):
        nodes.append(Node(model, tmp_path / name))
        return nodes[-1]

    yield start
    for each in nodes:
        each.end()


def equal(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(t, other[name]) for name, t in one.items()
    )


def with_momentum(outer):
    return {n: torch.ones_like(t) if n.startswith("delta.") else t for n, t in outer.items()}


def test_a_stage_that_comes_back_goes_on_averaging_as_if_nothing_had_happened(node):
    first, control = node("a"), node("b")
    for each in (first, control):
        each.begin(with_momentum(each.averaging.tensors()))
        each.train(7)
    outer = first.averaging.tensors()
    assert outer[CLOCKS].tolist() == [1]
    assert equal(outer, with_momentum(outer)), "a step alone leaves the momentum"
    first.end()
    again = node("a")
    assert again.step_of_journal == 7
    again.come_back()
    assert equal(again.averaging.tensors(), outer)
    assert again.averaging.facts().outer_steps == [1]
    for each in (again, control):
        each.train(4)
    assert again.averaging.facts().outer_steps == [2]
    assert equal(trained(again.stage.runtime), trained(control.stage.runtime))
    assert equal(again.averaging.tensors(), control.averaging.tensors())


def test_slow_weights_are_of_the_step_that_the_weights_are_of(node, monkeypatch):
    """The disk is slow: the file holds an older step than memory, and everything in it is of that
    step."""
    begun, go = threading.Event(), threading.Event()
    save = transfer.save
    one = node()
    one.begin()
    one.train(4)
    then, weights = (
        one.averaging.tensors(),
        {n: t.detach().clone() for n, t in trained(one.stage.runtime).items()},
    )
    monkeypatch.setattr(transfer, "save", lambda *args: (begun.set(), go.wait(10), save(*args)))
    one.journal.note(one.stage.worker, then)
    assert begun.wait(10)
    flush, one.journal.flush = one.journal.flush, lambda: None
    one.train(4)
    assert not equal(one.averaging.tensors(), then)
    go.set()
    flush()
    kept = one.journal.read()
    assert kept.state.step == 4
    assert equal(kept.outer, then)
    assert equal(kept.state.weights, weights)


def test_a_slow_disk_keeps_neither_the_next_stage_nor_an_offer_waiting(node, monkeypatch):
    begun, go, save = threading.Event(), threading.Event(), transfer.save
    one = node()
    one.begin()
    one.train(1)
    monkeypatch.setattr(transfer, "save", lambda *args: (begun.set(), go.wait(30), save(*args)))
    for steps in (2, 3):  # the last one is not written
        one.stage.worker.participant.step = steps
        one.journal.note(one.stage.worker, {})
        assert begun.wait(10)
    offered = lambda: [(copy.lineage, copy.step) for copy in one.recovery.copies()]
    assert offered() == [(one.assigned.lineage, 2)], (
        "what will be there, and not what it takes the place of"
    )
    one.recovery.prepare(msgspec.structs.replace(one.assigned, lineage=b"m" * 32))
    assert offered() == [(one.assigned.lineage, 2)]
    again = threading.Thread(target=one.recovery.prepare, args=[one.assigned])
    again.start()  # the file that is being written: that is waited for
    until(lambda: one.recovery.progress() > 0, lambda: "no progress", pause=0.01)
    assert again.is_alive()
    go.set()
    again.join(30)
    assert offered() == [(one.assigned.lineage, 2)]


def test_a_journal_without_slow_weights_is_one_and_they_begin_anew(node, model):
    first = node()
    # a node that averages with nobody
    alone = SnapshotRecorder(first.stage.runtime.spec, RecoverySettings(), first.journal)
    first.stage.observers[:] = [alone]
    first.train(3)
    weights = {
        first.stage.runtime.spec.whole(n): t.detach().clone()
        for n, t in trained(first.stage.runtime).items()
    }
    first.end()
    again = node()
    again.come_back()
    tensors = again.averaging.tensors()
    assert all(
        torch.equal(t, weights[name.removeprefix("phi.")])
        for name, t in tensors.items()
        if name.startswith("phi.")
    )
    assert all(not t.any() for name, t in tensors.items() if name.startswith("delta."))
    assert tensors[CLOCKS].tolist() == [0]


def test_slow_weights_that_are_not_finite_make_a_journal_no_source(node):
    one = node()
    one.begin()
    one.train(2)
    tensors, about = transfer.load(one.journal.path)
    name = next(n for n in tensors if n.startswith("outer.phi."))
    tensors[name].view(-1)[0] = float("nan")
    transfer.save(one.journal.path, tensors, about)
    with pytest.raises(StateError, match="not finite"):
        one.journal.read()


def test_slow_weights_of_other_layers_are_refused(node):
    one = node()
    one.begin()
    one.train(1)
    other = {
        name.replace("layers.1.", "layers.2."): t for name, t in one.averaging.tensors().items()
    }
    with pytest.raises(StateError):
        one.averaging.begin(other)
    assert one.averaging.tensors().keys() != other.keys()


async def test_a_stage_that_begins_again_at_an_older_step_gives_its_neighbours_a_copy_at_once(
    node, monkeypatch
):
    async def nobody(assigned, kind, gate):
        return {}

    monkeypatch.setattr("swarmnode.stages.trainer.connect_all", nobody)
    one, stored = node(), []
    monkeypatch.setattr(Sharing, "announce", lambda self, what: stored[-1].set())
    # at 0 it is the base, which is on every disk
    for step, gives in ((0, False), (9, True), (12, False), (5, True)):
        crew = msgspec.structs.replace(one.assigned, step=step)
        stored.append(trio.Event())
        async with one.recovery.open(crew, one.stage):
            one.recovery.peer.stage.restored = StageState(step, {})
            one.recovery.attach(crew, one.stage.begin(crew, {}))
            assert one.recovery.peer.stage.restored is None, "it is as large as the stage"
            if gives:
                with trio.fail_after(30):
                    await stored[-1].wait()
        assert stored[-1].is_set() == gives

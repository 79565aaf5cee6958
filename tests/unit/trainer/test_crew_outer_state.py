"""A stage's checkpoint contains the state of averaging, and a restored stage continues from it."""

import pytest
import torch

from swarmnode.errors import StateError
from swarmnode.policy.build_deep import write_deep_model
from swarmnode.stages.crew_messages import StageAssignment
from swarmnode.stages.trainer.local_stage import LocalStage
from swarmnode.stages.trainer.restore import RestoredStage, RestoreSource
from swarmnode.stages.trainer.stage_averaging import CLOCKS
from swarmnode.stages.trainer.stage_checkpoints import load_weights, trained
from swarmnode.weights import local
from tests.support.crew_models import averaging_of, opened, recovery_of, stage_of
from tests.support.replica import settle

CREW = b"c" * 32
WEIGHTS = {"rule": "noloco", "fragments": 1, "sync_every": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = write_deep_model(tmp_path_factory.mktemp("model"), layers=3)
    with opened(policy={"model": str(path)}, weights=WEIGHTS) as found:
        yield found


class Node:
    """One process of a node that holds the middle stage and trains it alone."""

    def __init__(self, model, directory):
        config, crew_model = model
        config = config.model_copy(
            update={"node": config.node.model_copy(update={"data_dir": directory})}
        )
        self.assigned = StageAssignment(CREW, b"l" * 32, 1, (1, 1, 1), ("a", "b", "c"), 0, "")
        self.stage = stage_of(crew_model, self.assigned)
        self.sent = []
        self.averaging = averaging_of(config, self.stage, self.sent.append, connected=lambda: False)
        self.recovery = recovery_of(
            config, crew_model, directory / "trainer", lambda: self.averaging
        )
        self.recovery.prepare(self.assigned)
        self.recovery.stage_built(self.stage)

    def begin(self, outer=()):
        self.averaging.begin(dict(outer))
        self.stage.observers.insert(0, self.averaging)

    def checkpoint(self):
        """The own checkpoint on disk."""
        recovery, runtime = self.recovery, self.stage.runtime
        recovery._store.flush()
        local = LocalStage(
            runtime, None, recovery._layouts, "float32", recovery._recorder, recovery._store
        )
        return local.read_checkpoint()

    def come_back(self):
        """Restore the own checkpoint as `StageRecovery.restore` does, without other sources."""
        found = self.checkpoint()
        load_weights(self.stage.runtime, found.state.weights)
        source = RestoreSource("checkpoint", found.state.step)
        RestoredStage(source, (), found).install(self.stage.worker)
        self.stage.worker.participant.step = found.state.step
        self.begin(found.outer)

    def train(self, steps):
        for _ in range(steps):
            worker = self.stage.worker
            generator = torch.Generator().manual_seed(worker.participant.step)
            for parameter in self.stage.runtime.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            worker.participant.step += 1
            worker._step(1.0, 1e-3)
            # a due step is prepared here and committed at the next step
            settle(self.averaging.receive, self.sent)
            self.recovery._store.flush()

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


def test_restored_stage_continues_to_average(node):
    first, control = node("a"), node("b")
    for each in (first, control):
        each.begin(with_momentum(each.averaging.tensors()))
        each.train(7)
    outer = first.averaging.tensors()
    assert outer[CLOCKS].tolist() == [1]
    assert equal(outer, with_momentum(outer)), "a step alone leaves the momentum"
    first.end()
    again = node("a")
    again.come_back()
    assert again.stage.step == 7
    assert equal(again.averaging.tensors(), outer)
    assert again.averaging.facts(False).outer_steps == [1]
    for each in (again, control):
        each.train(4)
    assert again.averaging.facts(False).outer_steps == [2]
    assert equal(trained(again.stage.runtime), trained(control.stage.runtime))
    assert equal(again.averaging.tensors(), control.averaging.tensors())


def test_slow_weights_default_to_the_stage_s_own(node):
    one = node()
    one.begin()
    one.train(3)
    one.averaging.begin()
    weights = {
        one.stage.runtime.spec.whole_name(n): t.detach().clone()
        for n, t in trained(one.stage.runtime).items()
    }
    tensors = one.averaging.tensors()
    assert all(
        torch.equal(t, weights[name.removeprefix("phi.")])
        for name, t in tensors.items()
        if name.startswith("phi.")
    )
    assert all(not t.any() for name, t in tensors.items() if name.startswith("delta."))
    assert tensors[CLOCKS].tolist() == [0]


def test_a_state_of_averaging_of_other_layers_is_refused(node):
    one = node()
    one.begin()
    one.train(1)
    other = {
        name.replace("layers.1.", "layers.2."): t for name, t in one.averaging.tensors().items()
    }
    with pytest.raises(StateError):
        one.averaging.begin(other)
    assert one.averaging.tensors().keys() != other.keys()


def test_a_stage_adopts_no_state_of_another_crew(node):
    """A crew whose stages have weights of different crews has no consistent policy."""
    one = node()
    one.begin()
    before = one.averaging.tensors()
    one.averaging.receive(local.AdoptState("peer", "/somewhere", 3))
    assert one.sent == [local.StateAdopted("peer", "local", [0])]
    assert equal(one.averaging.tensors(), before)

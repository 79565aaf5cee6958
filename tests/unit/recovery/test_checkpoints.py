"""Checkpoints as bytes and as files: exact, replaced whole or not at all, and never trusted."""

import copy
import threading
import tracemalloc
from types import SimpleNamespace

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from swarmnode.errors import BadMessage, StateError
from swarmnode.stages.stage_frames import Fence, FrameLimits, Place
from swarmnode.stages.state_messages import state_bytes
from swarmnode.stages.trainer import stage_checkpoints
from swarmnode.stages.trainer.links import Links
from swarmnode.stages.trainer.pipeline import StageWorker, WorkerSettings
from swarmnode.stages.trainer.stage_checkpoints import (
    Checkpoint,
    CheckpointIdentity,
    CheckpointMetadata,
    CheckpointStore,
    Recorder,
    RecoverySettings,
    StageState,
    as_tensor,
    checkpoint_interval,
    decode_state,
    encode_state,
    find_checkpoints,
    read_checkpoint,
    trained_layout,
)
from swarmnode.stages.trainer.stage_model import LrScale, StageRuntime
from swarmnode.weights.layout import make_layout
from tests.support.crew import run_inline
from tests.support.largest import Alive
from tests.support.split_models import split_model

LAYOUT = make_layout([("a", (3, 4), "float32"), ("b", (5,), "float32")])
OURS = CheckpointIdentity("aa" * 32, (1, 2, 1), "owner")
THEIRS = CheckpointIdentity("bb" * 32, (2, 2), "owner")


def state_of(step, seed=1):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: {spec.name: torch.randn(spec.shape, generator=generator) for spec in LAYOUT}
    second = {name: tensor.square() for name, tensor in draw().items()}
    return StageState(step, draw(), draw(), second, {"a": 7.0, "b": 7.0}, 2.5)


def checkpoint(step, identity=OURS, stage=1, own=True, **more):
    body = encode_state(state_of(step, step), LAYOUT, "full")
    about = CheckpointMetadata(identity, stage, own, "full", step, 2.5, LrScale(1.1, 10, 3))
    return Checkpoint(about, as_tensor(body), more)


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path)
    store.begin(OURS, (1, 0, 2))
    yield store
    store.close()


def same(mine, theirs):
    return mine.keys() == theirs.keys() and all(torch.equal(t, theirs[n]) for n, t in mine.items())


def test_exact_state_is_equal_and_small_state_is_rounded():
    state = state_of(4)
    body = encode_state(state, LAYOUT, "full")
    assert len(body) == state_bytes(LAYOUT, "full")
    back = decode_state(as_tensor(body), LAYOUT, "full", 4, 2.5)
    for part in ("weights", "first", "second"):
        assert same(getattr(back, part), getattr(state, part))
    assert back.counts == state.counts
    small = encode_state(state, LAYOUT, "small")
    assert len(small) == state_bytes(LAYOUT, "small")
    back = decode_state(as_tensor(small), LAYOUT, "small", 4, 2.5)
    assert same(back.weights, {n: t.bfloat16().float() for n, t in state.weights.items()})
    assert not back.counts


def test_a_tensor_without_moments_has_none_afterwards():
    state = state_of(4)
    state = StageState(
        4, state.weights, {"a": state.first["a"]}, {"a": state.second["a"]}, {"a": 1}
    )
    back = decode_state(as_tensor(encode_state(state, LAYOUT, "full")), LAYOUT, "full", 4, 0.0)
    assert set(back.first) == set(back.counts) == {"a"}


@pytest.mark.parametrize("form", ["full", "small"])
def test_bytes_that_are_no_state_are_refused(form):
    body = encode_state(state_of(1), LAYOUT, form)
    with pytest.raises(BadMessage, match="size"):
        decode_state(as_tensor(body[:-1]), LAYOUT, form, 1, 0.0)
    broken = copy.copy(body)
    broken[-2:] = b"\xff\xff"  # NaN in both formats
    with pytest.raises(BadMessage, match="not_finite"):
        decode_state(as_tensor(broken), LAYOUT, form, 1, 0.0)
    huge = state_of(1)
    huge.weights["a"].view(-1)[0] = 1e38
    with pytest.raises(BadMessage, match="bounds"):
        decode_state(as_tensor(encode_state(huge, LAYOUT, form)), LAYOUT, form, 1, 0.0)
    if form == "full":
        state = state_of(1)
        negative = StageState(1, state.weights, {}, {"a": -state.second["a"]}, {"a": 1.0})
        with pytest.raises(BadMessage, match="bounds"):
            decode_state(as_tensor(encode_state(negative, LAYOUT, "full")), LAYOUT, "full", 1, 0.0)


def test_checkpoint_is_read_with_its_metadata(store, tmp_path):
    rng, phi = torch.get_rng_state(), torch.randn(4)
    written = checkpoint(3, rng=rng, **{"outer.phi.a": phi})
    store.write(written)
    found = store.read(1)
    assert msgspec.structs.replace(found.metadata, root="") == written.metadata
    assert torch.equal(found.body, written.body)
    assert same(found.extra_tensors, {"rng": rng, "outer.phi.a": phi})
    assert store.metadata(1).step == 3
    assert OURS.path(1).name == "1-3.safetensors"
    again = CheckpointStore(tmp_path)
    again.begin(OURS, (1,))
    assert again.metadata(1).step == 3
    again.close()


def test_new_checkpoint_replaces_the_old_one(store, tmp_path):
    store.write(checkpoint(9, stage=0, own=False))
    store.write(checkpoint(4, stage=0, own=False))
    assert store.metadata(0).step == 4
    assert len(find_checkpoints(tmp_path)) == 1


@pytest.mark.parametrize("damage", ["empty", "bit", "metadata", "name"])
def test_damaged_file_is_deleted_when_it_is_read(store, tmp_path, damage):
    store.write(checkpoint(3))
    path = tmp_path / OURS.path(1)
    data, stage = bytearray(path.read_bytes()), 1
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "bit":
        data[len(data) - 9] ^= 4
        path.write_bytes(bytes(data))
    elif damage == "metadata":
        path.write_bytes(bytes(data).replace(b"stage", b"stake"))
    else:
        (tmp_path / OURS.path(0)).write_bytes(bytes(data))
        path, stage = tmp_path / OURS.path(0), 0
    with pytest.raises(StateError, match="damaged"):
        store.read(stage)
    assert not path.exists()
    assert store.metadata(stage) is None
    with pytest.raises(StateError):
        read_checkpoint(tmp_path, OURS.path(2))


def test_full_disk_keeps_the_old_checkpoint_and_is_logged(store, tmp_path, monkeypatch):
    store.write(checkpoint(3))
    save = stage_checkpoints.save_file

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stage_checkpoints, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        store.write(checkpoint(4))
    assert store.write_soon(checkpoint(5))
    store.flush()
    assert "No space" in store.error
    assert [path.name for path in tmp_path.rglob("*.*")] == ["1-3.safetensors"]
    assert store.read(1).metadata.step == 3
    monkeypatch.setattr(stage_checkpoints, "save_file", save)
    store.write_soon(checkpoint(6))
    store.flush()
    assert store.error is None
    assert store.metadata(1).step == 6


def test_busy_disk_skips_a_checkpoint(store, monkeypatch):
    save, go = stage_checkpoints.save_file, threading.Event()
    monkeypatch.setattr(
        stage_checkpoints, "save_file", lambda *args, **keys: (go.wait(10), save(*args, **keys))
    )
    assert store.write_soon(checkpoint(1))
    assert store.busy
    assert store.writing_metadata.step == 1
    assert not store.write_soon(checkpoint(2))
    go.set()
    store.flush()
    assert not store.busy
    assert store.writing_metadata is None
    assert store.metadata(1).step == 1


def test_files_of_older_crews_are_deleted(store, tmp_path):
    other = CheckpointStore(tmp_path)
    other.begin(THEIRS, (0, 1))
    other.write(checkpoint(5, THEIRS, 1))
    other.write(checkpoint(2, THEIRS, 0, own=False))
    other.close()
    (tmp_path / OURS.lineage).mkdir()
    (tmp_path / OURS.lineage / ".1-3.safetensors.tmp").write_bytes(b"half")
    store.write(
        checkpoint(2, stage=0, own=False)
    )  # a neighbour's checkpoint does not count as own steps
    assert len(find_checkpoints(tmp_path)) == 3
    store.write(checkpoint(4))
    assert {(about.identity.lineage, about.step) for about in find_checkpoints(tmp_path)} == {
        (OURS.lineage, 2),
        (OURS.lineage, 4),
        (THEIRS.lineage, 5),
    }
    store.write(checkpoint(5))
    assert {about.identity.lineage for about in find_checkpoints(tmp_path)} == {OURS.lineage}
    assert [path.name for path in tmp_path.iterdir()] == [OURS.lineage]


def test_large_stages_are_written_every_few_steps():
    large = make_layout([("a", (500_000_000,), "float32")])  # 6 GB with moments
    assert checkpoint_interval([LAYOUT]) == 1
    assert checkpoint_interval([LAYOUT, large]) == 4
    assert checkpoint_interval([]) == 1


@pytest.fixture
def worker():
    """A stage of three layers with Adam's moments."""
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    spec, model = split_model(AutoModelForCausalLM.from_config(shape), [1, 3, 1])[1]
    links = Links(1, {}, FrameLimits(hidden=256, vocab=64, tokens=64))
    fence = Fence(Place(b"c" * 16, 1, 1), 3)
    worker = StageWorker(StageRuntime(spec, model), links, fence, WorkerSettings(), run_inline)
    for parameter in worker.runtime.parameters():
        parameter.grad = torch.ones_like(parameter)
    worker.optimizer.step(1.0, 1e-3)
    return worker


def test_small_copy_takes_two_bytes_per_weight(worker, tmp_path, monkeypatch):
    """The disk stands still: 12 bytes of each weight are on their way to it."""
    go, save, peaks = threading.Event(), stage_checkpoints.save_file, []
    monkeypatch.setattr(
        stage_checkpoints, "save_file", lambda *args, **keys: (go.wait(10), save(*args, **keys))
    )
    layouts = [trained_layout(worker.runtime.model)] * 3
    for every in (100, 1):
        store = CheckpointStore(tmp_path / str(every))
        store.begin(OURS, (1,))
        settings = RecoverySettings(every, full_bytes=0)
        recorder = Recorder(worker.runtime.spec, settings, layouts, store)
        tracemalloc.start()
        with Alive() as alive:
            recorder.on_step_in_thread(worker)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        go.set()
        store.close()
        go.clear()
        peaks.append((peak + alive.peak) / sum(p.numel() for p in worker.runtime.parameters()))
    alone, both = peaks
    assert 11.5 < alone < 13.0
    assert 1.5 < both - alone < 3.0


def test_last_checkpoint_is_not_written_during_a_step(monkeypatch):
    written = []
    monkeypatch.setattr(Recorder, "_write", lambda self, *about: written.append(about))
    recorder = object.__new__(Recorder)
    recorder._store = SimpleNamespace(flush=lambda: None)
    optimizer = SimpleNamespace(lock=threading.Lock(), lr_scale=LrScale(taken=3))
    recorder.unwritten = (
        SimpleNamespace(optimizer=optimizer),
        SimpleNamespace(lr_scale=LrScale(taken=3)),
    )
    recorder.write_last()
    assert len(written) == 1
    optimizer.lr_scale.next()  # the next step has begun to move the weights
    recorder.write_last()
    assert len(written) == 1

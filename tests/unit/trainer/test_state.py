"""State on disk: exact resumption, one rename, refusal of foreign and damaged files."""

import math
import os
import shutil
import time
from functools import partial

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from swarmnode.config import LoraSettings, PolicyConfig
from swarmnode.errors import StateError
from swarmnode.swarm import rollback
from swarmnode.trainer import state
from swarmnode.trainer.state import Counters


def make(seed=0, optimizer=partial(torch.optim.AdamW, lr=0.01)):  # noqa: B008 - immutable
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    return model, optimizer(model.parameters()), torch.Generator().manual_seed(seed)


def step(model, optimizer, rng):
    x = torch.randn(16, 4, generator=rng)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_use_counts_keep_the_latest_peers():
    counters = Counters()
    for number in range(state.PEERS_USED + 10):
        counters.note_use(f"peer {number}")
        counters.note_use("a friend")
    assert len(counters.peers_used) == state.PEERS_USED
    assert counters.peers_used["a friend"] == state.PEERS_USED + 10
    assert "peer 0" not in counters.peers_used
    assert list(counters.peers_used)[-2:] == [f"peer {state.PEERS_USED + 9}", "a friend"]


class Eight(torch.optim.Optimizer):
    """Adam with the form of bitsandbytes' state: 8-bit moments with their scales, and the number of
    steps as an int. Its arithmetic is simpler, and depends on all of them."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter]
            for name in ("1", "2"):
                moment = kept.get(f"state{name}", torch.zeros(parameter.shape, dtype=torch.uint8))
                kept[f"state{name}"] = moment + (parameter.grad > 0)
                kept[f"absmax{name}"] = (
                    kept.get(f"absmax{name}", 0) + parameter.grad.abs().max()[None]
                )
            kept["step"] = kept.get("step", 0) + 1
            scales = kept["absmax1"] / (1 + kept["absmax2"]) / kept["step"]
            parameter.sub_(0.01 * scales * (kept["state1"].float() - kept["state2"].float() / 3))


OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "8 bits": Eight,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_restored_trainer_continues_bit_for_bit(tmp_path, kind):
    model, optimizer, rng = make(optimizer=OPTIMIZERS[kind])
    for _ in range(3):
        step(model, optimizer, rng)
    counters = Counters(
        step=3, policy_version=3, sequence=24, peers_used={"a": 2}, reward_held_out=0.25
    )
    state.write(tmp_path, state.take(model, optimizer, rng, counters, "f"))
    other, other_optimizer, other_rng = make(seed=1, optimizer=OPTIMIZERS[kind])
    restored = state.restore(tmp_path, other, other_optimizer, other_rng, "f")
    assert restored == counters
    for _ in range(2):
        step(model, optimizer, rng)
        step(other, other_optimizer, other_rng)
    assert torch.equal(weights(model), weights(other))


def test_a_snapshot_does_not_follow_the_model(tmp_path):
    model, optimizer, rng = make()
    step(model, optimizer, rng)
    before = weights(model)
    snapshot = state.take(model, optimizer, rng, Counters(step=1), "f")
    step(model, optimizer, rng)
    state.write(tmp_path, snapshot)
    other, other_optimizer, other_rng = make(seed=1)
    state.restore(tmp_path, other, other_optimizer, other_rng, "f")
    assert torch.equal(weights(other), before)


def test_replacing_a_state_does_not_affect_its_reader(tmp_path, monkeypatch):
    """`swarmnode export` reads the state while the node trains. A new state may replace the file
    before safetensors opens it again by name."""
    model, optimizer, rng = make()
    step(model, optimizer, rng)
    state.write(tmp_path, state.take(model, optimizer, rng, Counters(step=1), "f"))
    expected = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    step(model, optimizer, rng)
    later = state.take(model, optimizer, rng, Counters(step=2), "f")

    def opened(name, *args, real=state.safe_open, **kwargs):
        state.write(tmp_path, later)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(state, "safe_open", opened)
    counters, tensors = state.read_file(tmp_path / state.FILE, "f")
    assert counters.step == 1
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in state.weights(tensors).items()
    )


def test_frozen_parameters_are_not_written(tmp_path):
    model, _, rng = make()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    names = state.take(model, optimizer, rng, Counters(), "f").tensors()
    assert "weights.2.weight" in names
    assert "weights.0.weight" not in names


def test_no_state_is_none(tmp_path):
    assert state.restore(tmp_path, *make(), "f") is None


def test_foreign_state_names_its_settings(tmp_path):
    model, optimizer, rng = make()
    owner = state.owner(b"\x01" * 32, state.adapter_shape(LoraSettings(r=16, lora_alpha=8)))
    state.write(tmp_path, state.take(model, optimizer, rng, Counters(model="org/model"), owner))
    with pytest.raises(
        StateError,
        match=(
            r"saved with policy\.model = org/model, policy\.lora\.r = 16,"
            r" policy\.lora\.lora_alpha = 8; set them so .*or move it"
            r" away"
        ),
    ):
        state.read_file(tmp_path / state.FILE, state.owner(b"\x02" * 32, None))


MEANING_KEPT = {
    "model": "a name; the fingerprint of its files counts",
    "revision": "a name; the fingerprint of its files counts",
    "chat": "changes prompts, not tensors",
    "dtype": "the precision of activations",
    "quantization": "the precision of the frozen base",
    "optim": "its moments have names of their own",
    "devices": "where it computes",
    "threads": "where it computes",
    "server": "where it samples",
}
"""Settings of the policy that may change at a restart, each with the reason."""


def test_every_setting_is_part_of_the_owner_or_keeps_the_meaning_of_the_tensors():
    assert set(PolicyConfig.model_fields) - {"lora"} == set(MEANING_KEPT)
    usual = {"r": 8, "lora_alpha": 16}
    other = {"r": 4, "lora_alpha": 64}
    assert set(LoraSettings.model_fields) == set(other), "a new setting of the adapter"
    base = LoraSettings(**usual)

    def name(lora, fingerprint=b"\x01" * 32):
        return state.owner(fingerprint, state.adapter_shape(lora))

    names = [LoraSettings(**usual | {key: value}) for key, value in other.items()]
    names = [name(lora) for lora in [base, *names]]
    names += [name(base, fingerprint=b"\x02" * 32), name(LoraSettings())]
    shape = state.adapter_shape(base)
    changes = {"r": 2, "alpha": 3, "target_modules": ("q_proj",)}
    assert set(changes) == set(shape.__struct_fields__)
    names += [
        state.owner(b"\x01" * 32, msgspec.structs.replace(shape, **{key: value}))
        for key, value in changes.items()
    ]
    assert len(set(names)) == len(names)


def test_generator_of_another_device_becomes_a_seed():
    on_a_gpu = torch.arange(16, dtype=torch.uint8)  # seed and offset, where a CPU keeps 5 KB
    first, second, other = torch.Generator(), torch.Generator(), torch.Generator()
    state.set_generator(first, on_a_gpu)
    state.set_generator(second, on_a_gpu)
    state.set_generator(other, on_a_gpu + 1)
    draws = [torch.rand(4, generator=rng).tolist() for rng in (first, second, other)]
    assert draws[0] == draws[1] != draws[2]


def test_changed_optimizer_keeps_weights_and_resets_moments(tmp_path):
    for before, after in ((Eight, torch.optim.AdamW), (torch.optim.AdamW, Eight)):
        model, optimizer, rng = make(optimizer=before)
        step(model, optimizer, rng)
        state.write(tmp_path, state.take(model, optimizer, rng, Counters(step=1), "f"))
        other, other_optimizer, other_rng = make(seed=1, optimizer=after)
        state.restore(tmp_path, other, other_optimizer, other_rng, "f")
        assert torch.equal(weights(model), weights(other))
        assert not other_optimizer.state
        step(other, other_optimizer, other_rng)


def kept_and_last(directory, spoil, steps=1):
    """Write a good state that is kept, and a last one that `spoil` has damaged."""
    model, optimizer, rng = make()
    for _ in range(steps):
        step(model, optimizer, rng)
    state.write(directory, state.take(model, optimizer, rng, Counters(step=1, sequence=8), "f"))
    (directory / rollback.HISTORY).mkdir()
    os.link(directory / state.FILE, directory / rollback.HISTORY / "0.safetensors")
    good = weights(model)
    step(model, optimizer, rng)
    last = state.take(model, optimizer, rng, Counters(step=2, sequence=16), "f")
    tensors, metadata = last.tensors(), {"fingerprint": "f"}
    counters = spoil(tensors) or last.counters
    metadata["counters"] = msgspec.json.encode(counters).decode()
    save_file(tensors, directory / ".new", metadata=metadata)
    os.replace(directory / ".new", directory / state.FILE)  # the kept one is another file
    return good


def set_to(name, value):
    def spoil(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[-1] = value

    return spoil


def without(name):
    def spoil(tensors):
        del tensors[name]

    return spoil


def as_shape(name, *shape):
    def spoil(tensors):
        tensors[name] = torch.zeros(shape)

    return spoil


DAMAGES = {
    "a weight is NaN": set_to("weights.0.weight", math.nan),
    "a weight is infinite": set_to("weights.2.bias", math.inf),
    "a first moment is NaN": set_to("first.0.weight", math.nan),
    "a second moment is infinite": set_to("second.2.weight", math.inf),
    "a second moment is negative": set_to("second.2.weight", -1.0),
    "a count of steps is NaN": set_to("steps.0.bias", math.nan),
    "a moment has another shape": as_shape("first.0.weight", 4, 8),
    "a moment is too small": as_shape("second.0.bias", 3),
    "a moment has whole numbers": lambda t: t.update(
        {"first.0.bias": torch.zeros(8, dtype=torch.int64)}
    ),
    "a moment is missing": without("second.0.weight"),
    "a count of steps is missing": without("steps.0.weight"),
    "a weight is missing": without("weights.0.weight"),
    "a weight has another shape": as_shape("weights.0.weight", 8, 5),
    "weights are whole numbers": lambda t: t.update(
        {"weights.2.bias": torch.zeros(2, dtype=torch.int64)}
    ),
    "the generator is missing": without("rng"),
    "the generator has another type": as_shape("rng", 5),
    "a counter is negative": lambda t: Counters(step=2, oom_retries_total=-1),
    "a counter is beyond a message": lambda t: Counters(step=2, sequence=2**63),
    "outer weights are NaN": lambda t: t.update({"outer.phi.0.weight": torch.tensor([math.nan])}),
}


BYTES = {"the end is missing": lambda data: data[:-10], "no state": lambda data: b"\xff" * 100}


@pytest.mark.parametrize("damage", [*DAMAGES, *BYTES])
def test_damaged_state_falls_back_to_an_earlier_one(tmp_path, damage):
    good = kept_and_last(tmp_path, DAMAGES.get(damage, lambda tensors: None))
    damaged = (tmp_path / state.FILE).read_bytes()
    if damage in BYTES:
        damaged = BYTES[damage](damaged)
        (tmp_path / state.FILE).write_bytes(damaged)
    model, optimizer, rng = make(seed=1)
    assert state.restore(tmp_path, model, optimizer, rng, "f").step == 1
    assert torch.equal(weights(model), good)
    step(model, optimizer, rng)
    assert bool(torch.isfinite(weights(model)).all())
    # the next start finds the good state, even if nothing is saved until then
    assert state.restore(tmp_path, *make(seed=2), "f").step == 1
    assert (tmp_path / rollback.DAMAGED).read_bytes() == damaged


def test_damaged_state_without_fallback_fails_with_one_line(tmp_path):
    kept_and_last(tmp_path, DAMAGES["a second moment is negative"])
    (tmp_path / rollback.HISTORY / "0.safetensors").unlink()
    model, optimizer, rng = make(seed=1)
    before = weights(model)
    with pytest.raises(StateError, match="move it away") as refused:
        state.restore(tmp_path, model, optimizer, rng, "f")
    assert refused.value.exit_code == 69
    assert "\n" not in str(refused.value)
    assert torch.equal(weights(model), before)
    assert not optimizer.state


def test_a_damaged_kept_state_is_passed_over(tmp_path):
    good = kept_and_last(tmp_path, set_to("weights.0.bias", math.nan))
    newer = tmp_path / rollback.HISTORY / "1.safetensors"
    shutil.copy(tmp_path / state.FILE, newer)
    os.utime(newer, (time.time() + 60, time.time() + 60))
    model, optimizer, rng = make(seed=1)
    assert state.restore(tmp_path, model, optimizer, rng, "f").step == 1
    assert torch.equal(weights(model), good)


def test_rolled_back_state_is_no_fallback(tmp_path):
    kept_and_last(tmp_path, set_to("weights.0.bias", math.nan))
    history = tmp_path / rollback.HISTORY
    os.rename(history / "0.safetensors", history / rollback.UNDONE)
    with pytest.raises(StateError):
        state.restore(tmp_path, *make(seed=1), "f")


def test_foreign_state_is_not_replaced_by_an_earlier_one(tmp_path):
    kept_and_last(tmp_path, lambda tensors: None)
    with pytest.raises(StateError, match="another model"):
        state.restore(tmp_path, *make(seed=1), "g")
    assert not (tmp_path / rollback.DAMAGED).exists()


def test_group_numbers_of_a_damaged_state_stay_used(tmp_path):
    kept_and_last(tmp_path, set_to("first.0.bias", math.inf))
    state.restore(tmp_path, *make(seed=1), "f")
    assert max(numbers.sequence for numbers in rollback.used_counters(tmp_path)) == 16


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_weights_that_are_not_finite_replace_no_good_state(tmp_path, number):
    model, optimizer, rng = make()
    step(model, optimizer, rng)
    state.write(tmp_path, state.take(model, optimizer, rng, Counters(step=1), "f"))
    with torch.no_grad():
        model[0].weight[0, 0] = number
    with pytest.raises(StateError):
        state.write(tmp_path, state.take(model, optimizer, rng, Counters(step=2), "f"))
    assert state.restore(tmp_path, *make(seed=1), "f").step == 1


def test_moments_in_8_bits_of_another_shape_are_refused(tmp_path):
    model, optimizer, rng = make(optimizer=Eight)
    step(model, optimizer, rng)
    kept = optimizer.state[model[0].weight]
    kept["state1"] = kept["state1"].reshape(4, 8)
    state.write(tmp_path, state.take(model, optimizer, rng, Counters(step=1), "f"))
    with pytest.raises(StateError, match=r"moment of 0\.weight"):
        state.restore(tmp_path, *make(seed=1, optimizer=Eight), "f")

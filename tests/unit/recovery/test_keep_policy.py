"""`swarmnode export` from a member that stores checkpoints of all stages."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

import swarmnode.policy
from swarmnode.config import Config, LoraSettings, PolicyConfig, TrainingConfig
from swarmnode.errors import StateError, Unavailable
from swarmnode.policy.fingerprint import fingerprint
from swarmnode.policy.load import lora_settings
from swarmnode.stages.trainer.pipeline import WorkerSettings
from swarmnode.stages.trainer.stage_checkpoints import RecoverySettings
from swarmnode.trainer import state
from swarmnode.weights.trainer.lora import freeze_a
from tests.support.exporting import export
from tests.support.lost_stages import checkpoints_in, quiet, rows_of

SETTINGS = WorkerSettings("float32")
CFG = TrainingConfig(per_device_train_tokens=64)
EMBEDDED = Path(swarmnode.policy.__file__).parent / "embedded"
IDS = torch.tensor([[5, 9, 17, 3, 8]])


@pytest.fixture
def base(models, tmp_path):
    """A directory with the model that training begins with."""
    directory = tmp_path / "base"
    models["llama"].save_pretrained(directory)
    for file in EMBEDDED.glob("*token*"):
        shutil.copy(file, directory)
    return directory


@pytest.fixture
def fleet(models, base, make_fleet, tmp_path):
    def build(keepers=(1,), lora=0, full_bytes=2**28):
        model = copy.deepcopy(models["llama"])
        if lora:
            model = get_peft_model(model, lora_settings(policy_of(base, lora)))
            freeze_a(dict(model.named_parameters()))
        chosen = RecoverySettings(checkpoint_every=2, seconds=30.0, full_bytes=full_bytes)
        owner = state.owner(fingerprint(base), state.adapter_shape(LoraSettings(r=lora)))
        directory, layers = tmp_path / "crew", [1, 1, 1, 1]
        return make_fleet(model, layers, directory, SETTINGS, chosen, keepers=keepers, owner=owner)

    return build


def policy_of(base, lora):
    return PolicyConfig.model_validate({"model": str(base), "lora": {"r": lora}, "devices": "cpu"})


async def train(fleet, steps):
    async with fleet.up() as crew:
        for number in range(steps):
            assert (await crew.head.update(rows_of(number, 6), CFG, 30.0, 1e-3)).refused is None
            await quiet(400)
            for station in fleet.stations:
                station.store.flush()


def config_of(fleet, base, keeper, lora=0):
    """Return a configuration whose data directory has the files of stage `keeper`'s node."""
    trainer = fleet.stations[keeper].directory
    data = trainer.parent / f"data-{keeper}"
    if not data.exists():
        data.mkdir()
        (data / "trainer").symlink_to(trainer)
    return Config.model_validate(
        {
            "node": {"data_dir": data},
            "policy": policy_of(base, lora).model_dump(),
            "weights": {"rule": "off"},
        }
    )


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def whole(fleet):
    """The crew's policy as one model, from what its members hold in memory."""
    model = copy.deepcopy(fleet.model)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for station in fleet.stations:
            for name, parameter in station.runtime.model.named_parameters():
                if parameter.requires_grad:
                    named[station.spec.whole_name(name)].copy_(parameter)
    return model.eval()


async def test_node_with_all_checkpoints_exports_the_policy(fleet, base, tmp_path):
    crew = fleet()
    await train(crew, 4)
    assert checkpoints_in(crew, 1) == dict.fromkeys(range(4), 4)
    told = export(config_of(crew, base, 1), tmp_path / "out", merge=False)
    assert (told.kind, told.step, told.stages) == ("weights", 4, (4, 4, 4, 4))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(model), logits(whole(crew)))
    assert not torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(base).eval()))


async def test_export_names_the_missing_stages(fleet, base, tmp_path):
    crew = fleet()
    await train(crew, 4)
    assert sorted(checkpoints_in(crew, 0)) == [0, 1, 3]
    with pytest.raises(Unavailable, match=r"no checkpoint of 1 of 4 stages \(2\).*policy_copy"):
        export(config_of(crew, base, 0), tmp_path / "out", merge=False)
    assert not (tmp_path / "out").exists()


async def test_small_checkpoints_are_exported_as_they_are(fleet, base, tmp_path):
    crew = fleet(full_bytes=1, keepers=(0, 1))
    await train(crew, 6)
    told = export(config_of(crew, base, 1), tmp_path / "out", merge=False)
    assert set(told.stages) == {6}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    expected = dict(whole(crew).named_parameters())
    for name, p in model.named_parameters():
        own = "layers.1." in name  # the own checkpoint is full
        assert torch.equal(p, expected[name] if own else expected[name].bfloat16().float())


async def test_an_adapter_of_a_crew_is_exported_as_one(fleet, base, tmp_path):
    crew = fleet(lora=2)
    await train(crew, 4)
    told = export(config_of(crew, base, 1, lora=2), tmp_path / "out", merge=True)
    assert (told.kind, told.stages) == ("weights", (4, 4, 4, 4))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.allclose(logits(merged), logits(whole(crew)), atol=1e-5)


async def test_copies_of_another_model_and_damaged_ones_are_refused(fleet, base, tmp_path):
    crew = fleet()
    await train(crew, 4)
    with pytest.raises(StateError, match="another model"):
        export(config_of(crew, base, 1, lora=2), tmp_path / "out", merge=False)
    for station in crew.stations:
        station.store.flush()
    file = next(crew.stations[1].directory.rglob("3-4.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(StateError, match="damaged"):
        export(config_of(crew, base, 1), tmp_path / "out", merge=False)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".out", "out"))] == []

"""An export loads with transformers alone and computes the same as the trained policy."""

import hashlib
import json
import os
import stat

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmnode import cli, gguf
from swarmnode.config import Config, PolicyConfig
from swarmnode.errors import Unavailable
from swarmnode.policy import convert
from swarmnode.policy.convert import local_copy
from swarmnode.policy.load import Policy, load_policy
from swarmnode.trainer import state
from swarmnode.trainer.measure import open_model
from swarmnode.weights.trainer.lora import freeze_a
from tests.support import exporting
from tests.support.gguf_files import write_model

pytestmark = pytest.mark.slow

IDS = torch.tensor([[5, 9, 17, 3, 8]])


def trained(tmp_path, lora: int = 0, model: str = "embedded") -> Policy:
    """Save a changed policy as the trainer does."""
    torch.set_num_threads(1)
    settings = {"lora": {"r": lora}, "devices": "cpu", "model": model}
    policy = load_policy(PolicyConfig.model_validate(settings))
    config = Config.model_validate({"policy": {"lora": {"r": lora}}})
    freeze_a(dict(policy.model.named_parameters()))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    counters = state.Counters(step=7, policy_version=6, reward_held_out=0.25, swarm="ab")
    optimizer = torch.optim.AdamW(policy.trainable_parameters())
    directory = tmp_path / "data" / "trainer"
    directory.mkdir(parents=True)
    name = state.owner(policy.fingerprint, state.adapter_shape(config.policy.lora))
    state.write(
        directory, state.take(policy.model, optimizer, policy.random_generator(0), counters, name)
    )
    return policy


def command(tmp_path, *arguments):
    """Run `swarmnode export` as a process; takes seconds."""
    return cli.run(
        ["export", str(tmp_path / "out"), "--data-dir", str(tmp_path / "data"), *arguments]
    )


def export(tmp_path, lora=0, merge=False, model="embedded"):
    """Run the child's work in this process."""
    policy = {"lora": {"r": lora}, "model": model}
    config = Config.model_validate({"node": {"data_dir": tmp_path / "data"}, "policy": policy})
    return exporting.export(config, tmp_path / "out", merge)


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def test_full_weights_load_back_to_identical_logits(tmp_path, capsys):
    policy = trained(tmp_path)
    assert command(tmp_path, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["kind"], result["step"], result["policy_version"], result["swarm"]) == (
        "weights",
        7,
        6,
        "ab",
    )
    assert result == json.loads((tmp_path / "out" / "swarmnode.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(model), logits(policy.model))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("17 + 25")["input_ids"] == policy.tokenizer("17 + 25")["input_ids"]
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".partial")] == []


def test_adapter_needs_base_and_merged_export_does_not(tmp_path):
    policy = trained(tmp_path, lora=4)
    assert export(tmp_path, lora=4).kind == "adapter"
    adapter = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(adapter), logits(policy.model))
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")) < 200_000

    (tmp_path / "out").rename(tmp_path / "adapter")
    assert export(tmp_path, lora=4, merge=True).kind == "weights"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.allclose(logits(merged), logits(policy.model), atol=1e-5)


def test_an_adapter_of_a_local_base_loads_from_any_directory(tmp_path, monkeypatch):
    """A relative directory and a GGUF file become an absolute directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_model(tmp_path / "m.gguf")
    monkeypatch.chdir(tmp_path)
    for base in ("./m.gguf", os.path.relpath(local_copy("./m.gguf"))):
        where = tmp_path / base.replace("/", "-")
        policy = trained(where, lora=4, model=base)
        export(where, lora=4, model=base)
        with monkeypatch.context() as elsewhere:
            elsewhere.chdir("/")
            adapter = AutoPeftModelForCausalLM.from_pretrained(where / "out").eval()
        assert torch.equal(logits(adapter), logits(policy.model))


def test_an_adapter_of_smollm2_is_opened_on_another_machine(tmp_path, monkeypatch):
    """Its base is found by name, since the directory of the export does not exist there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_model(tmp_path / "m.gguf")
    monkeypatch.setattr(gguf, "gguf_path", lambda model: tmp_path / "m.gguf")
    digest = hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest()
    monkeypatch.setattr(convert, "SMOLLM2_SHA256", digest)
    policy = trained(tmp_path, lora=4, model="smollm2")
    export(tmp_path, lora=4, model="smollm2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    (tmp_path / "cache").rename(tmp_path / "gone")
    opened = open_model(PolicyConfig(model=str(tmp_path / "out"), devices="cpu"))
    assert torch.allclose(logits(opened.model), logits(policy.model), atol=1e-5)


@pytest.mark.parametrize("lora", [0, 4])
def test_other_users_can_read_an_export(tmp_path, lora):
    trained(tmp_path, lora=lora)
    before = os.umask(0o077)
    try:
        export(tmp_path, lora=lora)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").rglob("*")}
    assert len(modes) >= 5
    assert set(modes.values()) == {0o644}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755


def test_state_of_another_model_is_refused(tmp_path, capsys):
    trained(tmp_path)
    assert command(tmp_path, "--set", "policy.lora.r=4") == 69
    assert "belongs to another model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_a_state_there_is_nothing_to_export(tmp_path):
    with pytest.raises(Unavailable, match="run the node first"):
        export(tmp_path)


def test_nonempty_directory_is_refused(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert command(tmp_path) == 69
    assert "not an empty directory" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine").exists()


def test_failed_export_leaves_no_files(tmp_path):
    trained(tmp_path)
    (tmp_path / "out").touch()  # a file since the command looked
    with pytest.raises(Unavailable, match="cannot write"):
        export(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "out"}

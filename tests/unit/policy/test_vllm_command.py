"""`swarmnode vllm-command`: the command that starts a server for a configuration."""

import json
import shlex
from pathlib import Path

import pytest

from swarmnode.config import Config
from swarmnode.errors import ConfigError
from swarmnode.policy.engine.vllm_command import vllm_command
from tests.support.gguf_files import write_model


def made(cards, **policy):
    return vllm_command(Config.model_validate({"policy": policy}), cards)


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 1024}))
    return str(directory)


@pytest.fixture
def cards(tmp_path):
    def with_cards(count):
        for number in range(count):
            (tmp_path / "gpus" / str(number)).mkdir(parents=True, exist_ok=True)
        return tmp_path / "gpus"

    return with_cards


def option(arguments, name):
    return arguments[arguments.index(name) + 1]


def test_vllm_gets_every_flag_that_the_node_needs(model, cards):
    server = {"url": "http://10.0.0.7:8123"}
    command = made(cards(1), model=model, lora={"r": 12}, server=server)
    words = command.arguments
    assert words[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    assert option(words, "--model") == model
    assert option(words, "--dtype") == "bfloat16"
    assert option(words, "--logprobs-mode") == "processed_logprobs"
    assert option(words, "--max-lora-rank") == "16", "the next that vLLM takes"
    assert option(words, "--max-model-len") == "1024", "the model has no more"
    assert (option(words, "--host"), option(words, "--port")) == ("10.0.0.7", "8123")
    assert "--gpu-memory-utilization" not in words, "another machine's card is not shared"
    assert command.environment == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }


def test_a_server_gets_the_converted_directory(tmp_path, cards, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_model(tmp_path / "m.gguf")
    words = made(cards(0), model=str(tmp_path / "m.gguf")).arguments
    assert (Path(option(words, "--model")) / "model.safetensors").is_file()
    assert option(words, "--max-model-len") == "512", "the model has no more"


def test_a_server_beside_the_trainer_leaves_it_room(model, cards):
    assert option(made(cards(1), model=model).arguments, "--gpu-memory-utilization") == "0.4"
    several = made(cards(3), model=model)
    assert several.environment["CUDA_VISIBLE_DEVICES"] == "2"
    assert "--gpu-memory-utilization" not in several.arguments
    assert "--set policy.devices=cuda:0,cuda:1" in several.notes[0]


def test_rank_that_vllm_does_not_support_is_refused(model, cards):
    with pytest.raises(ConfigError, match="rank 512"):
        made(cards(0), model=model, lora={"r": 600})


def test_a_path_with_spaces_survives_a_shell(tmp_path, cards):
    directory = tmp_path / "my model"
    directory.mkdir()
    command = made(cards(0), model=str(directory))
    assert str(directory) in shlex.split(command.line())

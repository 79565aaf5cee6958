"""When a trainer joins a crew, and settings with which a crew cannot train."""

import pytest
from structlog.testing import capture_logs
from transformers import GPT2Config

from swarmnode.config import Config
from swarmnode.errors import DeviceError, Refused
from swarmnode.policy.build_deep import write_deep_model
from swarmnode.process import Progress
from swarmnode.stages.trainer.crew_trainer import CrewTrainer, make_trainer
from swarmnode.trainer.loop import Trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_deep_model(tmp_path_factory.mktemp("model"), layers=4)


def config(directory, model, **sections):
    sections = {"training": {}, "stages": {}, **sections}
    return Config.model_validate(
        {
            "node": {"data_dir": directory},
            "task": {"held_out_per_task": 2},
            "weights": {"rule": "off"},
            **sections,
            "policy": {"model": str(model), "devices": "cpu", **sections.get("policy", {})},
            "training": {"eval_every": 1000, **sections["training"]},
            "stages": {"mode": "always", **sections["stages"]},
        }
    )


def test_a_copy_is_planned_beside_the_stage(tmp_path, model):
    with pytest.raises(DeviceError, match="policy_copy"):
        CrewTrainer(
            config(tmp_path, model, stages={"policy_copy": "memory", "capacity": 2**20}), Progress()
        ).run()


def test_only_too_large_models_need_a_crew(tmp_path, model):
    fits = config(tmp_path, model, stages={"mode": "auto"})
    assert isinstance(make_trainer(fits, Progress()), Trainer)
    few = {"groups_per_step": 2}
    small = config(tmp_path, model, training=few, stages={"mode": "auto", "capacity": 3 * 2**20})
    with capture_logs() as lines:
        assert isinstance(make_trainer(small, Progress()), CrewTrainer)
        assert not lines
        several = {"policy": small.policy.model_copy(update={"devices": "2"})}
        make_trainer(small.model_copy(update=several), Progress())
    assert [line["detail"] for line in lines] == ["a member of a crew uses cpu alone"]
    assert isinstance(
        make_trainer(
            config(tmp_path, model, stages={"mode": "off", "capacity": 3 * 2**20}), Progress()
        ),
        Trainer,
    )
    assert isinstance(make_trainer(config(tmp_path, model), Progress()), CrewTrainer)


def test_impossible_settings_of_a_crew_fail_at_start(tmp_path, model):
    long = {"max_completion_length": 20_000}
    with pytest.raises(Refused, match="max_completion_length"):
        CrewTrainer(
            config(tmp_path, model, training=long, sharing={"enabled": False}), Progress()
        ).run()
    with pytest.raises(DeviceError, match="one layer alone"):
        make_trainer(
            config(tmp_path, model, stages={"mode": "auto", "capacity": 2**20}), Progress()
        )
    other = tmp_path / "gpt2"
    GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64).save_pretrained(other)
    with pytest.raises(DeviceError, match="gpt2"):
        make_trainer(
            config(tmp_path, other, stages={"mode": "auto", "capacity": 2**16}), Progress()
        )

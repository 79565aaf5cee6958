"""What a crew can be of a model, known before any stage of it is built."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from swarmnode.config import Config, PolicyConfig, TrainingConfig
from swarmnode.errors import Refused
from swarmnode.pipeline.spec import StageSpec
from swarmnode.policy.load import local_directory
from swarmnode.trainer.crew.model import check_trainable, is_untrained
from swarmnode.trainer.crew.recovery import recovery_settings
from tests.support.crew_models import opened


def config_of(tmp_path, **stages) -> Config:
    return Config.model_validate(
        {"node": {"data_dir": str(tmp_path / "data")}, "policy": {"device": "cpu"}, "stages": {"mode": "always", **stages}}
    )


def test_a_model_is_untrained_until_something_was_learnt(tmp_path):
    config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "fresh")
    assert is_untrained(tmp_path / "fresh")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "trained")
    assert not is_untrained(tmp_path / "trained")


@pytest.mark.parametrize(("mode", "match"), [("checkfree", "its own stage is closer"), ("checkfree+", "2 nats")])
def test_a_published_base_is_refused_the_papers_recoveries_and_told_why(tmp_path, mode, match):
    with pytest.raises(Refused, match=match), opened(config_of(tmp_path, paper_mode=mode, stages=4)):
        pass


def test_a_run_from_scratch_may_train_as_the_paper_does(tmp_path):
    config = config_of(tmp_path, paper_mode="checkfree+", stages=4)
    with local_directory(config.policy, fits=False) as directory:
        _copy_untrained(directory, tmp_path / "scratch")
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"model": str(tmp_path / "scratch")})})
    with opened(config) as model:
        assert not model.pretrained
        assert model.settings().swapped
        cost, training = model.offering.cost, config.training
        assert cost.batch_bytes > 2 * training.per_device_train_tokens * model.config.hidden_size
        assert cost.crossings > 0
    stages = lambda **changed: config.model_copy(update={"stages": config.stages.model_copy(update=changed)})
    with pytest.raises(Refused, match="it needs four"), opened(stages(stages=3)):
        pass
    with opened(stages(paper_mode="checkfree", stages=3)) as model:
        settings = recovery_settings(stages(paper_mode="checkfree").stages, 0)
        assert not model.settings().swapped
        assert [settings.keeps_copies(StageSpec(i, 3, i, i + 1, True)) for i in range(3)] == [True, False, True]


def test_what_was_a_switch_keeps_its_meaning(tmp_path):
    assert config_of(tmp_path, paper_mode=True).stages.paper_mode == "checkfree+"
    assert config_of(tmp_path, paper_mode=False).stages.paper_mode == "off"


def _copy_untrained(directory, target):
    from transformers import AutoConfig, AutoTokenizer

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(target)
    AutoTokenizer.from_pretrained(directory).save_pretrained(target)


def test_what_only_a_whole_policy_can_do_is_refused_with_the_remedy():
    check_trainable(PolicyConfig(), TrainingConfig(loss_type="gspo", options=["sequence_mis", "effective_rate"]))
    with pytest.raises(Refused, match=r"set training\.\w+ to .*stages.mode to off"):
        check_trainable(PolicyConfig(), TrainingConfig(beta=0.1))

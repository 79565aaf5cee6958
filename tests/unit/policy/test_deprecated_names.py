"""New names of transformers are used if they exist, so that no deprecation warning appears."""

import warnings

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from swarmnode.config import LoraSettings, PolicyConfig
from swarmnode.policy.load import load_policy, lora_settings
from swarmnode.policy.model import cache_keyword
from swarmnode.stages.model import add_adapter


def test_an_adapter_is_made_and_run_without_a_warning(model_dir):
    cfg = PolicyConfig(model=str(model_dir("qwen2")), devices="cpu", lora=LoraSettings(r=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        policy = load_policy(cfg)
        ids = torch.tensor([[5, 9, 17]])
        cache = DynamicCache(config=policy.base.config)
        policy.logits(ids, None, torch.arange(3)[None], cache=cache)
        base = AutoModelForCausalLM.from_pretrained(cfg.model)
        add_adapter(base, lora_settings(cfg))
    assert cache.get_seq_length() == 3
    assert not policy.base.is_gradient_checkpointing


def test_cache_argument_has_the_model_s_name():
    def later(input_ids, cache=None, use_cache=None): ...
    def earlier(input_ids, past_key_values=None, use_cache=None): ...

    assert (cache_keyword(later), cache_keyword(earlier)) == ("cache", "past_key_values")

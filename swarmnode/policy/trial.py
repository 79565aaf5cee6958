"""A trial of the policy before anything starts: its tokenizer makes tokens of a question, and the
model answers with numbers.

What a model directory lacks shows here, in a line, and not minutes later in a trainer's log.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from jinja2 import TemplateError

from swarmnode.config import PolicyConfig
from swarmnode.errors import DeviceError, Unavailable
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import Policy, load_policy

QUESTION = "What is 3 + 4? Answer: "
TOKENS = 8


def try_policy(cfg: PolicyConfig) -> str:
    """What came of it, in a few words. Loads the weights.

    Raises Unavailable where tokenizer and model do not work together, and as `load_policy` does.
    """
    started = time.monotonic()
    policy = load_policy(cfg)
    loaded = time.monotonic()
    tokens = try_loaded(cfg, policy)
    return (
        f"loaded in {loaded - started:.1f} s, {tokens} tokens sampled in"
        f" {time.monotonic() - loaded:.1f} s"
    )


def try_loaded(cfg: PolicyConfig, policy: Policy) -> int:
    """The number of tokens that were sampled. Raises Unavailable, and DeviceError for want of
    memory."""
    name = f"policy.model {cfg.model!r}"
    try:
        asked = policy.encode_prompt(QUESTION)
        if not asked or max(asked) >= policy.vocab_size:
            made = "tokens that the model does not have" if asked else "no tokens"
            raise Unavailable(f"{name}: its tokenizer makes {made} of a question")
        (group,) = generate(
            policy, [QUESTION], Sampling(1, TOKENS, 1.0, 1.0), policy.random_generator(0)
        )
        (completion,) = group.completions
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"{name}: memory ran out in a trial generation") from error
    except (RuntimeError, ValueError, TypeError, LookupError, OSError, TemplateError) as error:
        # of a chat template, or of the model
        why = str(error).strip().split("\n")[0] or type(error).__name__
        raise Unavailable(f"{name}: a trial generation failed: {why[:300]}") from error
    if not all(map(math.isfinite, completion.logprobs)):
        raise Unavailable(
            f"{name}: its log-probabilities are not numbers; a damaged download, or weights that"
            f" {cfg.dtype} cannot hold"
        )
    return len(completion.ids)


def is_here(cfg: PolicyConfig) -> bool:
    """Whether the model is on this machine already, so that a trial downloads nothing."""
    if cfg.model == "embedded" or Path(cfg.model).expanduser().is_dir():
        return True
    from huggingface_hub import try_to_load_from_cache

    names = ("model.safetensors", "model.safetensors.index.json")
    return any(
        isinstance(try_to_load_from_cache(cfg.model, name, revision=cfg.revision), str)
        for name in names
    )

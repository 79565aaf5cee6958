"""Small Qwen2 policies with tokenizers of their own, which benchmarks pre-train and cache.

A policy is an ordinary model directory, which `policy.model` takes. It is made in minutes on one
core and never committed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

PAD, EOS, TURN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
PROFILE = "PROFILE.json"
WARM_UP = 50
"""Steps in which the learning rate of a pre-training rises."""


@dataclass(frozen=True)
class Shape:
    """Size of a policy. Heads have 32 dimensions."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    seed: int = 0


def train_tokenizer(
    pattern: str, texts: Sequence[str], merges: int, template: str
) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with `merges` byte pairs from `texts`.

    Args:
        pattern: Regular expression of the pieces that pairs do not cross.
        template: Chat template.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=len(alphabet) + 3 + merges,
            initial_alphabet=alphabet,
            special_tokens=[PAD, TURN, EOS],
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = template
    return tokenizer


def build_model(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Return a model with random weights."""
    torch.manual_seed(shape.seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.hidden // 32,
            num_key_value_heads=shape.hidden // 32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def take_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor, rate: float) -> None:
    """Take a supervised step with the learning rate `rate`, gradients clipped to norm 1."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def next_token_loss(
    model: Any, rows: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], pad: int
) -> torch.Tensor:
    """Return the mean negative log-likelihood of the labels in nats; -100 is no label."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])  # (batch, width)
    targets = torch.tensor([[*row, *[-100] * (width - len(row))] for row in labels])
    # right padding and causal attention: no mask needed
    logits = model(input_ids=ids).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100
    )


def cached(
    settings: dict[str, Any],
    make: Callable[[], tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast, dict[str, Any]]],
    cache: Path | None = None,
) -> Path:
    """Return the directory of the policy that `make` makes, which is done once per `settings`.

    Args:
        make: Returns the model, its tokenizer and figures of the pre-training.
        cache: Folder of the directories; by default in the system's temporary directory.
    """
    folder = cache or Path(tempfile.gettempdir()) / "swarmnode-start-policies"
    text = json.dumps([settings, torch.__version__], sort_keys=True)
    directory = folder / hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    if (directory / PROFILE).is_file():
        return directory
    disable_progress_bar()
    started = time.process_time()
    model, tokenizer, figures = make()
    seconds = round(time.process_time() - started, 1)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder))
    model.generation_config.bos_token_id = None
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    about = {"parameters": model.num_parameters(), **figures, "cpu_seconds": seconds}
    (scratch / PROFILE).write_text(json.dumps({**settings, **about}, indent=1) + "\n")
    shutil.rmtree(directory, ignore_errors=True)
    scratch.rename(directory)
    return directory


def profile_of(directory: Path) -> dict[str, Any]:
    """Return the settings and figures of a policy."""
    found: dict[str, Any] = json.loads((directory / PROFILE).read_text())
    return found

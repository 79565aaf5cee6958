"""The start policies and the dataset of `benchmarks.second`: running sums, written out.

    question   11 + 20 + 16 + 3 =
    answer     11+20=31, 31+16=47, 47+3=50. The sum is 50.

Pre-training stops when a fifth of the policy's answers is right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from benchmarks.lib.start_policy import (
    WARM_UP,
    Shape,
    build_model,
    cached,
    next_token_loss,
    take_step,
    train_tokenizer,
)
from swarmnode.tasks.answers import extract
from swarmnode.tasks.verifiers import VERIFIERS

NUMBERS = {"fewest": 3, "most": 5, "largest": 20}
"""Numbers of a question, and the largest of them."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2's."""
PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
LOOK, LONGEST = 150, 64
"""Questions of a measurement during pre-training, and the most tokens of an answer."""


@dataclass(frozen=True)
class Recipe(Shape):
    """A policy and its pre-training."""

    tokenizer: Literal["pairs", "bytes"] = "pairs"
    """pairs: byte pairs with single digits; bytes: each byte is a token."""
    peak: float = 1.5e-3
    """Learning rate after the warm-up."""
    batch: int = 32
    most_steps: int = 1500
    first_look: int = 160
    """Steps before the first measurement of right answers."""
    look_every: int = 20
    enough: float = 0.2
    """Share of right answers at which pre-training stops."""


SMALL = Recipe("1.6 M", hidden=160, layers=5, intermediate=448)
BYTES = Recipe(
    "1.6 M, bytes",
    hidden=160,
    layers=5,
    intermediate=448,
    tokenizer="bytes",
    first_look=20,
    look_every=10,
)
ORIGINS = {BYTES.name: SMALL}
"""Policy → policy of the same size whose weights it starts from, which saves minutes."""


@dataclass(frozen=True)
class Question:
    prompt: str
    answer: str
    steps: str
    """The answer written out."""


def question(rng: random.Random) -> Question:
    count = rng.randint(NUMBERS["fewest"], NUMBERS["most"])
    numbers = [rng.randint(1, NUMBERS["largest"]) for _ in range(count)]
    sums = list(accumulate(numbers))
    steps = [
        f"{before}+{number}={after}"
        for before, number, after in zip(sums, numbers[1:], sums[1:], strict=False)
    ]
    return Question(
        f"{' + '.join(map(str, numbers))} =",
        str(sums[-1]),
        f"{', '.join(steps)}. The sum is {sums[-1]}.",
    )


def questions(stream: str) -> Iterator[Question]:
    """Yield questions without end. Each stream has its own."""
    rng = random.Random(stream)
    while True:
        yield question(rng)


def write_dataset(path: Path, rows: int) -> None:
    """Write JSON lines of prompt and answer, as an operator would."""
    source = questions("dataset")
    asked = [next(source) for _ in range(rows)]
    path.write_text(
        "".join(json.dumps({"prompt": q.prompt, "answer": q.answer}) + "\n" for q in asked)
    )


def build_tokenizer(kind: Literal["pairs", "bytes"]) -> PreTrainedTokenizerFast:
    source = questions("tokenizer")
    shown = [next(source) for _ in range(500)]
    texts = [f"user\n{q.prompt} assistant\n{q.steps}" for q in shown]
    return train_tokenizer(PIECES, texts, 48 if kind == "pairs" else 0, CHAT_TEMPLATE)


@torch.no_grad()
def copy_weights(directory: Path, model: Qwen2ForCausalLM) -> None:
    """Copy the weights of a policy of the same size, and the embeddings of common tokens. All
    tokenizers begin with the special tokens and the bytes."""
    origin = Qwen2ForCausalLM.from_pretrained(directory).state_dict()
    for name, tensor in model.state_dict().items():
        tensor.copy_(origin[name][: len(tensor)])


def pretrain(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> dict[str, float]:
    """Take supervised steps on answers until `recipe.enough` of the sampled answers are right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.peak, weight_decay=0.0)
    source = questions(f"demonstrations/{recipe.seed}")
    right, step = 0.0, 0
    for step in range(1, recipe.most_steps + 1):
        shown = [next(source) for _ in range(recipe.batch)]
        loss = demonstration_loss(model, tokenizer, shown)
        take_step(optimizer, loss, recipe.peak * min(1.0, step / WARM_UP))
        if step >= recipe.first_look and step % recipe.look_every == 0:
            right = share_right(model, tokenizer)
            if right >= recipe.enough:
                break
    return {"steps": step, "right": right}


def demonstration_loss(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, shown: Sequence[Question]
) -> torch.Tensor:
    """Return the mean negative log-likelihood of the answers' tokens, in nats."""
    rows, labels = [], []
    for one in shown:
        prompt = encode_prompt(tokenizer, one.prompt)
        answer = tokenizer(one.steps, add_special_tokens=False)["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        rows.append(prompt + answer)
        labels.append([-100] * len(prompt) + answer)
    with torch.autocast("cpu", torch.bfloat16):
        return next_token_loss(model, rows, labels, tokenizer.pad_token_id)


def share_right(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Return the share of LOOK questions that a sampled answer gets right, at temperature 1."""
    source = questions("looks")
    asked = [next(source) for _ in range(LOOK)]
    prompts = [encode_prompt(tokenizer, q.prompt) for q in asked]
    width = max(map(len, prompts))
    padded = [[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        answers = model.generate(  # type: ignore[misc]
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            do_sample=True,
            top_k=0,
            max_new_tokens=LONGEST,
        )[:, width:]
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in answers]
    verify = VERIFIERS["numeric"]
    found = [
        verify.reward(extract(text, "auto", verify.fallback), q.answer)
        for text, q in zip(texts, asked, strict=True)
    ]
    return sum(found) / LOOK


def encode_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def make(recipe: Recipe, cache: Path | None = None) -> Path:
    """Return the directory of the policy, which is made on first use (`start_policy.cached`)."""

    def train() -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast, dict[str, Any]]:
        tokenizer = build_tokenizer(recipe.tokenizer)
        model = build_model(recipe, tokenizer)
        if recipe.name in ORIGINS:
            copy_weights(make(ORIGINS[recipe.name], cache), model)
        return model, tokenizer, pretrain(model, tokenizer, recipe)

    return cached(asdict(recipe) | {"numbers": NUMBERS}, train, cache)

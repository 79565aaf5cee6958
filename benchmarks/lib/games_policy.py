"""The start policies of `benchmarks.episodes`: Qwen2 models of a million parameters, pre-trained on
whole conversations of one game of `benchmarks.lib.toy_games`.

A policy knows the form of a conversation and the moves, and wins less than one game of ten. It is
made in about 60 CPU seconds.

    lake    random legal moves
    guess   a random number; one game in twelve first looks at the number and then guesses it
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from benchmarks.lib import toy_games
from benchmarks.lib.start_policy import (
    WARM_UP,
    Shape,
    build_model,
    cached,
    next_token_loss,
    take_step,
    train_tokenizer,
)
from swarmnode import tool_prompt
from swarmnode.tasks.tools import generator

RECIPE = 3
"""Version of the pre-training; results name it."""
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}<|im_start|>tool\n{{ tool.function.name }}<|im_end|>\n"
    "{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments":'
    " {{ call.function.arguments | tojson }}}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's, with the names of the tools only: a small model cannot read descriptions."""


@dataclass(frozen=True)
class Game:
    """A game and its pre-training."""

    begin: Callable[[int], tuple[str, toy_games.Step]]
    turns: int
    act: Callable[[random.Random, list[str], float], str]
    """Returns an action, given random numbers, the texts of the game so far and the progress of the
    pre-training from 0 to 1."""
    longest: int
    """Maximum number of tokens of an action."""
    steps: int
    """Pre-training steps."""
    peak: float
    """Learning rate of the pre-training after the warm-up."""
    scale: float
    """Factor of the initial weights. With 4 a model of this width learns to copy within 110 steps;
    with 1 it does not within 120."""
    batch: int
    """Episodes of a step."""


@dataclass(frozen=True)
class Conversation:
    """An episode in the form of the chat template."""

    turns: list[dict[str, str]]
    tools: list[dict[str, Any]]
    reward: float


def _cross(rng: random.Random, shown: list[str], progress: float) -> str:
    """Return a random move that stays on the lake."""
    lines = shown[-1].splitlines()[-4:]
    row = next(i for i, line in enumerate(lines) if "Y" in line)
    column = lines[row].index("Y")
    moves = toy_games.MOVES.items()
    fits = lambda down, right: 0 <= row + down < 4 and 0 <= column + right < 4
    return rng.choice([name for name, move in moves if fits(*move)])


LOOKS = 1 / 12
"""Share of guessing games at the end of the pre-training in which the player looks."""
ALL_LOOK = 0.6
"""Part of the pre-training in which the player always looks, to learn to copy the number."""


def _guess(rng: random.Random, shown: list[str], progress: float) -> str:
    """Return a tool call, or no call after the guess. A player that has looked guesses the number
    that it saw."""
    if shown[-1] in ("right", "wrong"):
        return "done"
    if len(shown) == 1 and (progress < ALL_LOOK or rng.random() < LOOKS):
        return _call("look")
    return _call("guess", number=rng.randint(10, 99) if len(shown) == 1 else int(shown[-1]))


def _call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


GAMES = {
    "lake": Game(
        toy_games.frozen_lake, 12, _cross, longest=6, steps=160, peak=2e-3, scale=1.0, batch=16
    ),
    "guess": Game(
        functools.partial(generator("toy_games:Guess", toy_games.Guess), turns=3),
        3,
        _guess,
        longest=12,
        steps=200,
        peak=1e-3,
        scale=4.0,
        batch=16,
    ),
}
SHAPE = Shape("1 M", hidden=128, layers=5, intermediate=384)
PIECES = r"\p{N}| ?[^\s\p{N}]+|\s+"


def play(game: Game, rng: random.Random, progress: float = 1.0) -> Conversation:
    """Play one episode as in the pre-training at `progress`."""
    first, step = game.begin(rng.randrange(2**31))
    text = tool_prompt.split(first)
    turns, shown = [{"role": "user", "content": text.question}], [text.question]
    reward, done = 0.0, False
    for _ in range(game.turns):
        action = game.act(rng, shown, progress)
        observation, reward, done = step(action)
        shown.append(observation)
        turns += [
            {"role": "assistant", "content": action},
            {"role": "tool" if text.tools else "user", "content": observation},
        ]
        if done:
            break
    return Conversation(turns, list(text.tools), reward)


def build_tokenizer(game: Game) -> PreTrainedTokenizerFast:
    """Return a tokenizer trained on conversations: a line of the lake, or the beginning of a call,
    is one token or two."""
    rng = random.Random("tokenizer")
    shown = [turn["content"] for _ in range(300) for turn in play(game, rng).turns]
    return train_tokenizer(PIECES, [*shown, *["user\nassistant\ntool\n"] * 500], 128, CHAT_TEMPLATE)


def pretrain(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, game: Game
) -> dict[str, float]:
    """Take supervised steps on all tokens of conversations."""
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(game.scale if weights.dim() > 1 else 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=game.peak, weight_decay=0.0)
    rng, loss = random.Random(f"demonstrations/{SHAPE.seed}"), torch.zeros(())
    for step in range(1, game.steps + 1):
        left = 1.0 - step / (game.steps + 1)
        rows = []
        for _ in range(game.batch):
            shown = play(game, rng, 1.0 - left)
            text = tokenizer.apply_chat_template(
                shown.turns, tools=shown.tools or None, tokenize=False
            )
            rows.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        loss = next_token_loss(model, rows, rows, tokenizer.pad_token_id)
        take_step(optimizer, loss, game.peak * min(1.0, step / (WARM_UP / 2), 4 * left))
    return {"loss": round(loss.item(), 4)}


def make(name: str, cache: Path | None = None) -> Path:
    """Return the directory of the policy for a game, made on first use (`start_policy.cached`)."""

    def train() -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast, dict[str, Any]]:
        tokenizer = build_tokenizer(GAMES[name])
        model = build_model(SHAPE, tokenizer)
        return model, tokenizer, pretrain(model, tokenizer, GAMES[name])

    return cached(asdict(SHAPE) | {"game": name, "recipe": RECIPE}, train, cache)

"""The start policies of `benchmarks.episodes`: `python -m benchmarks.episodes_policy`.

Each is a Qwen2 of about a million parameters with a tokenizer of its own, pre-trained from random
weights on one game of `benchmarks.toy_games`. It knows how a conversation looks and which moves
there are, and wins less than one game of ten. The result is an ordinary model directory. It is made
in about 60 CPU seconds and cached; it is not committed.

    lake    random legal play
    guess   a random number; one game in twelve looks first and guesses what it saw
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks import toy_games
from benchmarks.start_policy import (
    EOS,
    PAD,
    PROFILE,
    TURN,
    WARM_UP,
    Shape,
    build_model,
)
from swarmnode import tool_prompt
from swarmnode.tasks.tools import generator

RECIPE = 3
"""Change it when the code below makes another policy of equal settings."""


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
"""Qwen's, with the names of tools alone: a small model cannot read what they are for."""


@dataclass(frozen=True)
class Game:
    """A game, and how it is played in pre-training."""

    begin: Callable[[int], tuple[str, toy_games.Step]]
    turns: int
    act: Callable[[random.Random, list[str], float], str]
    """Random numbers, the texts of the game so far and the part of the pre-training that is over
    → an action."""
    longest: int
    """Tokens of an action at most."""
    steps: int
    """Number of pre-training steps."""
    peak: float
    """Its learning rate after the warm-up."""
    scale: float
    """Factor of the initial weights: with 4, a model of this width learns to copy within 110 steps,
    and with 1 not within 120."""
    batch: int
    """Episodes of a step."""


@dataclass(frozen=True)
class Conversation:
    """An episode as the chat template takes it."""

    turns: list[dict[str, str]]
    tools: list[dict[str, Any]]
    reward: float


def _cross(rng: random.Random, shown: list[str], progress: float) -> str:
    """Return any move that does not run into the edge."""
    lines = shown[-1].splitlines()[-4:]
    row = next(i for i, line in enumerate(lines) if "Y" in line)
    column = lines[row].index("Y")
    moves = toy_games.MOVES.items()
    fits = lambda down, right: 0 <= row + down < 4 and 0 <= column + right < 4
    return rng.choice([name for name, move in moves if fits(*move)])


LOOKS = 1 / 12
"""Share of guessing games at the end of pre-training in which the player looks at the number."""
ALL_LOOK = 0.6
"""Part of the pre-training in which it always does: it learns to write a number that it saw."""


def _guess(rng: random.Random, shown: list[str], progress: float) -> str:
    """Return a call, and none after the guess. Who has looked guesses the number that it saw."""
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
SHAPE = Shape(
    "1 M",
    hidden=128,
    layers=5,
    intermediate=384,
    tokenizer="pairs",
)


def play(game: Game, rng: random.Random, progress: float = 1.0) -> Conversation:
    """Play one episode as in pre-training, of which a part is over."""
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
    """A byte-level tokenizer, trained on conversations: a line of the lake and the beginning of a
    call are one token or two."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}| ?[^\s\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rng = random.Random("tokenizer")
    shown = [turn["content"] for _ in range(300) for turn in play(game, rng).turns]
    core.train_from_iterator(
        [*shown, *["user\nassistant\ntool\n"] * 500],
        trainers.BpeTrainer(
            vocab_size=len(alphabet) + 3 + 128,
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
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def pretrain(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, game: Game
) -> dict[str, float]:
    """Take supervised steps on whole conversations, actions and what they lead to."""
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(game.scale if weights.dim() > 1 else 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=game.peak, weight_decay=0.0)
    rng, loss = random.Random(f"demonstrations/{SHAPE.seed}"), torch.zeros(())
    for step in range(1, game.steps + 1):
        left = 1.0 - step / (game.steps + 1)
        for group in optimizer.param_groups:
            group["lr"] = game.peak * min(1.0, step / (WARM_UP / 2), 4 * left)
        shown = [play(game, rng, 1.0 - left) for _ in range(game.batch)]
        loss = conversation_loss(model, tokenizer, shown)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {"steps": game.steps, "loss": round(loss.item(), 4)}


def conversation_loss(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    shown: Sequence[Conversation],
) -> torch.Tensor:
    """Mean negative log-likelihood of all tokens, nats."""
    texts = [
        tokenizer.apply_chat_template(each.turns, tools=each.tools or None, tokenize=False)
        for each in shown
    ]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([r + [tokenizer.pad_token_id] * (width - len(r)) for r in rows])
    targets = torch.tensor([r + [-100] * (width - len(r)) for r in rows])
    logits = model(input_ids=ids).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100
    )


def make(name: str, cache: Path | None = None) -> Path:
    """Return the directory of the policy for a game, which is made on first use.

    Args:
        name: of the game.
        cache: where directories are kept; a folder of the system's temporary directory by default.
    """
    folder = cache or Path(tempfile.gettempdir()) / "swarmnode-start-policies"
    game = GAMES[name]
    settings = json.dumps([asdict(SHAPE), name, RECIPE, torch.__version__])
    directory = folder / hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()
    if (directory / PROFILE).is_file():
        return directory
    disable_progress_bar()
    started = time.process_time()
    tokenizer = build_tokenizer(game)
    model = build_model(SHAPE, tokenizer)
    profile = pretrain(model, tokenizer, game)
    seconds = round(time.process_time() - started, 1)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder))
    model.generation_config.bos_token_id = None
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    about = {"batch": game.batch, "parameters": model.num_parameters(), "cpu": seconds}
    profile = {**asdict(SHAPE), **about, **profile}
    (scratch / PROFILE).write_text(json.dumps(profile, indent=1) + "\n")
    shutil.rmtree(directory, ignore_errors=True)
    scratch.rename(directory)
    return directory


def main() -> None:
    torch.set_num_threads(1)
    for name in GAMES:
        directory = make(name)
        print(name, directory, (directory / PROFILE).read_text(), flush=True)


if __name__ == "__main__":
    main()

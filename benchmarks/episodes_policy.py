"""The start policy of `benchmarks.episodes`: `python -m benchmarks.episodes_policy`.

A Qwen2 of about a million parameters with a tokenizer of its own, pre-trained from random weights
on random legal play of the two games of `benchmarks.toy_games`: it knows how a conversation with
them looks and which moves there are, and wins about as rarely as chance does. The result is an
ordinary model directory. It is made in about 100 CPU seconds and cached; it is not committed.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks import toy_games
from benchmarks.start_policy import (
    CHAT_TEMPLATE,
    EOS,
    PAD,
    PROFILE,
    TURN,
    WARM_UP,
    Shape,
    build_model,
)

RECIPE = 1
"""Change it when the code below makes another policy of equal settings."""


@dataclass(frozen=True)
class Game:
    """A game, and who plays it at random: the actions that change something, by the texts so
    far."""

    begin: Callable[[int], tuple[str, toy_games.Step]]
    turns: int
    legal: Callable[[str], list[str]]


def _lake_moves(shown: str) -> list[str]:
    """Moves that do not run into the edge."""
    lines = shown.splitlines()[-4:]
    row = next(i for i, line in enumerate(lines) if "Y" in line)
    column = lines[row].index("Y")
    return [
        name
        for name, (down, right) in toy_games.MOVES.items()
        if 0 <= row + down < 4 and 0 <= column + right < 4
    ]


GAMES = {
    "frozen_lake": Game(toy_games.frozen_lake, 12, _lake_moves),
    "guess": Game(toy_games.guess, 5, lambda shown: [str(n) for n in range(1, 31)]),
}
SHAPE = Shape(
    "1 M",
    hidden=128,
    layers=5,
    intermediate=384,
    tokenizer="pairs",
    peak=2e-3,
    batch=16,
    most_steps=160,
)


def play(game: Game, rng: random.Random) -> tuple[list[dict[str, str]], float]:
    """One episode of random legal play: the conversation, and its reward."""
    shown, step = game.begin(rng.randrange(2**31))
    turns, reward, done = [{"role": "user", "content": shown}], 0.0, False
    for _ in range(game.turns):
        action = rng.choice(game.legal(shown))
        shown, reward, done = step(action)
        turns += [
            {"role": "assistant", "content": action},
            {"role": "user", "content": shown},
        ]
        if done:
            break
    return turns, reward


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, trained on conversations: a line of the lake is one token or two."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rng = random.Random("tokenizer")
    shown = [
        turn["content"] for _ in range(300) for g in GAMES.values() for turn in play(g, rng)[0]
    ]
    core.train_from_iterator(
        [*shown, *["user\nassistant\n"] * 500],
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


def pretrain(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Take supervised steps on whole conversations, actions and what they lead to: of the two games
    in turn, whose lengths are unlike."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=SHAPE.peak, weight_decay=0.0)
    rng, loss = random.Random(f"demonstrations/{SHAPE.seed}"), torch.zeros(())
    games = list(GAMES.values())
    for step in range(1, SHAPE.most_steps + 1):
        left = 1.0 - step / (SHAPE.most_steps + 1)
        for group in optimizer.param_groups:
            group["lr"] = SHAPE.peak * min(1.0, step / (WARM_UP / 2), 4 * left)
        game = games[step % len(games)]
        shown = [play(game, rng)[0] for _ in range(SHAPE.batch)]
        loss = conversation_loss(model, tokenizer, shown)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {"steps": SHAPE.most_steps, "loss": round(loss.item(), 4)}


def conversation_loss(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    shown: Sequence[list[dict[str, str]]],
) -> torch.Tensor:
    """Mean negative log-likelihood of all tokens, nats."""
    texts = [tokenizer.apply_chat_template(turns, tokenize=False) for turns in shown]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([r + [tokenizer.pad_token_id] * (width - len(r)) for r in rows])
    targets = torch.tensor([r + [-100] * (width - len(r)) for r in rows])
    logits = model(input_ids=ids).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100
    )


def make(cache: Path | None = None) -> Path:
    """Return the directory of the policy, which is made on first use.

    Args:
        cache: where directories are kept; a folder of the system's temporary directory by default.
    """
    folder = cache or Path(tempfile.gettempdir()) / "swarmnode-start-policies"
    settings = json.dumps([asdict(SHAPE), RECIPE, torch.__version__])
    directory = folder / hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()
    if (directory / PROFILE).is_file():
        return directory
    disable_progress_bar()
    started = time.process_time()
    tokenizer = build_tokenizer()
    model = build_model(SHAPE, tokenizer)
    profile = pretrain(model, tokenizer)
    seconds = round(time.process_time() - started, 1)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder))
    model.generation_config.bos_token_id = None
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    profile = {**asdict(SHAPE), "parameters": model.num_parameters(), **profile, "cpu": seconds}
    (scratch / PROFILE).write_text(json.dumps(profile, indent=1) + "\n")
    shutil.rmtree(directory, ignore_errors=True)
    scratch.rename(directory)
    return directory


def main() -> None:
    torch.set_num_threads(1)
    directory = make()
    print(directory, (directory / PROFILE).read_text(), flush=True)


if __name__ == "__main__":
    main()

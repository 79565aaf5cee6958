"""The start policies of `benchmarks.second`: `python -m benchmarks.start_policy [--shapes …]`.

Each is a Qwen2 of a few million parameters with a tokenizer of its own. It starts from
random weights and is pre-trained on running sums that are written out step by step. Pre-training
stops as soon as a fifth of its answers is right. The result is an ordinary model directory, which
`policy.model` takes. It is made in minutes on one core and cached; it is not committed.

    question   11 + 20 + 16 + 3 =
    answer     11+20=31, 31+16=47, 47+3=50. The sum is 50.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from swarmnode.tasks.answers import extract
from swarmnode.tasks.verifiers import VERIFIERS

RECIPE = 1
"""Change it when the code below makes another policy of equal settings."""
NUMBERS = {"fewest": 3, "most": 5, "largest": 20}
"""Numbers of a question, and the largest of them."""
PAD, EOS, TURN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The conversation as Qwen2 writes it."""
PROFILE = "PROFILE.json"
WARM_UP = 50
"""Steps in which the learning rate rises."""
LOOK, LONGEST = 150, 64
"""Questions of a measurement during pre-training, and tokens of an answer at most."""


@dataclass(frozen=True)
class Shape:
    """A policy and its pre-training."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    tokenizer: Literal["pairs", "bytes"]
    """Byte pairs, digits apart; or every byte a token."""
    peak: float = 1.5e-3
    """Learning rate after the warm-up."""
    batch: int = 32
    most_steps: int = 1500
    first_look: int = 160
    """Steps before the first measurement of how much is right."""
    look_every: int = 20
    enough: float = 0.2
    """Share of right answers at which pre-training stops."""
    seed: int = 0
    origin: str = ""
    """Another shape of the same size, whose weights it starts from: in minutes less, a policy with
    another tokenizer."""

    @property
    def key(self) -> str:
        """Hash of everything that decides the policy."""
        settings = {
            **{name: value for name, value in asdict(self).items() if value != ""},
            "recipe": RECIPE,
            "numbers": NUMBERS,
            "torch": torch.__version__,
        }
        text = json.dumps(settings, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


SMALL = Shape("1.6 M", hidden=160, layers=5, intermediate=448, tokenizer="pairs")
BYTES = Shape(
    "1.6 M, bytes",
    hidden=160,
    layers=5,
    intermediate=448,
    tokenizer="bytes",
    first_look=20,
    look_every=10,
    origin="1.6 M",
)
LARGE = Shape("4 M", hidden=256, layers=5, intermediate=704, tokenizer="bytes", peak=1e-3)
SHAPES = {shape.name: shape for shape in (SMALL, BYTES, LARGE)}


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
    """Questions without end; each stream has others."""
    rng = random.Random(stream)
    while True:
        yield question(rng)


def write_dataset(path: Path, rows: int) -> None:
    """Write a dataset as an operator would: JSON lines of prompt and answer, no steps."""
    source = questions("dataset")
    asked = [next(source) for _ in range(rows)]
    path.write_text(
        "".join(json.dumps({"prompt": q.prompt, "answer": q.answer}) + "\n" for q in asked)
    )


def build_tokenizer(kind: Literal["pairs", "bytes"]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, trained on questions where it has pairs."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    source = questions("tokenizer")
    shown = [next(source) for _ in range(500)]
    core.train_from_iterator(
        [f"user\n{q.prompt} assistant\n{q.steps}" for q in shown],
        trainers.BpeTrainer(
            vocab_size=len(alphabet) + 3 + (48 if kind == "pairs" else 0),
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


def build_model(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Random weights."""
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


@torch.no_grad()
def copy_weights(directory: Path, model: Qwen2ForCausalLM) -> None:
    """Copy the weights of a policy of the same size, and the embeddings of common tokens.

    Both tokenizers begin with the special tokens and the bytes.
    """
    origin = Qwen2ForCausalLM.from_pretrained(directory).state_dict()
    for name, tensor in model.state_dict().items():
        tensor.copy_(origin[name][: len(tensor)])


def pretrain(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, shape: Shape
) -> dict[str, float]:
    """Take supervised steps on answers until `shape.enough` of those that are sampled are right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.peak, weight_decay=0.0)
    source = questions(f"demonstrations/{shape.seed}")
    right, loss, step = 0.0, torch.zeros(()), 0
    for step in range(1, shape.most_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = shape.peak * min(1.0, step / WARM_UP)
        loss = demonstration_loss(model, tokenizer, [next(source) for _ in range(shape.batch)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= shape.first_look and step % shape.look_every == 0:
            right = share_right(model, tokenizer)
            if right >= shape.enough:
                break
    return {"steps": step, "loss": round(loss.item(), 4), "right": right}


def demonstration_loss(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, shown: Sequence[Question]
) -> torch.Tensor:
    """Mean negative log-likelihood of the answers' tokens, nats."""
    rows, labels = [], []
    for one in shown:
        head = encode_prompt(tokenizer, one.prompt)
        tail = [
            *tokenizer(one.steps, add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
        rows.append(head + tail)
        labels.append([-100] * len(head) + tail)
    width = max(map(len, rows))
    # (batch, width)
    input_ids = torch.tensor([r + [tokenizer.pad_token_id] * (width - len(r)) for r in rows])
    targets = torch.tensor([r + [-100] * (width - len(r)) for r in labels])
    # right padding and causal attention: no mask needed
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=input_ids).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100
    )


def share_right(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Share of LOOK questions that an answer sampled at temperature 1 gets right."""
    source = questions("looks")
    asked = [next(source) for _ in range(LOOK)]
    heads = [encode_prompt(tokenizer, q.prompt) for q in asked]
    width = max(map(len, heads))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        answers = model.generate(  # type: ignore[misc]
            input_ids=torch.tensor(
                [[tokenizer.pad_token_id] * (width - len(h)) + h for h in heads]
            ),
            attention_mask=torch.tensor([[0] * (width - len(h)) + [1] * len(h) for h in heads]),
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


def make(shape: Shape, cache: Path | None = None) -> Path:
    """Return the directory of the policy, which is made on first use.

    Args:
        cache: where directories are kept; a folder of the system's temporary directory by default.
    """
    folder = cache or Path(tempfile.gettempdir()) / "swarmnode-start-policies"
    directory = folder / shape.key
    if (directory / PROFILE).is_file():
        return directory
    disable_progress_bar()
    started = time.process_time()
    tokenizer = build_tokenizer(shape.tokenizer)
    model = build_model(shape, tokenizer)
    if shape.origin:
        copy_weights(make(SHAPES[shape.origin], cache), model)
    profile = pretrain(model, tokenizer, shape)
    seconds = round(time.process_time() - started, 1)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder))
    model.generation_config.bos_token_id = None
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    profile = {**asdict(shape), "parameters": model.num_parameters(), **profile, "cpu": seconds}
    (scratch / PROFILE).write_text(json.dumps(profile, indent=1) + "\n")
    shutil.rmtree(directory, ignore_errors=True)
    scratch.rename(directory)
    return directory


def profile_of(directory: Path) -> dict[str, Any]:
    """Return what pre-training recorded."""
    found: dict[str, Any] = json.loads((directory / PROFILE).read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.shapes:
        directory = make(SHAPES[name])
        print(directory, profile_of(directory), flush=True)


if __name__ == "__main__":
    main()

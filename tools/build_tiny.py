"""Build the embedded policy: `python -m tools.build_tiny --seed 0 --out DIR`. Nothing imports this
tool at run time.

The embedded policy lets a laptop show reinforcement learning within a minute. Three choices make
that possible (docs/engines-and-hardware.md):

- One token per fixed phrase of a task's template, so prompts have 6 to 15 tokens.
- A base that was mostly shown right answers in formats that the verifier rejects ("=12", ">12.").
  Reward starts near 2 % and rises by *eliciting* the accepted format.
- A network small enough for 10 ms of generation.

Recipe: mine phrases → tokenizer → random Llama → supervised steps at `--share` of accepted format →
`--final-steps` at `--final-share` → measure the start profile → write.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import re
import string
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

# The same settings as swarmnode/tasks/registry.py, which a test compares; `policy` may not import
# `tasks`.
SETTINGS: dict[str, dict[str, object]] = {
    "rg/chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "rg/basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 1,
        "operators": ["+", "-", "*"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
    "rg/base_conversion": {"min_base": 2, "max_base": 3, "min_value": 0, "max_value": 15},
    "rg/spell_backward": {"min_word_len": 3, "max_word_len": 4},
    "rg/gcd": {"min_value": 1, "max_value": 20},
    "rg/lcm": {"min_value": 1, "max_value": 9},
    "rg/count_bits": {"min_n": 1, "max_n": 63},
    "rg/fraction_simplification": {
        "min_value": 1,
        "max_value": 9,
        "min_factor": 2,
        "max_factor": 4,
        "styles": ["plain"],
    },
    "rg/products": {"min_digits": 1, "max_digits": 1},
}

PAD, EOS, UNK, REPLY = "<pad>", "<eos>", "<unk>", "<reply>"
# A model must see the end of a question ("…backward: sun" or "sunk"?), so the template is a chat
# template.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if"
    " add_generation_prompt %}" + REPLY + "{% endif %}"
)
REJECTED_FORMATS = ("={}", ">{}.")  # every verifier of the nine tasks refuses these
REFUSAL = "?"
# Seed blocks of 2**20 items, far from the hashed blocks that nodes draw from.
SFT_BLOCK, PROFILE_BLOCK = 0, 1


@dataclass(frozen=True)
class Question:
    task: str
    prompt: str
    answer: str
    entry: dict[str, object]


def questions(
    settings: Mapping[str, Mapping[str, object]], count: int, block: int
) -> Iterator[Question]:
    """Return `count` questions of every task from seed block `block`. reasoning-gym seeds item i
    with seed + i."""
    create_dataset = load_reasoning_gym()
    for task, options in settings.items():
        data = create_dataset(task.removeprefix("rg/"), seed=block << 20, size=2**20, **options)
        for index in range(count):
            entry = data[index]
            yield Question(task, entry["question"], entry["answer"], entry)


def load_reasoning_gym() -> Callable[..., Any]:
    """Import the whole of reasoning-gym and return its `create_dataset`."""
    # pycosat exists as source only. One generator needs it, and none of the nine tasks.
    sys.modules.setdefault("pycosat", types.ModuleType("pycosat"))
    import reasoning_gym

    return reasoning_gym.create_dataset


def mine_phrases(prompts: list[str], least_share: float = 0.25, least_length: int = 4) -> set[str]:
    """Return the longest runs of words common to at least `least_share` of one task's prompts.

    Numbers count as fixed only where (nearly) every prompt has them ("How many 1 bits"): an operand
    must stay digits.
    """
    split = lambda text: re.findall(r"\d+|[A-Za-z]+|\s+|[^\w\s]", text)
    seen = Counter(piece for prompt in prompts for piece in set(split(prompt)))
    fixed = {
        p for p, n in seen.items() if n >= len(prompts) * (0.95 if not p.isalpha() else least_share)
    }
    phrases: Counter[str] = Counter()
    for prompt in prompts:
        run = ""
        for piece in [*split(prompt), ""]:
            if piece in fixed:
                run += piece
            elif run:
                phrases[run] += 1
                run = ""
    return {p for p, n in phrases.items() if len(p) >= least_length and n >= len(prompts) * 0.1}


def build_tokenizer(phrases: set[str]) -> PreTrainedTokenizerFast:
    """Return a WordLevel tokenizer of characters (printable ASCII and newline). Phrases are added
    tokens, which match before the split."""
    characters = [c for c in string.printable if c.isprintable()] + ["\n"]
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNK, REPLY, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([PAD, EOS, UNK, REPLY])
    core.add_tokens([AddedToken(p, normalized=False) for p in sorted(phrases)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama with random weights: hidden 64, 2 layers, 4 heads, MLP 192, tied
    embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Course:
    """A supervised training course."""

    steps: int
    share: float
    """Share of the accepted format among the demonstrations."""
    peak: float
    """Initial learning rate of the cosine decay."""
    batch: int = 64
    refusals: float = 0.32


def demonstration(question: Question, share: float, refusals: float, rng: random.Random) -> str:
    """Return the completion shown for `question`: the accepted format with probability `share`,
    else a refusal or a rejected format."""
    roll = rng.random()
    if roll < share:
        return question.answer
    if roll < share + refusals:
        return REFUSAL
    return rng.choice(REJECTED_FORMATS).format(question.answer)


def fine_tune(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pool: list[Question],
    course: Course,
    rng: random.Random,
) -> float:
    """Train on completion tokens only, with AdamW and cosine decay. Return the last loss in nats
    per token."""
    heads = {
        q.prompt: tokenizer(q.prompt + REPLY, add_special_tokens=False)["input_ids"] for q in pool
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=course.peak, weight_decay=0.0)
    last = 0.0
    for step in range(course.steps):
        rate = course.peak * (0.5 + 0.5 * math.cos(math.pi * step / course.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows, labels = [], []
        for question in rng.choices(pool, k=course.batch):
            head = heads[question.prompt]
            tail = tokenizer(
                demonstration(question, course.share, course.refusals, rng),
                add_special_tokens=False,
            )["input_ids"]
            tail = [*tail, tokenizer.eos_token_id]
            rows.append(head + tail)
            labels.append([-100] * len(head) + tail)
        width = max(map(len, rows))
        # (batch, width)
        input_ids = torch.tensor([r + [tokenizer.pad_token_id] * (width - len(r)) for r in rows])
        targets = torch.tensor([r + [-100] * (width - len(r)) for r in labels])
        # Right padding and causal attention need no mask.
        logits = model(input_ids=input_ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        last = loss.item()
    return last


def accepted(question: Question, completion: str) -> bool:
    """Return True if the task's own verifier gives the full score."""
    data = load_reasoning_gym()(
        question.task.removeprefix("rg/"), size=1, seed=0, **SETTINGS[question.task]
    )
    return data.score_answer(completion, question.entry) >= 1.0


def unwrap(completion: str) -> str:
    """Return the value inside a rejected format."""
    return completion.removeprefix("=").removeprefix(">").removesuffix(".")


def measure(
    directory: Path, per_task: int, generations: int = 8, max_tokens: int = 8, seed: int = 0
) -> dict[str, object]:
    """Return the start profile of the policy in `directory` at temperature 1, on questions that the
    base was not shown."""
    from swarmnode.config import PolicyConfig
    from swarmnode.policy.generate import Sampling, generate
    from swarmnode.policy.load import load_policy

    policy = load_policy(PolicyConfig(model=str(directory), devices="cpu"), log=lambda line: None)
    drawn = list(questions(SETTINGS, per_task, PROFILE_BLOCK))
    groups = generate(
        policy,
        [q.prompt for q in drawn],
        Sampling(generations, max_tokens),
        policy.random_generator(seed),
    )
    accept: Counter[str] = Counter()
    value: Counter[str] = Counter()
    useful = 0
    for question, group in zip(drawn, groups, strict=True):
        right = [accepted(question, c.text) for c in group.completions]
        accept[question.task] += sum(right)
        value[question.task] += sum(accepted(question, unwrap(c.text)) for c in group.completions)
        useful += 0 < sum(right) < generations
    total = per_task * generations
    return {
        "temperature": 1.0,
        "samples": total * len(SETTINGS),
        "accepted": round(sum(accept.values()) / total / len(SETTINGS), 4),
        "value_right_any_format": round(sum(value.values()) / total / len(SETTINGS), 4),
        "useful_groups_of_8": round(useful / len(drawn), 4),
        "accepted_by_task": {t: round(accept[t] / total, 4) for t in SETTINGS},
        "value_right_by_task": {t: round(value[t] / total, 4) for t in SETTINGS},
    }


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config.bos_token_id = None
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("embedded"))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--share",
        type=float,
        default=0.05,
        help="share of the accepted format among the demonstrations",
    )
    parser.add_argument("--final-steps", type=int, default=80)
    parser.add_argument(
        "--final-share",
        type=float,
        default=0.05,
        help="the same for the last steps; it sets the start reward",
    )
    parser.add_argument(
        "--questions", type=int, default=4000, help="questions per task shown in supervised steps"
    )
    parser.add_argument(
        "--profile-questions",
        type=int,
        default=128,
        help="questions per task of the measured start profile",
    )
    args = parser.parse_args()

    disable_progress_bar()
    # Fix the order of additions. Bits still differ between CPUs, the profile does not.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    pool = list(questions(SETTINGS, args.questions, SFT_BLOCK))
    phrases = set().union(
        *(mine_phrases([q.prompt for q in pool if q.task == task][:300]) for task in SETTINGS)
    )
    tokenizer = build_tokenizer(phrases)
    model = build_model(tokenizer)
    print(
        f"{len(phrases)} phrases, vocabulary {len(tokenizer)}, {model.num_parameters():,}"
        " parameters"
    )
    loss = fine_tune(model, tokenizer, pool, Course(args.steps, args.share, peak=3e-3), rng)
    save(model, tokenizer, args.out)
    print(
        f"{args.steps} steps at share {args.share}: loss {loss:.3f}",
        measure(args.out, args.profile_questions),
    )
    loss = fine_tune(
        model, tokenizer, pool, Course(args.final_steps, args.final_share, peak=1e-3), rng
    )
    save(model, tokenizer, args.out)
    profile = measure(args.out, args.profile_questions)
    print(f"{args.final_steps} steps at share {args.final_share}: loss {loss:.3f}", profile)
    recipe = {k: v for k, v in vars(args).items() if k != "out"}
    files = ("config.json", "model.safetensors", "tokenizer.json")
    digests = {name: hashlib.sha256((args.out / name).read_bytes()).hexdigest() for name in files}
    record = {
        "recipe": recipe,
        "parameters": model.num_parameters(),
        "start_profile": profile,
        "sha256": digests,
    }
    (args.out / "PROFILE.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""How many weights does an RL update change, to somebody who has them in bfloat16? `python -m
benchmarks.density [--seeds N]`

The embedded policy, its own completions, the product's GRPO step on float32 weights. A weight has
changed when its bfloat16 is another one. Adam moves each weight that has a gradient by about the
learning rate in its first steps, whatever the model's size, and bfloat16 tells weights apart that
differ by 2⁻⁸ of themselves: so it is the learning rate against the size of the weights that
decides, and rewards hardly.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.report import heading, spread, table
from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.policy.generate import Sampling
from swarmnode.policy.load import Policy, load_policy, trainable
from swarmnode.policy.micro import MicroBatcher
from swarmnode.trainer.batch import TrainingGroup, assemble
from swarmnode.trainer.update import Updater
from tools.build_tiny import SETTINGS, questions

QUESTIONS, COMPLETIONS, TOKENS = 16, 8, 32
RATES = (1e-6, 1e-5)
UPDATES = (1, 10)
BLOCK = 40


def rounded(policy: Policy) -> torch.Tensor:
    """All trained weights in bfloat16, as bits."""
    return torch.cat(
        [
            p.detach().to(torch.bfloat16).view(torch.int16).reshape(-1)
            for p in trainable(policy.model).values()
        ]
    )


def densities(seed: int, rate: float) -> tuple[dict[int, float], int]:
    """(updates → share of the weights that are others since the start, updates that had a
    signal)."""
    policy = load_policy(PolicyConfig(devices="cpu"))
    training = TrainingConfig(
        learning_rate=rate, num_generations=COMPLETIONS, max_completion_length=TOKENS
    )
    batcher = MicroBatcher(training.per_device_train_tokens)
    updater = Updater(policy, training, batcher)
    asked = list(questions(SETTINGS, 2 * max(UPDATES), BLOCK + seed))
    rng = policy.random_generator(seed)
    start, found, stepped = rounded(policy), dict[int, float](), 0
    for update in range(1, max(UPDATES) + 1):
        batch = asked[update - 1 :: max(UPDATES)][:QUESTIONS]
        samples = batcher.generate(
            policy, [q.prompt for q in batch], Sampling(COMPLETIONS, TOKENS, 1.0, 1.0), rng
        )
        groups = [
            TrainingGroup(
                [(s.prompt_ids, c.ids) for c in s.completions],
                [c.logprobs for c in s.completions],
                [float(q.answer.strip() in c.text) for c in s.completions],
                [1.0] * COMPLETIONS,
            )
            for q, s in zip(batch, samples, strict=True)
        ]
        stepped += updater.update(assemble(groups, "grpo")).stepped
        if update in UPDATES:
            found[update] = float((rounded(policy) != start).float().mean())
    return found, stepped


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.density", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(heading("density: how many weights does an RL update change, in bfloat16?"), flush=True)
    rows = []
    for rate in RATES:
        runs = [densities(seed, rate) for seed in range(1, options.seeds + 1)]
        shares = [
            spread([100 * found[updates] for found, _ in runs], 2) + " %" for updates in UPDATES
        ]
        rows.append([f"{rate:g}", *shares, ", ".join(str(stepped) for _, stepped in runs)])
    after = [f"after {n} update{'s' * (n > 1)}" for n in UPDATES]
    print(table(["learning rate", *after, "updates with a signal, by seed"], rows), flush=True)


if __name__ == "__main__":
    main()

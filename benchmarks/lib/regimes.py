"""Start policies of different ability for `benchmarks.sapo` and `benchmarks.hostile`: a swarm gains
from sharing according to the share of useful groups of a fresh node.

Each policy is the embedded one after 80 supervised steps. A share of the demonstrations has the
format that the verifier accepts. Every seed has its own policy and questions. In the heterogeneous
regime every node has its own policy."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch

from benchmarks.lib.start_policy import next_token_loss, take_step
from swarmnode.config import PolicyConfig
from swarmnode.policy.load import Policy, load_policy
from tools.build_tiny import SETTINGS, SFT_BLOCK, Question, demonstration, questions

STEPS, BATCH, PEAK = 80, 64, 1e-3
QUESTIONS_PER_TASK = 500

REGIMES: dict[str, float | None] = {
    "ultra-sparse": 0.005,
    "sparse": 0.02,
    "moderate": 0.05,
    "dense": 0.5,
    "heterogeneous": None,
}
"""Share of demonstrations in the accepted format. None means 0.3 for tasks 2i and 2i + 1 of node i,
and 0.005 for the other tasks."""


def start_policies(regime: str, seed: int, nodes: int) -> list[Policy]:
    """Return one policy per node: copies of one policy, except in the heterogeneous regime. A
    distinct policy takes about 2 s of CPU. Raises KeyError for an unknown regime."""
    share = REGIMES[regime]
    origin = load_policy(PolicyConfig(devices="cpu", threads=1))
    pool = list(questions(SETTINGS, QUESTIONS_PER_TASK, SFT_BLOCK))
    stream = f"{regime}/{seed}"
    if share is not None:
        adapt(origin, pool, lambda task: share, stream)
        return [origin.clone() for _ in range(nodes)]
    policies = []
    tasks = list(SETTINGS)
    for node in range(nodes):
        known = {tasks[2 * node % len(tasks)], tasks[(2 * node + 1) % len(tasks)]}
        policy = origin.clone()
        adapt(
            policy,
            pool,
            lambda task, known=known: 0.3 if task in known else 0.005,
            f"{stream}/{node}",
        )
        policies.append(policy)
    return policies


def adapt(
    policy: Policy, pool: Sequence[Question], share: Callable[[str], float], stream: str
) -> None:
    """Take STEPS supervised steps on completion tokens: `share(task)` in the accepted format, 32 %
    refusals, the rest right values in a rejected format."""
    rng = random.Random(stream)
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=PEAK, weight_decay=0.0)
    for step in range(STEPS):
        rows, labels = [], []
        for question in rng.choices(pool, k=BATCH):
            text = demonstration(question, share(question.task), 0.32, rng)
            prompt = policy.encode_prompt(question.prompt)
            answer = policy.tokenize_completion(text, "eos")
            rows.append(prompt + answer)
            labels.append([-100] * len(prompt) + answer)
        loss = next_token_loss(policy.model, rows, labels, policy.pad_id)
        take_step(optimizer, loss, PEAK * (0.5 + 0.5 * math.cos(math.pi * step / STEPS)))

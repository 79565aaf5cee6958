"""Small crews of whole models in one process, and training rows for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmnode.policy.logprobs import score
from swarmnode.rollouts.trainer.batch import assemble, own_group
from swarmnode.stages.stage_frames import FrameLimits
from swarmnode.stages.trainer.pipeline import WorkerSettings
from swarmnode.stages.trainer.stage_batches import LearnRow
from swarmnode.stages.trainer.stage_model import StageRuntime
from tests.support.crew import Crew, open_crew
from tests.support.split_models import split_model

BASE = b"b" * 32
EXACT = WorkerSettings("float32")
ENDS = frozenset({1})
HEADS = [[5, 6, 7, 8, 9, 10], [2, 4], [11, 12, 13], [14, 3], [7, 7, 7, 7], [9]]


def limits_of(model: Any, tokens: int = 4096) -> FrameLimits:
    return FrameLimits(
        hidden=model.config.hidden_size, vocab=model.config.vocab_size, tokens=tokens
    )


def crew_of(
    model: Any, layers: list[int], settings: WorkerSettings = EXACT, **keys: Any
) -> AbstractAsyncContextManager[Crew]:
    runtimes = [StageRuntime(spec, stage) for spec, stage in split_model(model, layers)]
    return open_crew(runtimes, settings, limits_of(model), **keys)


@contextmanager
def fails(owner: Any, name: str, error: Exception) -> Iterator[None]:
    def raises(*_: Any, **__: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, raises)
        yield


def experience(
    policy: Any, noise: float = 0.1
) -> tuple[list[tuple[list[int], list[int]]], list[list[float]]]:
    prompts = [[5, 6, 7, 8, 9, 10], [2, 4]]
    generator = torch.Generator().manual_seed(2)
    rows, old = [], []
    for prompt in prompts:
        for length in (3, 1, 5, 2):
            rows.append((prompt, torch.randint(2, 60, (length,), generator=generator).tolist()))
    for _, completion, *_ in rows:
        old.append((torch.randn(len(completion), generator=generator) * noise).tolist())
    exact = score(policy, rows, 1.0)
    return rows, [
        [a + b for a, b in zip(x, y, strict=True)] for x, y in zip(exact, old, strict=True)
    ]


def grpo(policy: Any, noise: float = 0.1) -> tuple[Any, list[LearnRow]]:
    """Return the same rows for an unsplit trainer and for a crew: an own group and a peer's
    group."""
    rows, old = experience(policy, noise)

    class Sample:
        def __init__(self, part):
            self.prompt_ids = rows[part[0]][0]
            self.completions = [
                type(
                    "C", (), {"ids": rows[i][1], "logprobs": old[i], "finish": "eos", "sampled": []}
                )
                for i in part
            ]

    own, other = (
        own_group(Sample(range(4)), [1.0, 0.0, 0.0, 1.0]),
        own_group(Sample(range(4, 8)), [0.0, 1.0, 0.0, 0.0]),
    )
    assembled = assemble(
        [own, replace(other, peer="someone", weights=[1.0, 0.5, 0.25, 1.0])], "grpo"
    )
    learn = [
        LearnRow(
            *row[:2],
            assembled.sampler_logprobs[i],
            float(assembled.advantages[i]),
            float(assembled.weights[i]),
            group,
        )
        for i, (row, group) in enumerate(zip(assembled.rows, assembled.groups, strict=True))
    ]
    return assembled, learn

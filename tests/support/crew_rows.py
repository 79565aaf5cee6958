"""Small crews of whole models in one process, and training rows for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmnode.policy.generate import GroupSample, SampledCompletion
from swarmnode.policy.logprobs import score
from swarmnode.rollouts.trainer.batch import Rows, assemble, own_group
from swarmnode.stages.stage_frames import FrameLimits
from swarmnode.stages.trainer.pipeline import WorkerSettings
from swarmnode.stages.trainer.stage_batches import LearnRow
from swarmnode.stages.trainer.stage_model import StageRuntime
from tests.support.crew import Crew, open_crew
from tests.support.split_models import split_model, whole_state

EXACT = WorkerSettings("float32")
ENDS = frozenset({1})
HEADS = [[5, 6, 7, 8, 9, 10], [2, 4], [11, 12, 13], [14, 3], [7, 7, 7, 7], [9]]


def crew_of(
    model: Any, layers: list[int], settings: WorkerSettings = EXACT, tokens: int = 4096
) -> AbstractAsyncContextManager[Crew]:
    runtimes = [StageRuntime(spec, stage) for spec, stage in split_model(model, layers)]
    limits = FrameLimits(model.config.hidden_size, model.config.vocab_size, tokens)
    return open_crew(runtimes, settings, limits)


def together(crew: Crew) -> dict[str, torch.Tensor]:
    """Return name in the whole model → trained tensor of all stages, not copied."""
    return {
        name: tensor
        for member in crew.members
        for name, tensor in whole_state(member.runtime.spec, member.runtime.model).items()
    }


def flat(crew: Crew) -> torch.Tensor:
    """Return a copy of all trained values of all stages in one tensor."""
    return torch.cat([p.detach().flatten() for m in crew.members for p in m.runtime.parameters()])


@contextmanager
def fails(owner: Any, name: str, error: Exception) -> Iterator[None]:
    def raises(*_: Any, **__: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, raises)
        yield


def grpo(policy: Any, noise: float = 0.1) -> tuple[Rows, list[LearnRow]]:
    """Return the same rows for an unsplit trainer and for a crew: an own group and a peer's
    group."""
    generator = torch.Generator().manual_seed(2)
    samples = []
    for prompt in ([5, 6, 7, 8, 9, 10], [2, 4]):
        rows = [
            (prompt, torch.randint(2, 60, (length,), generator=generator).tolist())
            for length in (3, 1, 5, 2)
        ]
        exact = [torch.tensor(logprobs) for logprobs in score(policy, rows, 1.0)]
        old = [x + noise * torch.randn(len(x), generator=generator) for x in exact]
        completions = [
            SampledCompletion(ids, logprobs.tolist(), "", "eos")
            for (_, ids), logprobs in zip(rows, old, strict=True)
        ]
        samples.append(GroupSample(prompt, completions))
    own = own_group(samples[0], [1.0, 0.0, 0.0, 1.0])
    other = own_group(samples[1], [0.0, 1.0, 0.0, 0.0])
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

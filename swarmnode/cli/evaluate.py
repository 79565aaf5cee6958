"""`swarmnode eval`: how good a model is at tasks' held-out questions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from swarmnode.cli.options import NODE, AsJson, NodeOptions, Texts, load, needs_trainer
from swarmnode.errors import ConfigError, Unavailable
from swarmnode.install import check_torch

if TYPE_CHECKING:
    from swarmnode.tasks.measured import Measured, Request


def evaluate(
    model: str,
    *,
    task: Texts = None,
    questions: int = 64,
    samples: int = 16,
    k: Annotated[list[int] | None, Parameter(negative=())] = None,
    node: NodeOptions = NODE,
    json: AsJson = False,
) -> int:
    """Ask a model held-out questions: mean reward of its greedy answer, and pass@k, the chance that
    one of k sampled answers is right.

    Parameters
    ----------
    model
        A directory, such as one that `swarmnode export` wrote, or a name on the Hub; `embedded` is
        the one that comes with swarmnode.
    task
        A task, may be repeated; without it those of the swarm's manifest, or of the configuration.
    questions
        Held-out questions of each task, the same at every call.
    samples
        Answers sampled to each question, 63 at most.
    k
        For pass@k, may be repeated; without it 1, 4 and 16, as far as there are samples.
    """
    import msgspec

    from swarmnode import settings
    from swarmnode.swarm import manifest_store
    from swarmnode.tasks import registry
    from swarmnode.tasks.measured import Request
    from swarmnode.wire.limits import COMPLETIONS

    needs_trainer("eval")
    check_torch()
    config, _ = manifest_store.apply_stored(load(node).config)
    names = task or config.task.names
    registry.check_names(names)
    wanted = sorted(set(k or [size for size in (1, 4, 16) if size <= samples]))
    if (
        not 1 <= samples < COMPLETIONS
        or not questions >= 1
        or not wanted
        or not 1 <= wanted[0] <= wanted[-1] <= samples
    ):
        raise ConfigError(
            f"eval: --questions from 1, --samples from 1 to {COMPLETIONS - 1}, and each --k from 1"
            " to --samples"
        )
    revision = config.policy.revision if model == config.policy.model else None
    plain = {"model": model, "revision": revision, "lora.r": 0, "quantization": "none"}
    config = settings.replaced(
        config, {f"policy.{key}": wanted for key, wanted in plain.items()}, "eval"
    )
    told = _measured(Request(config.model_dump_json(), names, questions, samples, wanted))
    print(msgspec.json.encode(told).decode() if json else "\n".join(_table(told, wanted)))
    return 0


def _measured(request: Request) -> list[Measured]:
    """How good the model of `request` is at each of its tasks. Raises Unavailable with what its
    process said last."""
    import msgspec

    from swarmnode.tasks.measured import Measured

    done = subprocess.run(
        [sys.executable, "-m", "swarmnode.trainer.measure"],
        input=msgspec.json.encode(request),
        stdout=subprocess.PIPE,  # how far it is goes to our stderr
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise Unavailable(
            f"the model could not be measured: its process ended with {done.returncode}; what it"
            " said is above"
        )
    return [msgspec.json.decode(line, type=Measured) for line in lines]


def _table(told: Sequence[Measured], wanted: Sequence[int]) -> list[str]:
    lines = [
        f"{'task':<28} questions  greedy sampled"
        + "".join(f"{f'pass@{k}':>16}" for k in wanted)
        + "   tokens    cut"
    ]
    for each in told:
        passed = "".join(f"{each.pass_at[k]:>9.3f} ±{each.error_at[k] or 0:5.3f}" for k in wanted)
        reward = f"{each.questions:>9} {each.greedy:>7.3f} {each.reward:>7.3f}"
        lines.append(f"{each.task:<28} {reward}{passed} {each.tokens:>8.1f} {each.cut:>5.0%}")
    return lines

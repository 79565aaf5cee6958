"""`swarmnode eval`: measure a model on held-out questions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from swarmnode.cli.options import NODE, AsJson, NodeOptions, Texts, load, require_trainer
from swarmnode.errors import ConfigError, Unavailable
from swarmnode.install import check_torch

if TYPE_CHECKING:
    from swarmnode.tasks.measurement import Request, TaskScores


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
    """Evaluate a model on held-out questions: mean reward of greedy answers, and pass@k, the
    probability that one of k sampled answers is correct.

    Parameters
    ----------
    model
        A directory, for example of `swarmnode export`, a .gguf file, a Hub name, `smollm2`, or
        `embedded` for the policy that is part of swarmnode.
    task
        May be repeated. By default the tasks of the manifest or of the configuration.
    questions
        Number of held-out questions per task; of a dataset at most its held-out rows. Every run
        uses the same questions.
    samples
        Number of sampled answers per question, at most 63.
    k
        k of pass@k. May be repeated. By default 1, 4 and 16, if there are enough samples.
    """
    import msgspec

    from swarmnode import settings
    from swarmnode.swarm import manifest_store
    from swarmnode.tasks import registry
    from swarmnode.tasks.measurement import Request
    from swarmnode.wire.limits import COMPLETIONS

    require_trainer("eval")
    check_torch()
    config, _ = manifest_store.apply_stored(load(node).config)
    names = task or config.task.names
    registry.check_names(names)
    sizes = sorted(set(k or [size for size in (1, 4, 16) if size <= samples]))
    if (
        not 1 <= samples < COMPLETIONS
        or not questions >= 1
        or not sizes
        or not 1 <= sizes[0] <= sizes[-1] <= samples
    ):
        raise ConfigError(
            f"eval: --questions must be at least 1, --samples 1 to {COMPLETIONS - 1}, each --k 1 to"
            " --samples"
        )
    revision = config.policy.revision if model == config.policy.model else None
    plain = {"model": model, "revision": revision, "lora.r": 0, "quantization": "none"}
    config = settings.replaced(
        config, {f"policy.{key}": value for key, value in plain.items()}, "eval"
    )
    results = _measure(Request(config.model_dump_json(), names, questions, samples, sizes))
    print(msgspec.json.encode(results).decode() if json else "\n".join(_format(results, sizes)))
    return 0


def _measure(request: Request) -> list[TaskScores]:
    """Measure the model of `request` in a child process and return one result per task.

    Raises:
        Unavailable: The child failed; its output is on stderr.
    """
    import msgspec

    from swarmnode.tasks.measurement import TaskScores

    done = subprocess.run(
        [sys.executable, "-m", "swarmnode.trainer.measure"],
        input=msgspec.json.encode(request),
        stdout=subprocess.PIPE,  # stderr is inherited and shows the progress
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise Unavailable(
            f"evaluation failed with exit code {done.returncode}; the cause is printed above"
        )
    return [msgspec.json.decode(line, type=TaskScores) for line in lines]


def _format(results: Sequence[TaskScores], sizes: Sequence[int]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        f"{'task':<28} questions  greedy sampled"
        + "".join(f"{f'pass@{k}':>16}" for k in sizes)
        + "   tokens    cut"
    ]
    for each in results:
        passed = "".join(f"{each.pass_at[k]:>9.3f} ±{each.error_at[k] or 0:5.3f}" for k in sizes)
        reward = f"{each.questions:>9} {each.greedy:>7.3f} {each.reward:>7.3f}"
        lines.append(f"{each.task:<28} {reward}{passed} {each.tokens:>8.1f} {each.cut:>5.0%}")
    return lines

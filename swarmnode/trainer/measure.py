"""`python -m swarmnode.trainer.measure`, with a request as JSON on stdin: evaluates a model on the
held-out questions of tasks. `swarmnode eval` starts it, so that the command line does not load
torch.

    greedy    mean reward of one answer per question at temperature 0
    pass@k    unbiased estimate of the probability that at least one of k sampled answers is right,
              from n samples per question; an answer with reward 1 is right
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from swarmnode.config import Config, PolicyConfig, TrainingConfig
from swarmnode.errors import Unavailable
from swarmnode.gguf import SMOLLM2
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.generate import Sampling
from swarmnode.policy.load import Policy, load_policy, rename_checkpointing_flag
from swarmnode.policy.micro import MicroBatcher
from swarmnode.policy.trial import try_sampling
from swarmnode.process import die_with_parent, run_main
from swarmnode.tasks import registry
from swarmnode.tasks.client import Scored, Scorer
from swarmnode.tasks.measurement import Request, TaskScores, pass_at_k
from swarmnode.trainer.episodes import answer_all, judged_text, sampled_tokens
from swarmnode.trainer.evaluate import held_out_refs, standard_error

RIGHT = 1.0
SEED = 20_260
QUESTIONS_AT_ONCE = 16


def open_model(cfg: PolicyConfig, load: Callable[[PolicyConfig], Policy] = load_policy) -> Policy:
    """Load the model of `cfg`. If it is a directory with an adapter, as `swarmnode export` writes
    it, load its base with the adapter.

    Args:
        load: Loads a whole model.

    Raises:
        LocalError: The model does not exist or fit, or the directory has no adapter_model file in
            safetensors.
    """
    directory = Path(cfg.model).expanduser()
    about = directory / "adapter_config.json"
    if not about.is_file():
        return load(cfg)
    if not (directory / "adapter_model.safetensors").is_file():
        raise Unavailable(
            f"{directory} holds an adapter without adapter_model.safetensors, the only format that"
            " is read"
        )
    from peft import PeftModel

    base = json.loads(about.read_text())["base_model_name_or_path"]
    record = directory / "swarmnode.json"
    if record.is_file() and json.loads(record.read_text())["base"] == SMOLLM2:
        base = SMOLLM2  # the adapter names its directory on the machine of the export
    policy = load(cfg.model_copy(update={"model": base, "revision": None}))
    rename_checkpointing_flag(type(policy.base))
    return replace(policy, model=PeftModel.from_pretrained(policy.base, directory).eval())


@torch.no_grad()
def measure(
    policy: Policy, scorer: Scorer, task: str, request: Request, training: TrainingConfig
) -> TaskScores:
    """Evaluate the policy on the first `request.questions` held-out questions of `task`, or on all
    of them if a dataset has fewer.

    Raises:
        Unavailable: None of the questions can be generated, or none fits into the context.
    """
    batches = MicroBatcher(training.per_device_train_tokens)
    refs = held_out_refs(task, request.questions)
    asked = [
        (ref, result.prompt)
        for ref, result in zip(refs, scorer.score_many([(ref, []) for ref in refs]), strict=True)
        if isinstance(result, Scored) and result.prompt and policy.fits(result.prompt)
    ]
    if not asked:
        raise Unavailable(
            f"{task}: none of its questions could be generated, or none fits the context"
        )
    generator = policy.random_generator(SEED)
    greedy, sampled, lengths, cut = list[float](), list[list[float]](), list[int](), 0
    for start in range(0, len(asked), QUESTIONS_AT_ONCE):
        part = asked[start : start + QUESTIONS_AT_ONCE]
        length = training.max_completion_length
        answers = lambda sampling, part=part: answer_all(
            Lockstep(
                lambda prompts, count: batches.generate(
                    policy, prompts, sampling.with_generations(count), generator
                )
            ),
            policy,
            scorer,
            part,
        )
        certain = answers(Sampling(1, length, 0.0))
        drawn = answers(Sampling(request.samples, length, training.temperature, training.top_p))
        # A question whose environment failed has no completions and no reward.
        completions = [
            [c for group in pair if group is not None for c in group.completions]
            if None not in pair
            else []
            for pair in zip(certain, drawn, strict=True)
        ]
        judged = scorer.score_many(
            [
                (ref, [judged_text(c) for c in some])
                for (ref, _), some in zip(part, completions, strict=True)
            ]
        )
        for some, result in zip(completions, judged, strict=True):
            rewards = (
                result.rewards
                if some and isinstance(result, Scored)
                else [0.0] * (request.samples + 1)
            )
            greedy.append(rewards[0])
            sampled.append(rewards[1:])
            lengths += [sampled_tokens(c) for c in some[1:]]
            cut += sum(c.finish == "length" for c in some[1:])
    right = [sum(reward >= RIGHT for reward in rewards) for rewards in sampled]
    passed = {k: [pass_at_k(request.samples, count, k) for count in right] for k in request.k}
    return TaskScores(
        task,
        len(asked),
        _mean(greedy),
        _mean([reward for rewards in sampled for reward in rewards]),
        {k: _mean(chances) for k, chances in passed.items()},
        {k: standard_error(chances) for k, chances in passed.items()},
        _mean(lengths or [0]),
        cut / max(1, len(lengths)),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def main() -> int:
    die_with_parent()
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    config = Config.model_validate_json(request.config)
    registry.install(config.task.modules, config.task.settings, request.tasks)
    registry.install_datasets(config.task.datasets, config.node.data_dir / registry.DATASETS)
    policy = open_model(config.policy)
    try_sampling(f"policy.model {config.policy.model!r}", policy, config.training)
    with Scorer() as scorer:
        for task in request.tasks:
            print(
                msgspec.json.encode(
                    measure(policy, scorer, task, request, config.training)
                ).decode(),
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(run_main("swarmnode eval", main))

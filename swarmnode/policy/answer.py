"""`python -m swarmnode.policy.answer --config FILE --answers N`, with prompts as a JSON list on
stdin: samples N completions per prompt. Prints a JSON line of [text, finish] pairs per prompt.

`swarmnode task try` starts it as a separate process, so that the command line does not load torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from swarmnode.config import Config, PolicyConfig, TrainingConfig
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy
from swarmnode.policy.trial import try_sampling
from swarmnode.process import die_with_parent, run_main


def answers(
    cfg: PolicyConfig, training: TrainingConfig, prompts: list[str], count: int
) -> Iterator[list[tuple[str, str]]]:
    """Yield (text, finish) of `count` completions of each prompt, sampled as in training.

    Raises:
        LocalError: The model does not exist, does not fit, or cannot be sampled from.
    """
    policy = load_policy(cfg)
    try_sampling(f"policy.model {cfg.model!r}", policy, training)
    generator = policy.random_generator(training.seed)
    sampling = Sampling(count, training.max_completion_length, training.temperature, training.top_p)
    for prompt in prompts:
        (group,) = generate(policy, [prompt], sampling, generator)
        yield [(completion.text, completion.finish) for completion in group.completions]


def main() -> int:
    die_with_parent()
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    config = Config.model_validate_json(Path(given["--config"]).read_bytes())
    prompts = json.loads(sys.stdin.buffer.read())
    for group in answers(config.policy, config.training, prompts, int(given["--answers"])):
        print(json.dumps(group), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_main("swarmnode task try", main))

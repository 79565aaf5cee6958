"""`python -m swarmnode.policy.answer --config FILE`, prompts as a JSON list on stdin: one sampled
completion for each, as JSON on stdout.

For `swarmnode task try`. A process of its own, so that the command line does not load torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from swarmnode.config import Config, PolicyConfig, TrainingConfig
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy
from swarmnode.policy.trial import try_sampling
from swarmnode.process import die_with_parent, run_main


def answers(cfg: PolicyConfig, training: TrainingConfig, prompts: list[str]) -> list[str]:
    """One completion for each prompt, sampled as in training. Raises LocalError when the model is
    not there, does not fit, or cannot be sampled from."""
    policy = load_policy(cfg)
    try_sampling(f"policy.model {cfg.model!r}", policy, training)
    generator = policy.random_generator(training.seed)
    sampling = Sampling(1, training.max_completion_length, training.temperature, training.top_p)
    found = []
    # one by one: an answer of a real model may be long, and nobody said that ten of them fit
    for prompt in prompts:
        (group,) = generate(policy, [prompt], sampling, generator)
        found.append(group.completions[0].text)
    return found


def main() -> int:
    die_with_parent()
    config = Config.model_validate_json(Path(sys.argv[sys.argv.index("--config") + 1]).read_bytes())
    print(json.dumps(answers(config.policy, config.training, json.loads(sys.stdin.buffer.read()))))
    return 0


if __name__ == "__main__":
    sys.exit(run_main("swarmnode task try", main))

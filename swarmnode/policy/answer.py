"""`python -m swarmnode.policy.answer --config FILE`, with prompts as a JSON list on stdin: samples
one completion per prompt. Prints [text, finish] of each as JSON.

`swarmnode task try` starts it as a separate process, so that the command line does not load torch.
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


def answers(
    cfg: PolicyConfig, training: TrainingConfig, prompts: list[str]
) -> list[tuple[str, str]]:
    """Return (text, finish) of one completion per prompt, sampled as in training.

    Raises:
        LocalError: The model does not exist, does not fit, or cannot be sampled from.
    """
    policy = load_policy(cfg)
    try_sampling(f"policy.model {cfg.model!r}", policy, training)
    generator = policy.random_generator(training.seed)
    sampling = Sampling(1, training.max_completion_length, training.temperature, training.top_p)
    found = list[tuple[str, str]]()
    # One by one, because several long answers may not fit into memory.
    for prompt in prompts:
        (group,) = generate(policy, [prompt], sampling, generator)
        found.append((group.completions[0].text, group.completions[0].finish))
    return found


def main() -> int:
    die_with_parent()
    config = Config.model_validate_json(Path(sys.argv[sys.argv.index("--config") + 1]).read_bytes())
    print(json.dumps(answers(config.policy, config.training, json.loads(sys.stdin.buffer.read()))))
    return 0


if __name__ == "__main__":
    sys.exit(run_main("swarmnode task try", main))

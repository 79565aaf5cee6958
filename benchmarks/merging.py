"""Does one merging at the end help? `python -m benchmarks.merging [--seeds N] [--rounds N]`.

Nodes of the toy policy train for `--rounds` steps as in benchmarks/simulator.py. Then every node
takes the mean of all nodes' weights, once, and answers the same held-out questions with the same
random numbers again. Arms: nodes alone; nodes that share groups as the product does; and the same
with averaging in pairs every fifth step.

Source: A Single Merging Suffices (arXiv 2507.06542).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.report import heading, signed, spread, table
from benchmarks.sapo import AVERAGE_EVERY, B, G, note
from benchmarks.simulator import Arm, Node, Sharing, Swarm, single_thread

PRODUCT: dict[str, Any] = {
    "external": None,
    "sharing": Sharing(),
    "keep_pool": True,
    "replay": True,
}
ARMS = (
    Arm("alone"),
    Arm("swarmnode", **PRODUCT),
    Arm("swarmnode + NoLoCo", **PRODUCT, average=AVERAGE_EVERY),
)
REGIMES = ("moderate", "heterogeneous")


@torch.no_grad()
def merge(nodes: Sequence[Node]) -> None:
    """Give every node the mean of all nodes' weights."""
    for parameters in zip(*(node.policy.trainable_parameters() for node in nodes), strict=True):
        mean = torch.stack(parameters).mean(0)
        for parameter in parameters:
            parameter.copy_(mean)


def merged_gain(swarm: Swarm, rounds: int) -> tuple[float, float]:
    """Return the mean held-out reward of the nodes after `rounds` steps, and that of their mean."""
    trace = swarm.run(lambda trace: len(trace.tokens) >= rounds, rounds)
    merge(swarm.nodes)
    swarm.evaluate()
    return trace.held_out[-2].reward, trace.held_out[-1].reward


def main() -> None:
    from benchmarks.regimes import start_policies
    from swarmnode.config import TrainingConfig
    from swarmnode.tasks.client import Scorer

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    args = parser.parse_args()
    single_thread()
    training = TrainingConfig(learning_rate=3e-4, groups_per_step=B, num_generations=G)
    rows = []
    with Scorer(deadline=60.0) as scorer:
        for regime in args.regimes:
            starts = [start_policies(regime, seed, args.nodes) for seed in range(args.seeds)]
            for arm in ARMS:
                gains = []
                for seed, policies in enumerate(starts):
                    own = [policy.clone() for policy in policies]
                    swarm = Swarm(arm, own, training, scorer, seed, eval_questions=12)
                    gains.append(merged_gain(swarm, args.rounds))
                    note(f"{regime}, {arm.name}, seed {seed}: {gains[-1]}")
                rows.append(
                    [
                        regime,
                        arm.name,
                        spread([before for before, _ in gains], 3),
                        spread([after for _, after in gains], 3),
                        signed([after - before for before, after in gains]),
                    ]
                )
    headers = ["regime", "arm", "mean of the nodes", "all merged once", "difference by seed"]
    print(heading("merging: does one merging at the end help?"))
    print(table(headers, rows))


if __name__ == "__main__":
    main()

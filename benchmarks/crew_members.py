"""What the samples of a crew's other members bring: `python -m benchmarks.crew --members`.

Four whole nodes hold the embedded policy, eight layers deep, as four stages, each with a whole copy
of it. In one arm nothing is shared, so that the head alone samples; in the other the other three
sample too, a quarter of a step's groups each, and the head learns from them as from any peer's. By
seed, at equal steps of the crew: held-out reward, the tokens that the head has sampled for it
without evaluations, the groups of others among those that were trained on, seconds.

All share the cores of one machine here, so that seconds say little: members that are apart sample
beside the head.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.crew import FORM_SECONDS, STAGES, Crew
from swarmnode.demo.crew import crew_settings, write_model
from swarmnode.demo.nodes import DemoNode
from swarmnode.demo.run import DemoOptions
from tests.support.whole_crew import snapshot

ARMS = {"the head alone": False, "members too": True}
"""name → whether groups are shared."""
EVERY = 50
"""Steps between two looks."""
PATIENCE = 600.0
HEADERS = [
    "arm",
    "seed",
    "steps",
    "held out",
    "million tokens by the head",
    "own groups",
    "groups of members",
    "s",
]


@dataclass(frozen=True)
class Look:
    """What the head says after so many steps."""

    step: int
    reward: float | None
    tokens: int
    own: int
    external: int
    seconds: float


def looks(nodes: Sequence[DemoNode], steps: int) -> list[Look]:
    """One for each EVERY steps. Raises SystemExit where there is no crew, or it stands still."""
    crew, found, began = Crew(list(nodes)), list[Look](), 0.0
    try:
        crew.start()
        if crew.wait(crew.running, FORM_SECONDS) is None:
            raise SystemExit(f"the crew did not form: {[node.last_words() for node in nodes]}")
        began = time.monotonic()
        for step in range(EVERY, steps + 1, EVERY):
            told = dict[str, Any]()

            def there(step: int = step, told: dict[str, Any] = told) -> bool:
                head = snapshot(crew.holder(0))
                told.update((head or {"trainer": {}})["trainer"].get("report") or {})
                return bool(told.get("step", 0) > step)  # an evaluation comes before the next step

            if crew.wait(there, PATIENCE) is None:
                raise SystemExit(f"the crew stands still: {[node.last_words() for node in nodes]}")
            tokens = told["tokens_total"] - told["evaluation_tokens_total"]
            own, external = told["own_groups_total"], told["external_groups_total"]
            found.append(
                Look(
                    told["step"],
                    told["reward_held_out"],
                    tokens,
                    own,
                    external,
                    time.monotonic() - began,
                )
            )
            print(found[-1], flush=True)
    finally:
        crew.end()
    return found


def nodes_of(directory: Path, seed: int, sharing: bool) -> list[DemoNode]:
    model, nodes = write_model(directory / "model"), []
    for i in range(STAGES):
        settings = crew_settings(DemoOptions(nodes=STAGES, http_port=0), i, model)
        settings["stages"] |= {"policy_copy": "memory"}
        settings["training"] |= {"seed": 1000 * seed + i, "eval_every": EVERY}
        settings["sharing"] = {"enabled": sharing}
        nodes.append(DemoNode(f"node{i}", directory / f"node{i}", settings))
    return nodes


def run(steps: int, seeds: int) -> None:
    rows, last = list[list[object]](), dict[str, list[Look]]()
    for seed in range(seeds):
        for name, sharing in ARMS.items():
            with tempfile.TemporaryDirectory(prefix="swarmnode-members-") as made:
                found = looks(nodes_of(Path(made), seed, sharing), steps)
            last.setdefault(name, []).append(found[-1])
            for at in found:
                reward = "–" if at.reward is None else f"{at.reward:.3f}"
                rows.append(
                    [
                        name,
                        seed,
                        at.step,
                        reward,
                        f"{at.tokens / 1e6:.3f}",
                        at.own,
                        at.external,
                        f"{at.seconds:.0f}",
                    ]
                )
    print(report.heading("crew: what members' samples bring"))
    print(report.table(HEADERS, rows))
    for name, ends in last.items():
        rewards = [end.reward for end in ends if end.reward is not None]
        tokens = statistics.fmean(end.tokens for end in ends) / 1e6
        print(
            f"\n{name}: held out {report.spread(rewards, 3)}, {tokens:.3f} million tokens by the"
            " head"
        )

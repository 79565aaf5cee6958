"""Peers' episodes that must not be trained on: `python -m benchmarks.episodes_hostile`.

In each round every way below sends one group with a valid signature, and an honest author sends
one. The receiver is the product's: admission, scoring queue, scorer child in its sandbox. A way is
an author with a key of its own, except the last, which takes a new key for each group. Time is
simulated, 10 s a round; the scorer's CPU is real.

    ends early             the last action is missing, so that the replay has not ended
    ends late              an action follows the end
    never ends             the episode stops before the task's last turn, and nothing ended it
    another reward         all episodes replay to one reward, so that nothing can be learnt
    takes all CPU          an action after which the environment never returns
    takes all CPU, new keys

`benchmarks.episodes --arms hostile` forges the episodes that a trained policy has sampled.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import trio

from benchmarks.report import heading, machine, table, write_json
from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import MODEL, TOKENIZER, swarm_of
from swarmnode.rollouts.admission import Admission
from swarmnode.rollouts.groups import Candidate, ExternalGroup
from swarmnode.rollouts.scoring import ScoringQueue
from swarmnode.tasks import registry
from swarmnode.tasks.client import AsyncScorer, Scored
from tests.support.authors import Author

TASK, TURNS = "endless_game:endless", 12
GAME = '''
def endless(seed: int):
    """Ends at "win" and "leave" only; "burn" never returns."""

    def step(action: str):
        while action == "burn":
            pass
        if action in ("win", "leave"):
            return "over", float(action == "win"), True
        return "go on", 0.0, False

    return "Walk.", step
'''
NEW_KEYS = "takes all CPU, new keys"
ON = ["on"] * (TURNS - 1)
WIN, LEAVE, LONG = ["on", "win"], ["on", "leave"], [*ON, "win"]
WAYS: dict[str, Sequence[Sequence[str]]] = {
    "ends early": [WIN[:-1], WIN, LEAVE, LONG],
    "ends late": [[*WIN, "on"], WIN, LEAVE, LONG],
    "never ends": [ON, WIN, LEAVE, LONG],
    "another reward": [WIN, LONG, ["win"], ["on", "on", "win"]],
    "takes all CPU": [["burn"], WIN, LEAVE, LONG],
    NEW_KEYS: [["burn"], WIN, LEAVE, LONG],
}
"""The actions of each episode of a group."""
HONEST = "honest"
ROUND_SECONDS = 10.0
START_TIME = 1_700_000_000.0


class Receiver:
    """The honest node that all groups reach."""

    def __init__(self, swarm: bytes, scorer: AsyncScorer) -> None:
        self.now = START_TIME
        self.way_of: dict[str, str] = {}
        """By peer."""
        self.outcomes: dict[str, Counter[str]] = {name: Counter() for name in (HONEST, *WAYS)}
        self.admission = Admission(swarm, "me", [TASK], SharingConfig())
        self.admission.set_policy(MODEL, TOKENIZER, 1.0)
        self._left, self._settled = 0, trio.Event()
        self.queue = ScoringQueue(scorer, self._scored, self._failed, lambda: self.now)

    async def receive(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Take (way, frame) of each author, and wait until all have an outcome."""
        self._left, self._settled = len(frames), trio.Event()
        for way, frame in frames:
            found = self.admission.check(frame, self.now)
            if not isinstance(found, Candidate):
                self._count(way, found.reason)
                continue
            self.way_of[found.peer] = way
            if (reason := self.queue.put(found)) is not None:
                self._count(way, f"{reason}, not tried")
        await self._settled.wait()

    def _count(self, way: str, outcome: str) -> None:
        self.outcomes[way][outcome] += 1
        self._left -= 1
        if not self._left:
            self._settled.set()

    def _scored(self, candidate: Candidate, scored: Scored) -> None:
        found = self.admission.check_scored(candidate, scored)
        reason = "admitted" if isinstance(found, ExternalGroup) else found.reason
        self._count(self.way_of[candidate.peer], reason)

    def _failed(self, reason: str, peer: str) -> None:
        self._count(self.way_of[peer], reason)


async def run(rounds: int) -> dict[str, Any]:
    """Return counts by way, and what the scorer took."""
    swarm = swarm_of("hostile episodes", (TASK,))
    authors = {name: Author(swarm, number, (TASK,)) for number, name in enumerate((HONEST, *WAYS))}
    started = time.monotonic()
    async with AsyncScorer() as scorer, trio.open_nursery() as nursery:
        receiver = Receiver(swarm, scorer)
        receiver.queue.start(nursery)
        for number in range(rounds):
            authors[NEW_KEYS] = Author(swarm, 1000 + number, (TASK,))
            frames = []
            for way, author in authors.items():
                episodes = WAYS.get(way, [WIN, LEAVE, LONG, ["leave"]])
                group = author.group(number, receiver.now, episodes=episodes)
                frames.append((way, author.frame(group)))
            await receiver.receive(frames)
            receiver.now += ROUND_SECONDS
        told = scorer.statistics()
        nursery.cancel_scope.cancel()
    return {
        "rounds": rounds,
        "outcomes": {way: dict(found) for way, found in receiver.outcomes.items()},
        "internal_errors": receiver.admission.statistics().outcomes.get("internal", 0),
        "scorer": {"starts": told.starts, "failures": told.failures},
        "wall_seconds": round(time.monotonic() - started, 1),
    }


def show(found: dict[str, Any]) -> str:
    lines = [
        [
            way,
            sum(reasons.values()),
            reasons.get("admitted", 0),
            ", ".join(f"{k} {v}" for k, v in sorted(reasons.items()) if k != "admitted") or "-",
        ]
        for way, reasons in found["outcomes"].items()
    ]
    return (
        table(["author", "groups", "could be trained on", "refused"], lines)
        + f"\n\nscorer: {found['scorer']['starts']} starts, {found['scorer']['failures']} failures;"
        f" internal errors: {found['internal_errors']}; {found['wall_seconds']} s"
    )


@contextlib.contextmanager
def game() -> Iterator[None]:
    """Install the game for this process."""
    before = dict(registry.TASKS)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "endless_game.py").write_text(GAME)
        sys.path.insert(0, folder)
        try:
            registry.install([TASK], {TASK: {"turns": TURNS}})
            yield
        finally:
            sys.path.remove(folder)
            registry._TASKS.clear()
            registry._TASKS.update(before)
            registry.task_version.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, help="write the counts as JSON")
    args = parser.parse_args()
    with game():
        found = trio.run(run, args.rounds)
    print(heading("peers' episodes that must not be trained on"))
    print(show(found))
    if args.out:
        write_json(args.out, found | {"machine": machine()})


if __name__ == "__main__":
    main()

"""Measure whether a node rejects peers' episodes that must not be trained on, and their cost.

In each round every author below sends one group with a valid signature, and so does an honest
author. The receiver is the product's: admission, scoring queue, and the scorer child in its
sandbox. Each author has a key of its own; the last takes a new key for each group. Time is
simulated, 10 s a round; the scorer's CPU time is real.

    forged: …              the forgeries of `swarmnode.demo.liar.episodes`
    never ends             the episode stops before the task's last turn, and nothing ended it
    another reward         all episodes replay to one reward, so that nothing can be learned
    takes all CPU          an action after which the environment never returns
    takes all CPU, new keys
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import trio

from benchmarks.lib.report import columns, heading, make_parser, write_json
from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import MODEL, TOKENIZER, swarm_of
from swarmnode.rollouts.groups import Candidate, ExternalGroup
from swarmnode.rollouts.network.admission import Admission, ScoringQueue
from swarmnode.tasks import registry
from swarmnode.tasks.client import AsyncScorer, Scored
from tests.support.authors import Author, forged_episodes

TASK, TURNS = "endless_game:endless", 12
GAME = '''
def endless(seed: int):
    """Ends at "win" and "leave"; "burn" never returns."""

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
    "never ends": [ON, WIN, LEAVE, LONG],
    "another reward": [WIN, LONG, ["win"], ["on", "on", "win"]],
    "takes all CPU": [["burn"], WIN, LEAVE, LONG],
    NEW_KEYS: [["burn"], WIN, LEAVE, LONG],
}
"""The actions of each episode of a group."""
HONEST = "honest"
HONEST_EPISODES = [WIN, LEAVE, LONG, ["leave"]]
ROUND_SECONDS = 10.0
START_TIME = 1_700_000_000.0


class Receiver:
    """The honest node that receives all groups."""

    def __init__(self, swarm: bytes, scorer: AsyncScorer) -> None:
        self.now = START_TIME
        self.way_of: dict[str, str] = {}
        """Values by peer."""
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.admission = Admission(swarm, "me", [TASK], SharingConfig())
        self.admission.set_policy(MODEL, TOKENIZER, 1.0)
        self._left, self._settled = 0, trio.Event()
        self.queue = ScoringQueue(scorer, self._scored, self._failed, lambda: self.now)

    async def receive(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Take (author, frame) of all authors, and wait until each frame has an outcome."""
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
    """Return the outcomes of each author's groups, and counters of the scorer."""
    swarm = swarm_of("hostile episodes", (TASK,))
    numbers = itertools.count()
    authors = defaultdict(lambda: Author(swarm, next(numbers), (TASK,)))
    started = time.monotonic()
    async with AsyncScorer() as scorer, trio.open_nursery() as nursery:
        receiver = Receiver(swarm, scorer)
        receiver.queue.start(nursery)
        for number in range(rounds):
            authors.pop(NEW_KEYS, None)
            groups = {}
            for way, episodes in {HONEST: HONEST_EPISODES, **WAYS}.items():
                groups[way] = authors[way].group(number, receiver.now, episodes=episodes)
            for name in forged_episodes(groups[HONEST]):
                way = f"forged: {name}"
                whole = authors[way].group(number, receiver.now, episodes=HONEST_EPISODES)
                groups[way], _ = forged_episodes(whole)[name]
            frames = [(way, authors[way].frame(group)) for way, group in groups.items()]
            await receiver.receive(frames)
            receiver.now += ROUND_SECONDS
        statistics = scorer.statistics()
        nursery.cancel_scope.cancel()
    return {
        "rounds": rounds,
        "outcomes": {way: dict(found) for way, found in receiver.outcomes.items()},
        "internal_errors": receiver.admission.statistics().outcomes.get("internal", 0),
        "scorer": {"starts": statistics.starts, "failures": statistics.failures},
        "wall_seconds": round(time.monotonic() - started, 1),
    }


def show(found: dict[str, Any]) -> str:
    refused = lambda reasons: ", ".join(
        f"{reason} {count}" for reason, count in sorted(reasons.items()) if reason != "admitted"
    )
    shown = columns(
        list(found["outcomes"].items()),
        {
            "author": lambda item: item[0],
            "groups": lambda item: sum(item[1].values()),
            "could be trained on": lambda item: item[1].get("admitted", 0),
            "refused": lambda item: refused(item[1]) or "–",
        },
    )
    scorer = found["scorer"]
    return (
        f"{shown}\n\nscorer: {scorer['starts']} starts, {scorer['failures']} failures;"
        f" internal errors: {found['internal_errors']}; {found['wall_seconds']} s"
    )


@contextlib.contextmanager
def game() -> Iterator[None]:
    """Install the game as a task of this process."""
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
    parser = make_parser("episodes_hostile", __doc__, quick="two rounds")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    with game():
        found = trio.run(run, 2 if args.quick else args.rounds)
    print(heading("episodes_hostile: peers' episodes that must not be trained on"))
    print(show(found))
    write_json(args.json, found)


if __name__ == "__main__":
    main()

"""Many nodes pairing over a bad network, in virtual time: `python -m tests.support.pairing_sim`
prints how many find a partner.

Every node takes one outer step. Messages are delayed, lost, duplicated and overtaken; views miss
peers; transfers break. The simulator holds each step to what must always be true and raises
AssertionError where it is not.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from swarmnode.weights import pairing
from swarmnode.weights.messages import Propose
from swarmnode.weights.pairing import Phase
from swarmnode.weights.partners import partner_order

FINGERPRINT = bytes(32)
SWARM = bytes(32)
OPEN_SECONDS = 2.0
COPY_SECONDS = 0.02
APPLY_SECONDS = 0.2


@dataclass(frozen=True)
class Conditions:
    """Probabilities, and seconds."""

    missing: float = 0.0
    """Of each entry of each view."""
    delay: tuple[float, float] = (0.01, 0.15)
    """Uniform; a wide range makes messages overtake each other."""
    loss: float = 0.0
    duplicates: float = 0.0
    broken: float = 0.0
    """Of a transfer that breaks half-way, on one end by itself."""
    spread: float = 0.5
    """Outer steps come due within so long."""
    transfer: float = 3.0
    tries: int = 3


@dataclass
class Result:
    outcomes: Counter = field(default_factory=Counter)
    """How each node's outer step ended: applied, pulled or solo."""
    tries: Counter = field(default_factory=Counter)
    """Everything that pairing counted."""
    last_second: float = 0.0
    messages: int = 0

    @property
    def paired_share(self) -> float:
        return self.outcomes["applied"] / max(1, sum(self.outcomes.values()))


@dataclass(frozen=True)
class _Copied:
    """Its own copy of the weights is there."""

    session: bytes


@dataclass(frozen=True)
class _Ready:
    """A partner has offered its copy."""

    peer: str
    session: bytes


class Simulation:
    """`run` ends when nothing is left to happen, and checks that everybody is idle then."""

    def __init__(self, nodes: int, seed: int, conditions: Conditions) -> None:
        self.rng = random.Random(seed)
        self.conditions = conditions
        self.names = [f"peer{i:04d}" for i in range(nodes)]
        self.nodes = {
            name: pairing.Pairing(
                pairing.PairingSettings(
                    name,
                    FINGERPRINT,
                    tries=conditions.tries,
                    open_seconds=OPEN_SECONDS,
                    rest_seconds=30.0,
                )
            )
            for name in self.names
        }
        self.result = Result()
        self._queue: list[tuple[float, int, str, Any]] = []
        self._count = 0
        self._ticks: dict[str, float] = {}
        self._steps: dict[str, str] = {}
        self._roles: dict[bytes, dict[str, bool]] = {}
        self._offered: dict[tuple[str, bytes], set[str]] = {}
        bucket = self.rng.randrange(2**32)
        for name in self.names:
            view = [p for p in self.names if p != name and self.rng.random() >= conditions.missing]
            due = pairing.Due(
                0, 1, tuple(partner_order(name, view, bucket, SWARM)), self.rng.randbytes(16), 10.0
            )
            self._at(self.rng.uniform(0, conditions.spread), name, due)

    def _at(self, when: float, name: str, event: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (when, self._count, name, event))

    def run(self) -> Result:
        limit = 5000 * len(self.names)
        while self._queue:
            now, _, name, event = heapq.heappop(self._queue)
            if isinstance(event, pairing.Tick):
                if now < self._ticks.get(name, 0.0):
                    continue  # a deadline that was moved
            else:
                self.result.last_second = now
            if isinstance(event, _Copied):
                self._copied(name, event.session, now)
            elif isinstance(event, _Ready):
                self._ready(name, event.peer, event.session, now)
            else:
                self._step(name, event, now)
            limit -= 1
            assert limit > 0, "livelock"
        self._check_end()
        return self.result

    def _step(self, name: str, event: Any, now: float) -> None:
        node = self.nodes[name]
        before = node.state
        actions = node.handle(event, now)
        if isinstance(event, pairing.Received) and isinstance(event.message, Propose):
            answers = [a for a in actions if isinstance(a, pairing.Send) and a.peer == event.peer]
            assert len(answers) == 1, "a proposal is answered at once, and once"
        for action in actions:
            self._carry_out(name, action, now)
        state = node.state
        settled = state.phase is Phase.IDLE and state.due is None
        assert settled == (state.deadline == float("inf")), (
            "whoever has something to do has a deadline"
        )
        if state.phase is Phase.PAIRED and before.phase is not Phase.PAIRED:
            roles = self._roles.setdefault(state.session, {})
            roles[name] = state.initiator
            assert len(roles) <= 2, "a session has two ends"
            assert sum(roles.values()) <= 1, "the session is one end's proposal"
            self._at(now + COPY_SECONDS, name, _Copied(state.session))
        if state.deadline != before.deadline and not settled:
            self._ticks[name] = state.deadline
            self._at(state.deadline, name, pairing.Tick())

    def _carry_out(self, name: str, action: Any, now: float) -> None:
        c, rng = self.conditions, self.rng
        if isinstance(action, pairing.Send):
            self.result.messages += 1
            copies = int(rng.random() >= c.loss) + int(rng.random() < c.duplicates)
            for _ in range(copies):
                self._at(
                    now + rng.uniform(*c.delay),
                    action.peer,
                    pairing.Received(name, action.message, 1, 10.0),
                )
        elif isinstance(action, pairing.Pull):
            end = pairing.Failed if rng.random() < c.broken else pairing.Transferred
            self._at(now + c.transfer, name, end(action.session))
        elif isinstance(action, pairing.Apply):
            self._at(now + APPLY_SECONDS, name, pairing.Applied(action.session))
        elif isinstance(action, pairing.Solo):
            self._ended(name, "solo")
        elif isinstance(action, pairing.Ended):
            self.result.tries[action.outcome] += 1
            if action.outcome in ("applied", "pulled"):
                self._ended(name, action.outcome)

    def _copied(self, name: str, session: bytes, now: float) -> None:
        """Offer it to the partner."""
        state = self.nodes[name].state
        if state.session != session or state.phase is not Phase.PAIRED:
            return
        c, rng = self.conditions, self.rng
        if rng.random() >= c.loss:
            self._at(now + rng.uniform(*c.delay), state.peer, _Ready(name, session))
        self._offer(name, session, name, now)

    def _ready(self, name: str, peer: str, session: bytes, now: float) -> None:
        """A READY that overtakes the ACCEPT that names its session is held until that is here."""
        state = self.nodes[name].state
        early = state.phase is Phase.PROPOSED and state.peer == peer
        if early or (state.session == session and state.peer == peer):
            self._offer(name, session, peer, now)

    def _offer(self, name: str, session: bytes, whose: str, now: float) -> None:
        offered = self._offered.setdefault((name, session), set())
        offered.add(whose)
        if len(offered) < 2:
            return
        c, rng = self.conditions, self.rng
        self._at(now, name, pairing.CopiesOffered(session))
        if rng.random() < c.broken:
            self._at(now + c.transfer / 2, name, pairing.Failed(session))
        else:
            self._at(now + c.transfer * rng.uniform(0.8, 1.2), name, pairing.Transferred(session))

    def _ended(self, name: str, outcome: str) -> None:
        # a node that was another's partner before its own step came due has taken that step early
        if name not in self._steps:
            self._steps[name] = outcome
            self.result.outcomes[outcome] += 1
        elif self._steps[name] != "applied" and outcome == "applied":
            self.result.tries["again"] += 1

    def _check_end(self) -> None:
        for name, node in self.nodes.items():
            assert node.state.phase is Phase.IDLE, f"{name} is left {node.state.phase}"
            assert node.state.due is None, f"{name} is left with an outer step to take"
            assert name in self._steps, f"{name} has taken no outer step"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.pairing_sim", description=__doc__
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 32, 128, 1000])
    parser.add_argument("--missing", type=float, nargs="+", default=[0.0, 0.01, 0.05, 0.2])
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument(
        "--least-nodes", type=int, default=2000, help="repeat until so many nodes have stepped"
    )
    args = parser.parse_args()
    print(
        "| nodes | view entries missing | averaged with a partner | one-sided | alone | messages"
        " per node |"
    )
    print(
        "|------:|---------------------:|------------------------:|----------:|------:|------------------:|"
    )
    for nodes in args.nodes:
        for missing in args.missing:
            total, messages = Counter(), 0
            for seed in range(max(1, args.least_nodes // nodes)):
                result = Simulation(
                    nodes, seed, Conditions(missing=missing, loss=args.loss, tries=args.tries)
                ).run()
                total += result.outcomes
                messages += result.messages
            n = sum(total.values())
            shares = " | ".join(f"{total[o] / n:.3f}" for o in ("applied", "pulled", "solo"))
            print(f"| {nodes} | {missing:.2f} | {shares} | {messages / n:.1f} |", flush=True)


if __name__ == "__main__":
    main()

"""The schedule that a seed draws: number of nodes, their places and speeds, faults, and the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmnode.p2p.addresses import Address
from tests.support.sim import hostile
from tests.support.sim.learner import Pace
from tests.support.sim.node import Traits

KINDS = ("kill", "power", "trainer", "still", "cut", "one_way", "slow")


@dataclass(frozen=True)
class Place:
    """A node and its place. delay, jitter: seconds, for each of its wires. rate: bytes per
    second."""

    name: str
    address: Address
    traits: Traits
    delay: float
    jitter: float
    rate: float
    joins_at: float


@dataclass(frozen=True)
class Foe:
    """A hostile node and its attack (hostile.py)."""

    name: str
    kind: str
    address: Address
    delay: float
    jitter: float
    rate: float


@dataclass(frozen=True)
class Fault:
    kind: str
    at: float
    nodes: tuple[str, ...]
    seconds: float
    old_disk: bool = False


@dataclass
class Schedule:
    seed: int
    places: list[Place]
    bootstrap: list[str]
    foes: list[Foe] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    calm_from: float = 0.0
    """Time after which all faults are over."""


def draw(seed: int, nodes: int | None = None, kinds: Sequence[str] = ()) -> Schedule:
    """Draw the schedule of this seed.

    Args:
        nodes: Number of nodes, instead of a drawn one.
        kinds: One hostile node of each kind, instead of drawn ones.
    """
    rng = random.Random(f"schedule {seed}")
    drawn = round(3 * (40 / 3) ** (rng.random() ** 2))
    count = nodes or drawn
    step = rng.uniform(8.0, 30.0) * min(4.0, max(1.0, count / 12))
    places = [_place(rng, i, step) for i in range(count)]
    bootstrap = [place.name for place in places[: rng.randint(1, min(3, count))]]
    faults = _faults(rng, [place.name for place in places])
    calm = (
        max(
            [
                90.0,
                *(place.joins_at for place in places),
                *(fault.at + fault.seconds for fault in faults),
            ]
        )
        + 5.0
    )
    return Schedule(seed, places, bootstrap, _foes(rng, count, kinds), faults, calm)


def _foes(rng: random.Random, count: int, kinds: Sequence[str]) -> list[Foe]:
    """Draw no hostile nodes in four of ten seeds; otherwise up to 40 % of the nodes, of one or
    several kinds, some of them neighbours."""
    if not kinds and rng.random() < 0.4:
        return []
    some = kinds or rng.sample(hostile.KINDS, rng.randint(1, 4))
    share, sybils = rng.uniform(0.0, 0.4), rng.random() < 0.3
    foes = []
    for i in range(len(kinds) or max(1, int(count * share / (1 - share)))):
        address = Address("ip4", f"45.99.9.{i}" if sybils else f"45.99.{10 + i}.7", 9000)
        kind = kinds[i] if kinds else rng.choice(some)
        foes.append(Foe(f"h{i}", kind, address, rng.uniform(0.001, 0.1), 0.01, 1e6))
    return foes


def _place(rng: random.Random, number: int, step: float) -> Place:
    far = rng.random() < 0.2
    long = rng.choice((0.0, 0.0, 0.02))
    pace = Pace(
        step * rng.uniform(0.7, 1.5),
        own_groups=rng.randint(1, 3),
        external_groups=rng.randint(2, 6),
        long=long,
    )
    upload = rng.choice((0, 0, 0, 20_000, 60_000))
    traits = Traits(pace, upload=upload, skew=rng.choice((0.0, 0.0, 0.0, rng.uniform(-60, 60))))
    return Place(
        f"n{number}",
        Address("ip4", f"45.{1 + number // 200}.{number % 200}.7", 9000 + number),
        traits,
        delay=rng.uniform(0.03, 0.15) if far else rng.uniform(0.001, 0.03),
        jitter=rng.uniform(0.0, 0.05),
        rate=rng.choice((50e3, 500e3, 5e6)),
        joins_at=0.0 if number < 3 else rng.choice((0.0, rng.uniform(0.0, 90.0))),
    )


def _faults(rng: random.Random, names: list[str]) -> list[Fault]:
    faults, now = [], rng.uniform(30.0, 90.0)
    for _ in range(rng.randint(0, 6)):
        kind = rng.choice(KINDS)
        most = max(1, len(names) // 2) if kind in ("cut", "one_way") else 2
        some = rng.sample(names, rng.randint(1, most))
        faults.append(
            Fault(
                kind,
                now,
                tuple(some),
                rng.choice((2.0, 15.0, 45.0, 100.0)),
                old_disk=rng.random() < 0.3,
            )
        )
        now += rng.uniform(1.0, 60.0)
    return faults

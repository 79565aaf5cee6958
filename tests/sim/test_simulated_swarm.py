"""Whole swarms in the simulator: fixed seeds, one fresh seed, and the same seed twice."""

import random

import pytest

from tests.support.sim.schedule import draw
from tests.support.sim.world import simulate

FRESH = random.SystemRandom().randrange(2**31)


def replay(seed: int, nodes: int, kinds: tuple[str, ...] = ()) -> str:
    return (
        f"replay: python -m tests.support.sim --seed {seed} --nodes {nodes} --foes"
        f" {' '.join(kinds)}"
    )


@pytest.mark.parametrize(
    ("seed", "nodes", "kinds"),
    [
        (2, 3, ("lister", "dripper")),
        (5, 4, ("garbage", "peers")),
        (9, 4, ("poet", "vanisher", "forger", "dripper")),
        (3, 3, ("cherry", "stolen", "storm")),
    ],
)
def test_swarm_recovers_from_its_faults(seed, nodes, kinds):
    """With one hostile node of each kind given. The cases together cover every kind."""
    ended = simulate(draw(seed, nodes, kinds))
    assert ended.problem == "", replay(seed, nodes, kinds)
    assert ended.used > nodes
    assert ended.averaged >= nodes


def test_fresh_seed_recovers_from_its_faults():
    ended = simulate(draw(FRESH, 4))
    assert ended.problem == "", replay(FRESH, 4)


def test_other_seed_gives_another_history():
    assert simulate(draw(2, 3)).digest != simulate(draw(3, 3)).digest

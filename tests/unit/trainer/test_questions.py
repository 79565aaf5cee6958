"""The series of questions."""

from swarmnode.tasks.seeds import choose_task, task_seed
from swarmnode.trainer.sampler import next_question
from swarmnode.trainer.state import Counters

NAMES = ["rg/gcd", "rg/lcm"]
SWARM, PEER = bytes(range(32)), "12D3KooWPeer"


def test_everything_follows_from_the_number():
    counters = Counters(peer=PEER, swarm=SWARM.hex())
    asked = [next_question(NAMES, counters) for _ in range(40)]
    assert [sequence for sequence, _ in asked] == list(range(40))
    for sequence, ref in asked:
        assert ref.id == choose_task(NAMES, SWARM, PEER, sequence)
        assert (ref.seed, ref.index) == task_seed(SWARM, PEER, sequence, ref.id)

"""Gossip between two hosts that have two connections, of which one ends."""

import pytest
import trio

from swarmnode.p2p.addresses import parse
from swarmnode.p2p.gossip import Validation
from tests.support.hosts import hosts
from tests.support.waiting import until

NAME = "/test/topic/1"


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("speaker", [0, 1])
async def test_gossip_moves_to_the_connection_that_is_left(tmp_path, which, speaker):
    """The speaker alone publishes; the other has nothing to write, and so nothing to notice by."""
    async with hosts(tmp_path, 2, relay="off") as pair:
        a, b = pair
        topics = [
            await each.gossip.join(NAME, lambda data, peer: Validation.ACCEPT) for each in pair
        ]
        await until(lambda: all(each.gossip.statistics().mesh[NAME] == 1 for each in pair))
        await a.host.dial(b.peer_id, parse(b.listen_addrs[0])[0])
        await until(lambda: len(a.connections) == len(b.connections) == 2)
        await list(a.connections)[which].close()
        await until(lambda: len(a.connections) == len(b.connections) == 1)
        await trio.sleep(0.5)  # both have seen the end; a heartbeat may have passed
        await until(lambda: pair[speaker].gossip.statistics().mesh[NAME] == 1)
        await pair[speaker].gossip.publish(NAME, b"still here")
        with trio.fail_after(30):
            assert (await topics[1 - speaker].get()).data == b"still here"

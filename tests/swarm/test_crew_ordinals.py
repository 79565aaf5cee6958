"""A node of this version and one of a later one, which speaks another ordinal of crews too: they
agree on the older one."""

import pytest
import trio

from swarmnode.crew import messages
from swarmnode.errors import Incompatible, PeerError
from swarmnode.p2p import identity
from swarmnode.wire import ids
from tests.support.crew_node import MODEL, crew_node
from tests.support.hosts import hosts
from tests.support.waiting import still, until

pytestmark = [pytest.mark.swarm, pytest.mark.slow]


def next_of(protocol):
    name, _, ordinal = protocol.rpartition("/")
    return f"{name}/{int(ordinal) + 1}"


NEXT_CREWS, NEXT_STREAM = next_of(ids.CREWS_PROTOCOL), next_of(ids.STAGE_STREAM_PROTOCOL)
OFFER = messages.Offer(MODEL, 1.3e9, 1e9, 0.001)


class Newer:
    """A node of the next version: it offers itself by the ordinal that the other one speaks, and
    serves `ordinals`."""

    def __init__(self, network, peer):
        self.network, self.peer = network, peer
        self.heard = {}

    def serve(self, *ordinals):
        for ordinal in ordinals:
            self.heard[ordinal] = []
            self.network.requests.serve(
                ordinal, self._answer(ordinal), max_request_bytes=65536, max_response_bytes=65536
            )

    def _answer(self, ordinal):
        async def answer(peer, data):
            self.heard[ordinal].append(messages.decode_request(data))
            return messages.encode_message(messages.Noted())

        return answer

    async def offer(self):
        """(ordinal, answer), the newest first."""
        for ordinal in (NEXT_CREWS, ids.CREWS_PROTOCOL):
            try:
                data = messages.encode_message(OFFER)
                said = await self.network.requests.request(
                    self.peer, ordinal, data, deadline=10.0, max_response_bytes=65536
                )
                return ordinal, messages.decode_answer(said)
            except Incompatible:
                continue
        raise AssertionError("nothing in common")


async def test_two_versions_speak_of_crews_by_the_older_ordinal(tmp_path):
    async with hosts(tmp_path, 2) as (present, network):
        newer = Newer(network, present.peer_id)
        # it has dropped the older one: nothing in common, and nobody's fault
        newer.serve(NEXT_CREWS)
        key = identity.load_or_create(tmp_path / "0" / "identity.key").private_key
        async with crew_node(present, key, tmp_path / "0") as node:
            await until(lambda: node.service.statistics().unanswered.get("offer", 0) > 0)
            # it is not asked again and again
            await still(lambda: node.service.statistics().unanswered["offer"], seconds=5.0)
            assert newer.heard[NEXT_CREWS] == []
            newer.serve(ids.CREWS_PROTOCOL)  # as the specification has it
            assert await newer.offer() == (ids.CREWS_PROTOCOL, messages.Noted())
            # it speaks of crews after all, and is offered to
            await until(lambda: newer.heard[ids.CREWS_PROTOCOL])
            assert all(
                isinstance(message, messages.Offer) for message in newer.heard[ids.CREWS_PROTOCOL]
            )
            assert newer.heard[NEXT_CREWS] == []
            with pytest.raises(PeerError):
                await network.streams.open(present.peer_id, NEXT_STREAM, deadline=10.0)
            # on the same connection
            assert await newer.offer() == (ids.CREWS_PROTOCOL, messages.Noted())
            assert node.service.statistics().malformed == 0
        assert present.reputation.statistics(trio.current_time()).rejected == {}

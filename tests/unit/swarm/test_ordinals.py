"""Version N and version N − 1 side by side (protocol 00, section 7)."""

import msgspec
import pytest
import trio

from swarmnode.errors import Incompatible, PeerError
from swarmnode.swarm import requirements
from swarmnode.wire import ids, strict
from swarmnode.wire.messages import ManifestRequest
from tests.support.hosts import hosts
from tests.support.manifests import CONFIG, founded

OLDER, NEWER = "/test/question/1", "/test/question/2"
SWARM = bytes(32)


class NewerRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request with one field more than `ManifestRequest`."""

    swarm: bytes
    known: bytes


def serve(server, protocol, request):
    async def answer(peer, data):
        await trio.lowlevel.checkpoint()
        return type(strict.decode(data, request, 1024)).__name__.encode()

    server.requests.serve(protocol, answer, max_request_bytes=1024, max_response_bytes=1024)


async def ask(client, server, request, *protocols):
    """Send a request with the first of `protocols` that the server supports."""
    for protocol in protocols:
        try:
            return await client.requests.request(
                server.peer_id,
                protocol,
                strict.encode(request),
                deadline=5.0,
                max_response_bytes=1024,
            )
        except Incompatible:
            continue
    return None


async def test_node_serves_two_ordinals_and_names_a_third(tmp_path):
    older, newer = ManifestRequest(SWARM), NewerRequest(SWARM, b"")
    async with hosts(tmp_path, 2) as (server, client):
        serve(server, OLDER, ManifestRequest)
        assert await ask(client, server, newer, NEWER) is None
        assert await ask(client, server, older, NEWER, OLDER) == b"ManifestRequest"
        serve(server, NEWER, NewerRequest)  # upgraded: it serves both, on the same connection
        assert await ask(client, server, newer, NEWER, OLDER) == b"NewerRequest"
        assert await ask(client, server, older, OLDER) == b"ManifestRequest"
        with pytest.raises(PeerError):
            await ask(client, server, newer, OLDER)  # a field that the older one does not know
        assert client.peers.statistics().dials == 1
        assert server.reputation.rejections(client.peer_id) == 0

    # A node that does not speak one of a swarm's protocols reports it in one line.
    third = "/swarmnode/listing/99"
    protocols = sorted({third, *founded().manifest.protocols} - {ids.LISTING_PROTOCOL})
    (problem,) = requirements.can_honour(founded(protocols=protocols).manifest, CONFIG)
    assert problem == (
        f"it requires the protocol {third}, which this version does not support:"
        " upgrade, or ask the founder for a successor"
    )

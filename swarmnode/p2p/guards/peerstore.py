"""Guards around libp2p/identity and libp2p/peer: what peers say about themselves is short, and
never displaces our own keys."""

# mypy: disable-error-code="method-assign,assignment,attr-defined,arg-type,type-arg,override"

import itertools

from libp2p.abc import IHost, INetStream
from libp2p.host import basic_host
from libp2p.identity.identify_push import identify_push
from libp2p.utils.varint import read_length_prefixed_protobuf

from swarmnode.p2p.guards.counting import contained, fired

IDENTIFY_BYTES = 8 * 1024
"""Longest identify message, go-libp2p's limit too; ours are below 1 KiB."""


def install() -> None:
    """Refuse long identify messages.

    Defect: identify and identify/push read up to 1 MiB, and identity/update.py
    `_safe_parse_multiaddr_cached` keeps the last 1000 raw addresses of any length in a process-wide
    `lru_cache`: 1000 pushes of one 1 MiB "address" are 1 GiB for ever. Here: `IDENTIFY_BYTES`.
    Cost: none. Not needed any more when upstream reads identify with a limit like go-libp2p's.
    """

    async def bounded(stream: INetStream, use_varint_format: bool = True) -> bytes:
        data = b""
        with contained("identify_refused") as refusal:
            data = await read_length_prefixed_protobuf(stream, use_varint_format, IDENTIFY_BYTES)
        refusal.raise_again()
        return data

    basic_host.read_length_prefixed_protobuf = bounded
    identify_push.read_length_prefixed_protobuf = bounded


def guard_peerstore(host: IHost) -> None:
    """Keep our own entry and those of connected peers when the peer store is full.

    Defect: our keys live in the peer store beside everybody else's, in an entry without addresses,
    and peer/peerstore.py `_enforce_peer_limit` evicts entries without addresses first: once 1001
    peers have told their address, `host.get_public_key` raises, and no connection can be
    identified any more. It also sorts the whole store for each newcomer. Here: the oldest entry
    that is neither ours nor a connected peer's goes. Cost: a scan past those. Not needed any more
    when a full stock store still has the host's keys.
    """
    store, network, own = host.get_peerstore(), host.get_network(), host.get_id()

    def _enforce_peer_limit() -> None:
        excess = len(store.peer_data_map) - store.max_peers
        strangers = (
            peer
            for peer in store.peer_data_map
            if peer != own and not network.get_connections(peer)
        )
        for peer in list(itertools.islice(strangers, max(0, excess))):
            fired("peer_forgotten", peer)
            store.peer_record_map.pop(peer, None)
            del store.peer_data_map[peer]

    store._enforce_peer_limit = _enforce_peer_limit

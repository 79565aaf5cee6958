"""Guards for libp2p/identity and libp2p/peer: messages about a peer itself are short, and never
displace the own keys."""

# mypy: disable-error-code="method-assign,assignment,attr-defined,arg-type,type-arg,override"

import itertools

from libp2p.abc import IHost, INetStream
from libp2p.host import basic_host
from libp2p.identity.identify_push import identify_push
from libp2p.utils.varint import read_length_prefixed_protobuf

from swarmnode.p2p.guards.counting import contain_errors, count_firing

IDENTIFY_BYTES = 8 * 1024
"""Limit for an identify message, as in go-libp2p. Messages of this node are below 1 KiB."""


def install() -> None:
    """Refuse long identify messages.

    Defect: identify and identify/push read up to 1 MiB, and identity/update.py
    `_safe_parse_multiaddr_cached` keeps the last 1000 raw addresses of any length in a process-wide
    `lru_cache`. 1000 pushes of one 1 MiB "address" therefore occupy 1 GiB until restart.

    Guard: the limit `IDENTIFY_BYTES`. Cost: none. Unnecessary once upstream limits identify as
    go-libp2p does.
    """

    async def bounded(stream: INetStream, use_varint_format: bool = True) -> bytes:
        data = b""
        with contain_errors("identify_refused") as refusal:
            data = await read_length_prefixed_protobuf(stream, use_varint_format, IDENTIFY_BYTES)
        refusal.reraise()
        return data

    basic_host.read_length_prefixed_protobuf = bounded
    identify_push.read_length_prefixed_protobuf = bounded


def guard_peerstore(host: IHost) -> None:
    """Keep the own entry and those of connected peers when the peer store is full.

    Defect: the own keys are stored in the peer store in an entry without addresses, and
    peer/peerstore.py `_enforce_peer_limit` evicts entries without addresses first. Once 1001 peers
    have sent their addresses, `host.get_public_key` raises, and no connection can be identified any
    more. It also sorts the whole store for each new peer.

    Guard: evict the oldest entry that belongs neither to this node nor to a connected peer.

    Cost: a scan past those entries. Unnecessary once a full stock store keeps the host's keys.
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
            count_firing("peer_forgotten", peer)
            store.peer_record_map.pop(peer, None)
            del store.peer_data_map[peer]

    store._enforce_peer_limit = _enforce_peer_limit

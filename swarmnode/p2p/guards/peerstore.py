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

    Defect: identify and identify/push read up to 1 MiB, and the last 1000 raw addresses are cached
        at any length: 1000 pushes of one 1 MiB "address" hold 1 GiB until the process ends.
    Upstream: identity/update.py `_safe_parse_multiaddr_cached`
    Guard: `IDENTIFY_BYTES` (8 KiB).
    Cost: None.
    Remove when: Upstream reads identify with a limit, as go-libp2p does.
    Tests: test_guards_connections.py
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
    """Keep this host's keys, and those of connected peers, when the peer store is full.

    Defect: The host's own keys are an entry without addresses, and such entries are evicted first.
        Once 1001 peers have sent an address, `host.get_public_key` raises and no connection can be
        identified any more. Each newcomer also sorts the whole store.
    Upstream: peer/peerstore.py `_enforce_peer_limit`
    Guard: The oldest entry goes that is neither this host's nor a connected peer's.
    Cost: A scan past those entries.
    Remove when: A full stock store keeps the host's keys.
    Tests: test_guards_pieces.py
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

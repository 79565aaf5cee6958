"""Protocols of a TCP connection: Noise, then Yamux, and no others."""

from libp2p.abc import IRawConnection, ISecureConn
from libp2p.crypto.keys import KeyPair, PrivateKey
from libp2p.crypto.x25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.trio import TrioTCPStream
from libp2p.peer.id import ID
from libp2p.security.noise.patterns import PatternXX
from libp2p.security.noise.transport import PROTOCOL_ID, Transport
from libp2p.stream_muxer.yamux.yamux import Yamux
from noise.connection import NoiseConnection

from swarmnode.p2p.guards import packets
from swarmnode.wire import ids

YAMUX_ONLY = {TProtocol("/yamux/1.0.0"): Yamux}
"""Argument for `new_host(muxer_opt=…)`."""


def install() -> None:
    """Record the address of a peer that connects by IPv6.

    Defect: The address of an IPv6 socket has four items, and only pairs are read. So limits and
        bans by prefix do not apply, and all IPv6 peers together count as one address.
    Upstream: io/trio.py `get_remote_address`
    Guard: The first two items are used.
    Cost: None.
    Remove when: A stock stream over `::1` has its peer's address.
    Tests: test_host.py
    """
    TrioTCPStream.get_remote_address = _remote_address  # type: ignore[method-assign]


def _remote_address(self: TrioTCPStream) -> tuple[str, int] | None:
    """Return (IP, port); after the socket was closed, the address of an earlier call."""
    if self._cached_remote_address is None:
        try:
            host, port = self.stream.socket.getpeername()[:2]
        except (AttributeError, OSError, ValueError):
            # no socket, or a closed one; the address of a Unix socket is one string
            return None
        self._cached_remote_address = (str(host), int(port))
    return self._cached_remote_address


def noise_only(key_pair: KeyPair, secret: bytes | None = None) -> dict[TProtocol, Transport]:
    """Return the security protocols for `new_host(sec_opt=…)`: Noise only.

    Defect: A stock host also accepts plaintext and secio, which are unauthenticated, and mplex, in
        which a stream name that is not UTF-8 ends the process.
    Upstream: __init__.py `new_host`; stream_muxer/mplex/mplex.py `_handle_new_stream`
    Guard: Neither is offered: this function and `YAMUX_ONLY`. Garbage, HTTP and half handshakes on
        the port are closed after 10 s at the latest, as upstream does.
    Cost: None.
    Remove when: The defaults have neither plaintext, secio nor mplex.
    Tests: test_guards_killers.py, test_guards_connections.py

    Args:
        key_pair: The node's identity. Noise uses a fresh X25519 key beside it.
        secret: 32 bytes of a private swarm. Another protocol is offered then, and its handshake
            fails at the first message of a peer without the secret.
    """
    if secret is None:
        return {PROTOCOL_ID: _Transport(key_pair, create_new_key_pair().private_key)}
    return {
        TProtocol(ids.PRIVATE_SECURITY): _PrivateTransport(
            key_pair, create_new_key_pair().private_key, secret
        )
    }


class _Transport(Transport):
    """Noise with bulk reads and writes; see `packets`."""

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        return packets.with_bulk_io(await super().secure_inbound(conn))  # type: ignore[arg-type]

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        return packets.with_bulk_io(await super().secure_outbound(conn, peer_id))  # type: ignore[arg-type]


class _PrivateTransport(_Transport):
    """libp2p's Noise handshake with the modifier psk0: the secret enters the keys before the first
    message."""

    def __init__(self, key_pair: KeyPair, noise_key: PrivateKey, secret: bytes) -> None:
        super().__init__(key_pair, noise_key)
        self._secret = secret

    def get_pattern(self) -> PatternXX:
        return _PatternXXpsk0(
            self.local_peer, self.libp2p_privkey, self.noise_privkey, self._secret
        )


class _PatternXXpsk0(PatternXX):
    def __init__(
        self, local_peer: ID, identity: PrivateKey, noise_key: PrivateKey, secret: bytes
    ) -> None:
        super().__init__(local_peer, identity, noise_key)
        self.protocol_name = b"Noise_XXpsk0_25519_ChaChaPoly_SHA256"
        self._secret = secret

    def create_noise_state(self, prologue: bytes | None = None) -> NoiseConnection:
        state = super().create_noise_state(prologue)
        state.set_psks(self._secret)
        return state

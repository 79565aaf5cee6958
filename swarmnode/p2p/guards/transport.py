"""Restricts a TCP connection to Noise and Yamux, and fixes remote IPv6 addresses.

Defect: a stock host also accepts `/plaintext/2.0.0` and secio (`new_host(sec_opt=None)`), and
mplex. A mplex `NewStream` with a name that is not UTF-8 ends the process
(stream_muxer/mplex/mplex.py `_handle_new_stream`, C1). Guard: neither is offered. Cost: none.
Unnecessary once upstream drops plaintext, secio and mplex from its defaults.

Defect: a stock host has no address of a peer that connects by IPv6, because
`TrioTCPStream.get_remote_address` expects pairs and IPv6 sockets return four values. Limits and
bans by prefix then do not apply, and all IPv6 peers together count as one address. Guard: use the
first two values. Cost: none. Unnecessary once a stock stream over `::1` returns the address of its
peer.
"""

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
    """Replace `TrioTCPStream.get_remote_address` for this process."""
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
    """Return the argument for `new_host(sec_opt=…)`: Noise with the node's identity and a fresh
    X25519 key.

    Args:
        key_pair: identity of the node.
        secret: 32 bytes of a private swarm. Selects another protocol, whose first handshake message
            fails for a peer without the secret.
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

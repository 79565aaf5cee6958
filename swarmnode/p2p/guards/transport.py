"""What a node offers and accepts on a TCP connection: Noise, then Yamux, nothing else.

Defects: a stock host also accepts `/plaintext/2.0.0` and secio (`new_host(sec_opt=None)`), and mplex, whose `NewStream` with a name that
is not UTF-8 ends the process (stream_muxer/mplex/mplex.py `_handle_new_stream`, C1). Here: neither is offered. Cost: none.
Not needed any more when upstream drops plaintext, secio and mplex from its defaults.
"""

from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.security.noise.transport import PROTOCOL_ID, Transport
from libp2p.stream_muxer.yamux.yamux import Yamux

YAMUX_ONLY = {TProtocol("/yamux/1.0.0"): Yamux}
"""For `new_host(muxer_opt=…)`."""


def noise_only(key_pair: KeyPair) -> dict[TProtocol, Transport]:
    """For `new_host(sec_opt=…)`: Noise with the node's `key_pair` as identity and a fresh X25519 key."""
    return {PROTOCOL_ID: Transport(key_pair, create_new_key_pair().private_key)}

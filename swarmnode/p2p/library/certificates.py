"""libp2p's TLS certificates, which prove a peer id on a connection that is none of libp2p's."""

from __future__ import annotations

from cryptography import x509
from libp2p.crypto.keys import KeyPair
from libp2p.peer.id import ID
from libp2p.security.tls.certificate import verify_certificate_chain
from libp2p.security.tls.transport import TLSTransport

from swarmnode.p2p.library.errors import peer_errors


class Contexts:
    """Both sides' `ssl.SSLContext`s of one node, with one certificate. Made once, in a thread: it
    writes a temporary file to load from."""

    def __init__(self, key_pair: KeyPair) -> None:
        transport = TLSTransport(key_pair)
        self.server = transport.create_ssl_context(server_side=True)
        self.server.num_tickets = 0  # a resumed session would show no certificate
        self.client = transport.create_ssl_context(server_side=False)


def peer_of_certificate(der: bytes) -> str:
    """The peer id that a certificate proves. Raises PeerError."""
    # two parsers of a stranger's bytes, which raise whatever they come across
    with peer_errors("not a libp2p certificate"):
        return ID.from_pubkey(
            verify_certificate_chain([x509.load_der_x509_certificate(der)])
        ).to_base58()

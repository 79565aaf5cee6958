"""Wrapper of py-libp2p. Only this package and `guards` use its objects; elsewhere in `p2p` a peer
is a string, an address is an `Address`, and every error of the library is a PeerError.

    hosts.py        Host: streams, dials, connection events
    streams.py      Stream: reads and writes; a stream through a relay as a connection
    gater.py        admission at the end of a handshake
    identifiers.py  conversion of peer ids and addresses
    errors.py       translation of errors
    build.py        construction of a host with explicit options

`guards` fixes defects of the library; this package only calls it.
"""

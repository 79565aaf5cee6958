"""The one place, with `guards`, that knows py-libp2p's objects: elsewhere in `p2p` peers are text,
addresses are `Address`, and whatever the library raises is a PeerError.

    hosts.py        Host: streams, dials, connections as they come and go
    streams.py      Stream: reads and writes of one stream
    circuits.py     a stream through a relay as a connection of its own
    gater.py        who may connect, asked at the end of a handshake
    identifiers.py  peer ids and addresses in the library's bytes
    errors.py       the translation of errors
    objects.py      what the library's objects can do, as far as we use it
    build.py        a host, every choice of the library's made explicit

Every guard in `guards` closes a defect of the library; nothing here does more than to call it.
"""

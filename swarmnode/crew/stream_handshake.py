"""How a stage stream begins: what is said first, and who may say it. No torch.

Each first message is `u32be length ‖ canonical msgpack`; what follows it on the stream is the
trainers'.
"""

from __future__ import annotations

import dataclasses
from typing import Final, TypeVar

import msgspec
import trio

from swarmnode.crew.local import Kind, Open
from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.api import PeerStream
from swarmnode.wire import headed, strict

OPEN_BYTES: Final = 512
"""Open, StreamOpen, StreamReady: encoded, at most."""
REFUSALS: Final = ("malformed", "timeout", "crew", "stage", "peer")
"""Why an incoming stream is reset."""

M = TypeVar("M", bound=msgspec.Struct)


class StreamOpen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dialler → acceptor, the first message of a stream: u32be length ‖ canonical msgpack."""

    crew: bytes
    from_stage: int
    to_stage: int
    kind: Kind


class StreamReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Acceptor → dialler: the trainer is there. What follows, both ways, is theirs."""

    crew: bytes


@dataclasses.dataclass(frozen=True)
class StreamPeers:
    """A crew as far as streams are concerned, seen from one of its stages."""

    crew: bytes
    stage: int
    """Ours."""
    members: tuple[str, ...]
    """Peer id by stage."""


def refusal(peers: StreamPeers | None, peer: str, opened: StreamOpen) -> str:
    """Why a stream that `peer` opened is not taken, of REFUSALS; empty for one that is welcome."""
    if peers is None or opened.crew != peers.crew:
        return "crew"
    if opened.to_stage != peers.stage or not 0 <= opened.from_stage < peers.stage:
        return "stage"
    return "" if peers.members[opened.from_stage] == peer else "peer"


async def read_first(stream: PeerStream, kind: type[M]) -> M:
    """The first message on a stream; what follows it stays there. Raises BadMessage, PeerError."""
    data = b""
    while (end := _end(data)) is None or len(data) < end:
        more = await stream.receive()
        if not more:
            raise PeerError("the stream ended before its first message")
        data += more
    stream.unread(data[end:])
    message: M = strict.decode(data[4:end], kind)
    return message


async def read_open(unix: trio.SocketStream) -> Open | None:
    """None when the trainer said nothing. Raises BadMessage, and what the socket raises."""
    opened: Open | None = await headed.read_header(
        unix, lambda data: strict.decode(data, Open), OPEN_BYTES
    )
    return opened


def _end(data: bytes) -> int | None:
    """Where the message at the start of `data` ends; None where its length is not there yet. Raises
    BadMessage("oversize")."""
    if len(data) < 4:
        return None
    length = int.from_bytes(data[:4], "big")
    if not 0 < length <= OPEN_BYTES:
        raise BadMessage("oversize", f"a first message of {length} bytes")
    return 4 + length

"""A hostile partner for averaging: follows the protocol over a real network, with one deviation.

Tests and the demo's liar use it. It needs no model, configuration or torch: peers send their
fingerprint, and it forges its payload from that of the partner.
"""

from __future__ import annotations

import math
import random
import secrets
import struct
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import trio
from numpy.typing import NDArray

from swarmnode.errors import PeerError
from swarmnode.p2p.bulk import BulkSource, MemorySink
from swarmnode.p2p.network import Libp2pNetwork
from swarmnode.weights.layout import BLOCK, body_bytes
from swarmnode.weights.messages import (
    ID_BYTES,
    MESSAGE_BYTES,
    Accepted,
    Busy,
    Here,
    Message,
    Payload,
    Ready,
    Refused,
    Swap,
    decode_message,
)
from swarmnode.weights.payload import Header, build
from swarmnode.wire import ids, strict

PAYLOAD_ATTACKS: Final = (
    "nan",
    "infinite",
    "huge",
    "flipped",
    "shape",
    "dtype",
    "names",
    "truncated",
    "longer",
    "codec",
    "fragment",
    "garbage",
)
"""Attacks in the payload."""
PROTOCOL_ATTACKS: Final = (
    "silent",
    "too_large",
    "other_size",
    "other_root",
    "not_offered",
    "wrong_hash",
    "denies",
    "no_answer",
    "other_id",
)
"""Attacks in the messages before the payload."""
MAX_PAYLOAD_BYTES: Final = 2**28
PROPOSAL_INTERVAL_SECONDS: Final = 3.0
PAYLOAD_TIMEOUT_SECONDS: Final = 30.0
"""Timeout for the partner to encode its payload."""


def parse_payload(payload: bytes) -> tuple[Header, list[bytes]]:
    """Return the header and the bodies of an honest payload."""
    length = int.from_bytes(payload[:4], "big")
    header = msgspec.msgpack.decode(payload[4 : 4 + length], type=Header)
    bodies, start = [], 4 + length
    for tensor in header.tensors:
        length = body_bytes(tensor, header.codec)
        bodies.append(payload[start : start + length])
        start += length
    return header, bodies


def forge_payload(payload: bytes, kind: str) -> bytes:
    """Forge a payload from an honest one.

    Args:
        kind: One of `PAYLOAD_ATTACKS`.
    """
    header, bodies = parse_payload(payload)
    replace = msgspec.structs.replace
    tensors = list(header.tensors)
    if kind in ("nan", "infinite", "huge", "flipped"):
        bodies = [
            _alter_body(body, math.prod(tensor.shape), header.codec, kind)
            for tensor, body in zip(tensors, bodies, strict=True)
        ]
    elif kind == "shape":
        tensors[0] = replace(
            tensors[0],
            shape=(*tensors[0].shape[1:], tensors[0].shape[0])
            if len(set(tensors[0].shape)) > 1
            else (1,),
        )
    elif kind == "dtype":
        tensors[0] = replace(tensors[0], dtype="float64")
    elif kind == "names":
        tensors[0] = replace(tensors[0], name="x" + tensors[0].name)
    elif kind == "codec":
        header = replace(header, codec="bfloat16" if header.codec != "bfloat16" else "float32")
    elif kind == "fragment":
        header = replace(header, fragment=header.fragment + 1)
    forged = build(replace(header, tensors=tuple(tensors)), bodies)
    if kind == "truncated":
        return forged[:-100]
    if kind == "longer":
        return forged + bytes(100)
    return secrets.token_bytes(len(forged)) if kind == "garbage" else forged


def _alter_body(body: bytes, elements: int, codec: str, kind: str) -> bytes:
    """Alter the values of a body: its scales if the codec has some, otherwise all floats."""
    change: Callable[[NDArray[np.float32]], NDArray[np.float32]] = {
        "nan": lambda x: np.full_like(x, np.nan),
        "infinite": lambda x: np.full_like(x, np.inf),
        "huge": lambda x: (x + np.float32(1e-3)) * 1e6,
        "flipped": lambda x: -x,
    }[kind]
    cut = len(body)
    if codec == "int8":
        cut = 4 * -(-elements // BLOCK)
        if kind == "flipped":  # negate the values, because receivers reject negative scales
            return body[:cut] + (-np.frombuffer(body[cut:], "i1")).tobytes()
    if codec in ("int8", "float32"):
        floats = np.frombuffer(body[:cut], "<f4")
        return change(floats).astype("<f4").tobytes() + body[cut:]
    floats = (np.frombuffer(body[:cut], "<u2").astype("<u4") << 16).view("<f4")
    return (change(floats).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes() + body[cut:]


class WeightLiar:
    """A hostile partner.

    Args:
        kinds: Attacks of `PAYLOAD_ATTACKS` and `PROTOCOL_ATTACKS`, used in turn. If empty, the
            partner returns the payload that it received.
        step: Outer step that it claims; by default that of its partner.
    """

    def __init__(
        self, network: Libp2pNetwork, kinds: Sequence[str], *, step: int | None = None
    ) -> None:
        self._network = network
        self._kinds = list(kinds)
        self._attacks = 0
        self._step = step
        self._offers: dict[bytes, Ready | None] = {}
        """Id of the swap → its payload; None before it is ready, or if there will be none."""
        self._nursery: trio.Nursery | None = None
        self.fingerprint = b""
        self.blocks = b"\1"
        """Blocks of the last peer that `learn` has asked."""
        self.swaps: list[bytes] = []
        """Ids of the swaps that peers have proposed."""

    async def run(
        self,
        *,
        proposes: bool = False,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run until cancelled.

        Args:
            proposes: True to propose swaps to all peers periodically.
        """
        self._network.requests.serve(
            ids.WEIGHTS_PROTOCOL,
            self._serve,
            max_request_bytes=MESSAGE_BYTES,
            max_response_bytes=MESSAGE_BYTES,
            concurrent=64,
            per_peer=64,
        )
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            rng = random.Random(0)
            while True:
                await trio.sleep(
                    rng.uniform(0.5, 1.0) * PROPOSAL_INTERVAL_SECONDS if proposes else 3600.0
                )
                for peer in self._network.connected():
                    self._nursery.start_soon(self._approach, peer)

    async def learn(self, peer: str) -> None:
        """Request what `peer` averages, and claim the same.

        Raises:
            PeerError: The peer did not respond.
        """
        fingerprint = self.fingerprint or bytes(32)
        answer = await self.ask(peer, Here(fingerprint, self._step or 0, self.blocks))
        if isinstance(answer, Here):
            self.fingerprint, self.blocks = answer.fingerprint, answer.blocks
            step = self._claim(answer.outer_step)
            await self.ask(peer, Here(self.fingerprint, step, self.blocks))

    async def ask(self, peer: str, message: Message) -> Message:
        """Send a message and return the response.

        Raises:
            PeerError: The peer did not respond.
        """
        data = await self._network.requests.request(
            peer,
            ids.WEIGHTS_PROTOCOL,
            strict.encode(message),
            deadline=10.0,
            max_response_bytes=MESSAGE_BYTES,
        )
        return decode_message(data)

    async def propose(
        self, peer: str, fragment: int = 0, *, follow: bool = True, name: bytes = b""
    ) -> Message:
        """Propose a swap and return the response.

        Args:
            follow: True to continue with an attack if the peer accepts, False to vanish.
        """
        name = name or secrets.token_bytes(ID_BYTES)
        swap = Swap(name, self.fingerprint, fragment, self._step or 0, self.blocks)
        answer = await self.ask(peer, swap)
        if isinstance(answer, Accepted) and follow:
            self._offers[name] = None
            await self._attack(peer, name)
        return answer

    async def _approach(self, peer: str) -> None:
        try:
            if not self.fingerprint:
                await self.learn(peer)
            await self.propose(peer)
        except (PeerError, msgspec.MsgspecError):
            pass  # The peer refuses. The next round tries again.

    async def _serve(self, peer: str, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        message = decode_message(data)
        if isinstance(message, Here):
            self.fingerprint = self.fingerprint or message.fingerprint
            return strict.encode(
                Here(message.fingerprint, self._claim(message.outer_step), message.blocks)
            )
        if isinstance(message, Payload):
            if message.id not in self._offers:
                return strict.encode(Refused(message.id, "over"))
            return strict.encode(self._offers[message.id] or Busy(message.id))
        if isinstance(message, Swap) and self._nursery is not None:
            self.swaps.append(message.id)
            kind = self._kind(peek=True)
            if kind == "no_answer":
                await trio.sleep(5.0)
            name = bytes(ID_BYTES) if kind == "other_id" else message.id
            if kind != "denies":
                self._offers[message.id] = None
            self._nursery.start_soon(self._attack, peer, message.id)
            step = self._claim(message.outer_step)
            return strict.encode(Accepted(name, step, message.blocks))
        raise PeerError("unexpected message")

    def _claim(self, theirs: int) -> int:
        """Return the outer step to claim to a partner at step `theirs`."""
        return self._step if self._step is not None else theirs

    def _kind(self, *, peek: bool = False) -> str:
        if not self._kinds:
            return ""
        kind = self._kinds[self._attacks % len(self._kinds)]
        self._attacks += not peek
        return kind

    async def _attack(self, peer: str, name: bytes) -> None:
        kind = self._kind()
        if kind in ("silent", "denies", "no_answer", "other_id"):
            return
        try:
            honest = await self._fetch(peer, name)
        except PeerError:
            return  # the peer has ended the swap
        content = bytearray(forge_payload(honest, kind) if kind in PAYLOAD_ATTACKS else honest)
        source = BulkSource(content)
        if kind == "wrong_hash":
            struct.pack_into("<Q", content, len(content) // 2, 0x5555555555555555)
        transfer = secrets.token_bytes(32)
        if kind != "not_offered":
            self._network.bulk.offer(transfer, source)
        root = bytes(32) if kind == "other_root" else source.root
        size = {"too_large": 2**40, "other_size": source.size - 1}.get(kind, source.size)
        self._offers[name] = Ready(name, transfer, root, size, self._claim(0))

    async def _fetch(self, peer: str, name: bytes) -> bytes:
        """Fetch the partner's payload of a swap.

        Raises:
            PeerError: The partner has ended the swap, or has not encoded its payload in time.
        """
        bulk = self._network.bulk
        with trio.move_on_after(PAYLOAD_TIMEOUT_SECONDS):
            while True:
                answer = await self.ask(peer, Payload(name))
                if isinstance(answer, Ready):
                    manifest = await bulk.manifest(peer, answer.transfer)
                    sink = MemorySink(manifest, limit=MAX_PAYLOAD_BYTES)
                    await bulk.fetch(peer, answer.transfer, manifest, sink, deadline=30.0)
                    return bytes(sink.data)
                if not isinstance(answer, Busy):
                    raise PeerError("the swap has ended")
                await trio.sleep(0.1)
        raise PeerError("the payload is not ready")

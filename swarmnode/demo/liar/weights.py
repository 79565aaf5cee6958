"""A hostile partner: speaks the protocol of averaging over a real network, and lies in one way or
another. For tests and the demo's liar.

It needs neither model nor configuration: peers send their fingerprint, and the payload of the
partner in a swap is the pattern of the lie. No torch.
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
from swarmnode.weights.layout import BLOCK, SMALL_BLOCK
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
    encode_message,
)
from swarmnode.weights.payload import Header, build, checksum
from swarmnode.wire import ids

PAYLOADS: Final = (
    "nan",
    "infinite",
    "huge",
    "flipped",
    "shape",
    "dtype",
    "names",
    "checksum",
    "truncated",
    "longer",
    "codec",
    "fragment",
    "garbage",
)
"""Lies that are told in the payload."""
MANNERS: Final = (
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
"""Lies that are told before."""
LARGEST: Final = 2**28
PROPOSE_EVERY_SECONDS: Final = 3.0
PAYLOAD_SECONDS: Final = 30.0
"""For a partner to encode its payload."""


def opened(payload: bytes) -> tuple[Header, list[bytes]]:
    """Header and bodies of an honest payload."""
    length = int.from_bytes(payload[:4], "big")
    header = msgspec.msgpack.decode(payload[4 : 4 + length], type=Header)
    bodies, start = [], 4 + length
    for tensor in header.tensors:
        bodies.append(payload[start : start + tensor.length])
        start += tensor.length
    return header, bodies


def lie(payload: bytes, kind: str) -> bytes:
    """An honest payload made into a lie of PAYLOADS; checksums fit unless the lie is about them."""
    header, bodies = opened(payload)
    replace = msgspec.structs.replace
    tensors = list(header.tensors)
    if kind in ("nan", "infinite", "huge", "flipped"):
        bodies = [
            _altered(body, math.prod(tensor.shape), header.codec, kind)
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
    tensors = [
        replace(t, length=len(b), checksum=checksum(b))
        for t, b in zip(tensors, bodies, strict=True)
    ]
    if kind == "checksum":
        tensors[-1] = replace(tensors[-1], checksum=bytes(16))
    made = build(replace(header, tensors=tensors), bodies)
    if kind == "truncated":
        return made[:-100]
    if kind == "longer":
        return made + bytes(100)
    return secrets.token_bytes(len(made)) if kind == "garbage" else made


def _altered(body: bytes, elements: int, codec: str, kind: str) -> bytes:
    """Values of a body changed: its scales where it has some, else all its floats."""
    change: Callable[[NDArray[np.float32]], NDArray[np.float32]] = {
        "nan": lambda x: np.full_like(x, np.nan),
        "infinite": lambda x: np.full_like(x, np.inf),
        "huge": lambda x: (x + np.float32(1e-3)) * 1e6,
        "flipped": lambda x: -x,
    }[kind]
    cut = len(body)
    if codec in ("int4", "int8"):
        width, block = (2, SMALL_BLOCK) if codec == "int4" else (4, BLOCK)
        cut = width * -(-elements // block)
        if kind == "flipped":  # a negative scale would be found out at once
            values = np.frombuffer(body[cut:], "u1")
            if codec == "int4":
                flipped = 16 - (values & 15) | (16 - (values >> 4)) << 4
            else:
                flipped = 256 - values.astype("<u2")
            return body[:cut] + flipped.astype("u1").tobytes()
    if codec in ("int8", "float32"):
        floats = np.frombuffer(body[:cut], "<f4")
        return change(floats).astype("<f4").tobytes() + body[cut:]
    floats = (np.frombuffer(body[:cut], "<u2").astype("<u4") << 16).view("<f4")
    return (change(floats).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes() + body[cut:]


class WeightLiar:
    """kinds: the lies it tells, in turn, of PAYLOADS and MANNERS; empty is a partner that returns
    what it was sent."""

    def __init__(
        self, network: Libp2pNetwork, kinds: Sequence[str], *, step: int | None = None
    ) -> None:
        self._network = network
        self._kinds = list(kinds)
        self._told = 0
        self._step = step
        self._offers: dict[bytes, Ready | None] = {}
        """By swap; None while the lie is being made, or where nothing will come."""
        self._nursery: trio.Nursery | None = None
        self.fingerprint = b""
        self.blocks = b"\1"
        """Those of the peer that it has learnt of last."""
        self.swaps: list[bytes] = []
        """Ids of the swaps that were proposed to it."""

    async def run(
        self,
        *,
        proposes: bool = False,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Until cancelled. proposes: to everybody, again and again."""
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
                    rng.uniform(0.5, 1.0) * PROPOSE_EVERY_SECONDS if proposes else 3600.0
                )
                for peer in self._network.connected():
                    self._nursery.start_soon(self._approach, peer)

    async def learn(self, peer: str) -> None:
        """Ask `peer` what it averages, and claim the same. Raises PeerError."""
        fingerprint = self.fingerprint or bytes(32)
        answer = await self.ask(peer, Here(fingerprint, self._step or 0, self.blocks))
        if isinstance(answer, Here):
            self.fingerprint, self.blocks = answer.fingerprint, answer.blocks
            step = self._claim(answer.outer_step)
            await self.ask(peer, Here(self.fingerprint, step, self.blocks))

    async def ask(self, peer: str, message: Message) -> Message:
        """Raises PeerError."""
        data = await self._network.requests.request(
            peer,
            ids.WEIGHTS_PROTOCOL,
            encode_message(message),
            deadline=10.0,
            max_response_bytes=MESSAGE_BYTES,
        )
        return decode_message(data)

    async def propose(
        self, peer: str, fragment: int = 0, *, follow: bool = True, name: bytes = b""
    ) -> Message:
        """Propose a swap. follow: continue with a lie when it is accepted; else vanish."""
        name = name or secrets.token_bytes(ID_BYTES)
        swap = Swap(name, self.fingerprint, fragment, self._step or 0, self.blocks)
        answer = await self.ask(peer, swap)
        if isinstance(answer, Accepted) and follow:
            self._offers[name] = None
            await self._lie(peer, name)
        return answer

    async def _approach(self, peer: str) -> None:
        try:
            if not self.fingerprint:
                await self.learn(peer)
            await self.propose(peer)
        except (PeerError, msgspec.MsgspecError):
            pass  # It refuses; it is asked again.

    async def _serve(self, peer: str, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        message = decode_message(data)
        if isinstance(message, Here):
            self.fingerprint = self.fingerprint or message.fingerprint
            return encode_message(
                Here(message.fingerprint, self._claim(message.outer_step), message.blocks)
            )
        if isinstance(message, Payload):
            if message.id not in self._offers:
                return encode_message(Refused(message.id, "over"))
            return encode_message(self._offers[message.id] or Busy(message.id))
        if isinstance(message, Swap) and self._nursery is not None:
            self.swaps.append(message.id)
            kind = self._kind(peek=True)
            if kind == "no_answer":
                await trio.sleep(5.0)
            name = bytes(ID_BYTES) if kind == "other_id" else message.id
            if kind != "denies":
                self._offers[message.id] = None
            self._nursery.start_soon(self._lie, peer, message.id)
            step = self._claim(message.outer_step)
            return encode_message(Accepted(name, step, message.blocks))
        raise PeerError("an answer to nothing")

    def _claim(self, theirs: int) -> int:
        return self._step if self._step is not None else theirs

    def _kind(self, *, peek: bool = False) -> str:
        if not self._kinds:
            return ""
        kind = self._kinds[self._told % len(self._kinds)]
        self._told += not peek
        return kind

    async def _lie(self, peer: str, name: bytes) -> None:
        kind = self._kind()
        if kind in ("silent", "denies", "no_answer", "other_id"):
            return
        try:
            pattern = await self._fetch(peer, name)
        except PeerError:
            return  # found out
        content = bytearray(lie(pattern, kind) if kind in PAYLOADS else pattern)
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
        """The partner's payload of a swap. Raises PeerError."""
        bulk = self._network.bulk
        with trio.move_on_after(PAYLOAD_SECONDS):
            while True:
                answer = await self.ask(peer, Payload(name))
                if isinstance(answer, Ready):
                    manifest = await bulk.manifest(peer, answer.transfer)
                    sink = MemorySink(manifest, limit=LARGEST)
                    await bulk.fetch(peer, answer.transfer, manifest, sink, deadline=30.0)
                    return bytes(sink.data)
                if not isinstance(answer, Busy):
                    raise PeerError("its swap is over")
                await trio.sleep(0.1)
        raise PeerError("it has encoded nothing")

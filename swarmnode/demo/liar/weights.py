"""A hostile partner: speaks the protocol of averaging over a real network, and lies in one way or
another. For tests and the demo's liar.

It needs neither model nor configuration: peers tell their fingerprint, and what they publish is the
pattern of what it sends. No torch.
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
    MESSAGE_BYTES,
    NONCE_BYTES,
    Accept,
    Here,
    Latest,
    Message,
    Propose,
    Ready,
    Release,
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
    "release",
    "no_answer",
    "other_nonce",
)
"""Lies that are told before."""
LARGEST: Final = 2**28
PROPOSE_EVERY_SECONDS: Final = 3.0


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
    """kinds: the lies it tells, in turn, of PAYLOADS and MANNERS; empty is an honest partner that
    sends back what it was shown."""

    def __init__(
        self, network: Libp2pNetwork, kinds: Sequence[str], *, step: int | None = None
    ) -> None:
        self._network = network
        self._kinds = list(kinds)
        self._told = 0
        self._step = step
        self._patterns: dict[int, bytes] = {}
        self._nursery: trio.Nursery | None = None
        self.fingerprint = b""
        self.blocks = b"\1"
        """Those of the peer that it has learnt of last."""
        self.sessions: list[bytes] = []

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
        """Ask `peer` what it averages, and for what it has published. Raises PeerError."""
        answer = await self.ask(
            peer, Here(self.fingerprint or bytes(32), self._step or 0, self.blocks)
        )
        if isinstance(answer, Here):
            self.fingerprint, self.blocks = answer.fingerprint, answer.blocks
            await self.ask(
                peer,
                Here(
                    self.fingerprint,
                    self._step if self._step is not None else answer.outer_step,
                    self.blocks,
                ),
            )
        for fragment in range(64):
            try:
                ready = await self.ask(peer, Latest(self.fingerprint, fragment, self.blocks))
            except PeerError:
                return
            if isinstance(ready, Ready):
                manifest = await self._network.bulk.manifest(peer, ready.transfer)
                sink = MemorySink(manifest, limit=LARGEST)
                await self._network.bulk.fetch(peer, ready.transfer, manifest, sink, deadline=30.0)
                self._patterns[fragment] = bytes(sink.data)

    async def ask(self, peer: str, message: Message) -> Message | None:
        """Raises PeerError."""
        data = await self._network.requests.request(
            peer,
            ids.WEIGHTS_PROTOCOL,
            encode_message(message),
            deadline=10.0,
            max_response_bytes=MESSAGE_BYTES,
        )
        return decode_message(data) if data else None

    async def propose(
        self, peer: str, fragment: int = 0, *, follow: bool = True, nonce: bytes = b""
    ) -> Message | None:
        """follow: go on with a lie when it accepts; else vanish."""
        nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        answer = await self.ask(
            peer, Propose(nonce, self.fingerprint, fragment, self._step or 0, self.blocks)
        )
        if isinstance(answer, Accept) and follow:
            await self._lie(peer, answer.session, answer.fragment)
        return answer

    async def _approach(self, peer: str) -> None:
        try:
            if not self._patterns:
                await self.learn(peer)
            for fragment in self._patterns:
                await self.propose(peer, fragment)
        except (PeerError, msgspec.MsgspecError):
            pass  # it does not want us; it is asked again

    async def _serve(self, peer: str, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        message = decode_message(data)
        if isinstance(message, Here):
            self.fingerprint = self.fingerprint or message.fingerprint
            return encode_message(
                Here(message.fingerprint, self._claim(message.outer_step), message.blocks)
            )
        if isinstance(message, Propose) and self._nursery is not None:
            self.sessions.append(message.nonce)
            kind = self._kind(peek=True)
            if kind == "no_answer":
                await trio.sleep(5.0)
            nonce = bytes(NONCE_BYTES) if kind == "other_nonce" else message.nonce
            self._nursery.start_soon(self._lie, peer, message.nonce, message.fragment)
            return encode_message(
                Accept(
                    nonce,
                    message.nonce,
                    message.fragment,
                    self._claim(message.outer_step),
                    message.blocks,
                )
            )
        return b""

    def _claim(self, theirs: int) -> int:
        return self._step if self._step is not None else theirs

    def _kind(self, *, peek: bool = False) -> str:
        if not self._kinds:
            return ""
        kind = self._kinds[self._told % len(self._kinds)]
        self._told += not peek
        return kind

    async def _lie(self, peer: str, session: bytes, fragment: int) -> None:
        kind = self._kind()
        pattern = self._patterns.get(fragment)
        try:
            if kind == "release":
                await self.ask(peer, Release(session))
            if pattern is None or kind in ("silent", "release", "no_answer", "other_nonce"):
                return
            content = bytearray(lie(pattern, kind) if kind in PAYLOADS else pattern)
            source = BulkSource(content)
            if kind == "wrong_hash":
                struct.pack_into("<Q", content, len(content) // 2, 0x5555555555555555)
            transfer = secrets.token_bytes(32)
            if kind != "not_offered":
                self._network.bulk.offer(transfer, source)
            root = bytes(32) if kind == "other_root" else source.root
            size = {"too_large": 2**40, "other_size": source.size - 1}.get(kind, source.size)
            await self.ask(peer, Ready(session, transfer, root, size, self._claim(0)))
            # and another one
            await self.ask(
                peer,
                Ready(session, secrets.token_bytes(32), source.root, source.size, self._claim(0)),
            )
        except PeerError:
            pass  # found out

"""Publishing one replica again and again: only the weights whose bfloat16 changed, with their new values.

Between two outer steps of reinforcement learning most weights move by less than their bfloat16 can show. A patch has the positions
that did and the values that they have now (values, not differences: nothing accumulates, and a lost patch is noticed instead of added
to). Every tenth publication is whole, so that a reader who missed one waits at most nine. The checksum is of the tensor that results, so
patch and reader agree or the reader asks for the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
import numpy as np
import torch
import zstandard

from swarmnode.averaging.codecs import bfloat16_bits, bfloat16_values
from swarmnode.averaging.outer import Tensors
from swarmnode.errors import BadMessage
from swarmnode.weights.layout import PATCH_ITEM_BYTES, Layout
from swarmnode.weights.payload import Header, TensorHeader, build, checksum, parse, peek
from swarmnode.wire.codec import decompress
from swarmnode.wire.limits import ZSTD_WINDOW_BYTES

PATCHES_PER_ANCHOR = 10
"""One publication in so many is whole."""

Bits = dict[str, np.ndarray]
"""Name → bfloat16 as little-endian i2, flat."""


class PatchStatistics(msgspec.Struct, frozen=True):
    published: int
    whole: int
    changed_share: float
    """Of the weights, in the last publication."""
    bytes_last: int
    bytes_total: int


class PatchWriter:
    """The publishing side, one per fragment."""

    def __init__(self, layout: Layout, fragment: int = 0) -> None:
        self._layout = layout
        self._fragment = fragment
        self._state: Bits | None = None
        self._sequence = 0
        self._statistics = PatchStatistics(0, 0, 1.0, 0, 0)

    def publish(self, tensors: Mapping[str, torch.Tensor]) -> bytes:
        """The payload that takes a reader of the last publication to `tensors` (float32 on the host); whole when that is due or shorter."""
        new = {s.name: _bits(tensors[s.name]) for s in self._layout}
        old, sequence = self._state, (self._sequence + 1) % PATCHES_PER_ANCHOR
        changed = sum(int((new[n] != old[n]).sum()) for n in new) if old is not None else None
        total = sum(len(b) for b in new.values())
        payload = None
        if old is not None and changed is not None and sequence > 0 and changed * PATCH_ITEM_BYTES < 2 * total:
            payload = self._build([_patch(old[n], new[n]) for n in new], new, sequence, state_hash(old, self._layout))
        if payload is None:
            sequence, payload = 0, self._build([b.tobytes() for b in new.values()], new, 0, b"")
        self._state, self._sequence = new, sequence
        s = self._statistics
        share = 1.0 if changed is None else changed / total
        self._statistics = PatchStatistics(s.published + 1, s.whole + (sequence == 0), share, len(payload), s.bytes_total + len(payload))
        return payload

    def _build(self, bodies: list[bytes], new: Bits, sequence: int, anchor: bytes) -> bytes:
        heads = [
            TensorHeader(s.name, s.shape, s.dtype, len(body), checksum(new[s.name].tobytes()))
            for s, body in zip(self._layout, bodies, strict=True)
        ]
        return build(Header("patch" if sequence else "bfloat16", self._fragment, sequence, anchor, heads), bodies)

    def statistics(self) -> PatchStatistics:
        return self._statistics


class PatchReader:
    """The receiving side, one per publisher and fragment. A payload that is refused leaves it as it was."""

    def __init__(self, layout: Layout, fragment: int = 0) -> None:
        self._layout = layout
        self._fragment = fragment
        self._state: Bits | None = None
        self._sequence = 0

    def read(self, data: bytes | memoryview) -> Tensors:
        """float32 host tensors after this publication.

        Raises BadMessage with a reason of PAYLOAD_REASONS; `anchor` means that one in between was missed: ask for a whole one.
        """
        if peek(data, self._layout).sequence == 0:
            parsed = parse(data, self._layout, "bfloat16", fragment=self._fragment)
            new = {s.name: np.frombuffer(bytes(b), "<i2") for s, b in zip(self._layout, parsed.bodies, strict=True)}
            self._sequence = 0
        else:
            new = self._patched(data)
            self._sequence += 1
        self._state = new
        return {s.name: bfloat16_values(torch.from_numpy(new[s.name].copy())).reshape(s.shape) for s in self._layout}

    def _patched(self, data: bytes | memoryview) -> Bits:
        if self._state is None or self._sequence + 1 >= PATCHES_PER_ANCHOR:
            raise BadMessage("anchor", "a whole publication comes first")
        anchor = state_hash(self._state, self._layout)
        parsed = parse(data, self._layout, "patch", fragment=self._fragment, anchor=anchor, sequence=self._sequence + 1)
        new = {}
        for head, body in zip(parsed.header.tensors, parsed.bodies, strict=True):
            new[head.name] = _apply(self._state[head.name], bytes(body))
            if checksum(new[head.name].tobytes()) != head.checksum:
                raise BadMessage("checksum", head.name)
        return new


def state_hash(state: Bits, layout: Layout) -> bytes:
    """32 bytes that name a published state of one fragment: SHA-256 over the bfloat16 bytes in the layout's order."""
    digest = hashlib.sha256(b"swarmnode/patch/1")
    for spec in layout:
        digest.update(state[spec.name].tobytes())
    return digest.digest()


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return bfloat16_bits(tensor).reshape(-1).numpy().astype("<i2")


def _patch(old: np.ndarray, new: np.ndarray) -> bytes:
    """zstd of: u32 gaps (first position, then distances), then the new values; nothing where nothing changed."""
    positions = np.flatnonzero(old != new)
    if not len(positions):
        return b""
    gaps = np.diff(positions, prepend=0).astype("<u4")
    content = gaps.tobytes() + new[positions].tobytes()
    settings = zstandard.ZstdCompressionParameters.from_level(
        3, window_log=ZSTD_WINDOW_BYTES.bit_length() - 1, write_content_size=True, write_checksum=False
    )
    return zstandard.ZstdCompressor(compression_params=settings).compress(content)


def _apply(old: np.ndarray, body: bytes) -> np.ndarray:
    if not body:
        return old
    content = decompress(body, PATCH_ITEM_BYTES * len(old))
    count, rest = divmod(len(content), PATCH_ITEM_BYTES)
    if rest or not count:
        raise BadMessage("size", "patch")
    gaps = np.frombuffer(content, "<u4", count)
    positions = np.cumsum(gaps, dtype=np.uint64)  # at most 2**32 gaps of 2**32: no overflow
    if (count > 1 and gaps[1:].min() == 0) or positions[-1] >= len(old):
        raise BadMessage("bounds", "positions ascend and end within the tensor")
    new = old.copy()
    new[positions] = np.frombuffer(content, "<i2", count, offset=4 * count)
    return new

"""Any bytes of a stranger give a message or BadMessage, never another exception or much memory."""

import struct
import subprocess
import sys

import msgpack

from protocol.generate import frames

# --------------------------------------------------------------------------------------------------
# memory

MEBIBYTE = 2**20
# a gigabyte in 32 KiB
ZEROS = b"".join(frames.repeat_block(b"\0", 2**17, last=i == 8191) for i in range(8192))
ENDLESS = frames.repeat_block(b"\0", 2**17, last=False) * 8192
HEAD = frames.pack(frames.GROUP).split(frames.pack("completions"))[0] + frames.pack("completions")
BOMBS = {
    "empty maps": (b"\xdd\x00\x0f\xff\x00" + b"\x80" * (MEBIBYTE - 300), "raw"),
    "empty maps for completions": (
        HEAD + b"\xdd\x00\x0f\xfc\x00" + b"\x80" * (MEBIBYTE - 1024),
        "raw",
    ),
    "nested arrays": (HEAD + b"\x91" * (MEBIBYTE - 1024), "raw"),
    "nested arrays in front of the tag": (
        b"\x82" + frames.pack("task") + b"\x91" * (MEBIBYTE - 1024),
        "raw",
    ),
    "10,000 completions": (HEAD + b"\xdc\x27\x10" + frames.pack(frames.COMPLETION) * 10_000, "raw"),
    "340,000 turns": (
        HEAD
        + b"\x91"
        + frames.pack(frames.COMPLETION)[:-1]
        + b"\xdd\x00\x05\x30\x20"
        + b"\x92\x00\x01" * 340_000,
        "raw",
    ),
    "a list of 4 billion": (HEAD + b"\xdd\xff\xff\xff\xff", "raw"),
    "a map of 4 billion": (
        b"\xdf\xff\xff\xff\xff" + frames.pack("type") + frames.pack("rollout"),
        "raw",
    ),
    "text of 4 GiB": (
        frames.pack(frames.GROUP).replace(frames.pack("rg/chain_sum"), b"\xdb\xff\xff\xff\xff"),
        "raw",
    ),
    "the same key 50,000 times": (
        b"\xdf\x00\x00\xc3\x50"
        + frames.pack("type")
        + frames.pack("rollout")
        + (frames.pack("sequence") + b"\x01") * 49_999,
        "raw",
    ),
    "a gigabyte, declared": (frames.zstd(ZEROS, 2**30), "zstd"),
    "a gigabyte, not declared": (frames.zstd(ZEROS, None), "zstd"),
    "a gigabyte that declares 1000 bytes": (frames.zstd(ZEROS, 1000), "zstd"),
    "a gigabyte that declares a mebibyte": (frames.zstd(ZEROS, MEBIBYTE), "zstd"),
    "a gigabyte that declares 1000 bytes and does not end": (frames.zstd(ENDLESS, 1000), "zstd"),
    "a gigabyte that declares a mebibyte and does not end": (
        frames.zstd(ENDLESS, MEBIBYTE),
        "zstd",
    ),
    "a window of a gigabyte": (
        b"\x28\xb5\x2f\xfd\xc0\xa0" + struct.pack("<Q", 1000) + frames.raw_block(bytes(1000)),
        "zstd",
    ),
}


def test_bombs_are_refused_in_little_memory_of_any_kind():
    """Includes the memory of C libraries: a child whose address space may grow by 32 MiB."""
    child = """
import resource, sys, msgpack
from swarmnode.errors import BadMessage
from swarmnode.wire import codec
from swarmnode.wire.messages import Envelope
bombs = msgpack.unpackb(sys.stdin.buffer.read())
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 32 * 2**20, -1))
for payload, kind in bombs:
    try:
        codec.decode_payload(Envelope(b"", payload, b"", kind))
    except BadMessage:
        print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", child],
        input=msgpack.packb(list(BOMBS.values())),
        capture_output=True,
        check=False,
    )
    assert done.stderr == b""
    assert done.stdout.split() == [b"refused"] * len(BOMBS)

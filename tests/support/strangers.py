"""Attacks of a stranger with a socket, each a coroutine (address, rng) on top of `attacker`."""

import contextlib
import os
import random

import trio

from tests.support import attacker

MB = 1_000_000


async def garbage(address, rng):
    async with await trio.open_tcp_stream(
        *attacker.endpoint(address), local_address="127.0.0.2"
    ) as stream:
        await stream.send_all(rng.randbytes(rng.randrange(1, 5000)))


async def half_handshake(address, rng):
    async with attacker.agreed(address, "/noise", source="127.0.0.2") as raw:
        await raw.write(rng.randbytes(rng.randrange(1, 300)))


async def odd_frames(address, rng):
    async with attacker.connect(address, source="127.0.0.2") as peer:
        for _ in range(20):
            body = rng.randbytes(rng.randrange(0, 100))
            flags, length = rng.randrange(16), rng.choice([len(body), 0, 2**32 - 1])
            await peer.frame(
                rng.randrange(6), rng.randrange(8), flags=flags, length=length, body=body
            )


async def flood(address, rng):
    async with attacker.connect(address, source="127.0.0.2") as peer:
        stream = await peer.open("/test/hold/1")
        for _ in range(20):
            await peer.frame(attacker.DATA, stream.id, body=bytes(MB))


async def streams(address, rng):
    async with attacker.connect(address, source="127.0.0.2") as peer:
        for _ in range(600):
            await peer.syn()


async def raising_handlers(address, rng):
    async with attacker.connect(address, source="127.0.0.2") as peer:
        for name in ("raise", "ends", "leave"):
            stream = await peer.open(f"/test/{name}/1")
            await stream.close()


async def grafts(address, rng):
    async with attacker.connect(address, source="127.0.0.2") as peer:
        for _ in range(100):
            stream = await peer.syn()
            await stream.send(
                attacker.line("/multistream/1.0.0")
                + attacker.line(attacker.MESHSUB)
                + rng.randrange(1, 50) * attacker.GRAFT
            )


async def vanish(address, rng):
    async with attacker.connect(address, source="127.0.0.2") as peer:
        peer.generous = False
        stream = await peer.open("/test/echo/1")
        await stream.send(os.urandom(200_000))


ATTACKS = [garbage, half_handshake, odd_frames, flood, streams, raising_handlers, grafts, vanish]


async def stranger(address, seed):
    rng = random.Random(seed)
    for attack in rng.sample(ATTACKS * 2, 2 * len(ATTACKS)):
        with trio.move_on_after(3), contextlib.suppress(Exception):
            await attack(address, rng)

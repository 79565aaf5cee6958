"""Bulk reads and writes of packets carry the same bytes as single ones, in any fragmentation."""

import random

import pytest
import trio
import trio.testing
from cryptography.exceptions import InvalidTag
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.io.exceptions import IncompleteReadError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID, Transport

from swarmnode.p2p import guards
from swarmnode.p2p.guards import packets


class Dribble(RawConnection):
    """Returns what it reads in pieces of 1 to `most` bytes."""

    def __init__(self, stream, initiator: bool, most: int) -> None:
        super().__init__(TrioTCPStream(stream), initiator)
        self.random, self.most = random.Random(7), most

    async def read(self, n: int | None = None) -> bytes:
        return await super().read(min(n or self.most, self.random.randint(1, self.most)))


async def sessions(most: int = 2**20, *, stock: bool = False):
    """Return the sessions of both sides after the handshake; the listener's is unpatched if
    `stock`."""
    keys = [create_new_key_pair(bytes([number]) * 32) for number in (1, 2)]
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    local = await trio.testing.open_stream_to_socket_listener(listeners[0])
    remote = await listeners[0].accept()
    await listeners[0].aclose()
    dialler = guards.noise_only(keys[0])[PROTOCOL_ID]
    listener = guards.noise_only(keys[1])[PROTOCOL_ID]
    done = []

    async def inbound() -> None:
        secure = Transport.secure_inbound if stock else type(listener).secure_inbound
        done.append(await secure(listener, Dribble(remote, False, most)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbound)
        outbound = await dialler.secure_outbound(
            Dribble(local, True, most), ID.from_pubkey(keys[1].public_key)
        )
    return outbound, done[0]


async def test_only_socket_sessions_use_bulk_io():
    local, remote = await sessions()
    assert isinstance(local.read.__self__, packets.Packets)
    assert isinstance(remote.write.__self__, packets.Packets)
    await local.close()
    await remote.close()


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("most", [200, 70_000, 2**20])
async def test_bytes_arrive_in_order_for_any_split(stock, most):
    numbers = random.Random(most)
    sizes = [1, 2, 65519, 65520, 262_144] if most > 200 else [1, 500, 3000]
    data = [numbers.randbytes(size) for size in sizes for _ in range(2)]
    reads = [1, 7, 12, 65_519, 100_000] if most > 200 else [1, 7, 12]
    for sender, receiver in ((0, 1), (1, 0)):
        pair = await sessions(most, stock=stock)
        received = bytearray()

        async def send(session) -> None:
            for each in data:
                await session.write(each)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, pair[sender])
            total = sum(map(len, data))
            while len(received) < total:
                received += await pair[receiver].read(
                    min(numbers.choice(reads), total - len(received))
                )
        assert bytes(received) == b"".join(data)
        for session in pair:
            await session.close()


async def test_read_without_length_returns_available_bytes():
    local, remote = await sessions()
    await local.write(b"x" * 100)
    assert await remote.read(40) == b"x" * 40
    assert await remote.read(None) == b"x" * 60
    assert await remote.read(0) == b""
    await local.close()
    await remote.close()


async def test_early_end_and_tampering_end_reading():
    local, remote = await sessions()
    await local.write(b"x" * 10)
    await local.close()
    with pytest.raises(IncompleteReadError):
        await remote.read(11)
    local, remote = await sessions()
    await local.conn.read_writer.read_write_closer.write(b"\x00\x20" + bytes(32))
    with pytest.raises(InvalidTag):
        await remote.read(1)
    await local.close()
    await remote.close()

"""The delay proxy forwards all bytes in order with a latency, and closes both ends."""

import socket

import trio
from trio.testing import memory_stream_pair

from swarmnode.demo.delay import DelayProxy, forward_delayed, free_port


async def test_delays_bytes_in_both_directions(autojump_clock):
    (one, near), (far, other) = memory_stream_pair(), memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(forward_delayed, near, far, 0.05)
        began = trio.current_time()
        await one.send_all(b"there")
        assert bytes(await other.receive_some()) == b"there"
        assert 0.05 <= trio.current_time() - began < 0.06
        await other.send_all(b"and back")
        assert bytes(await one.receive_some()) == b"and back"
        assert 0.1 <= trio.current_time() - began < 0.11
        for end, rest in ((one, other), (other, one)):
            await end.send_all(b"x" * 300_000)
            await end.send_eof()
            assert len(b"".join([bytes(part) async for part in rest])) == 300_000


async def test_a_broken_end_closes_the_other(autojump_clock):
    (one, near), (far, other) = memory_stream_pair(), memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(forward_delayed, near, far, 0.05)
        await other.aclose()
        assert not await one.receive_some()
        await one.send_all(b"to a closed stream")


def test_a_proxy_leads_to_its_port():
    with socket.create_server(("127.0.0.1", free_port())) as server:
        proxy = DelayProxy(0.0)
        port = proxy.add_proxy(server.getsockname()[1])
        proxy.open()
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as dialled:
                dialled.sendall(b"hello")
                server.settimeout(10)
                accepted, _ = server.accept()
                with accepted:
                    assert accepted.recv(5) == b"hello"
        finally:
            proxy.close()

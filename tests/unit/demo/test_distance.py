"""The demo's lines: everything arrives, in order, so much later; and what ends, ends for both."""

import socket

import trio
from trio.testing import memory_stream_pair

from swarmnode.demo.distance import Distance, free_port, join


async def test_what_is_sent_arrives_late_and_in_order_both_ways(autojump_clock):
    (one, near), (far, other) = memory_stream_pair(), memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(join, near, far, 0.05)
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


async def test_an_end_that_breaks_is_the_end_of_the_other(autojump_clock):
    (one, near), (far, other) = memory_stream_pair(), memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(join, near, far, 0.05)
        await other.aclose()
        assert not await one.receive_some()
        await one.send_all(b"nobody is there")


def test_a_line_leads_to_a_port_of_this_machine():
    with socket.create_server(("127.0.0.1", free_port())) as server:
        distance = Distance(0.0)
        port = distance.line_to(server.getsockname()[1])
        distance.open()
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as dialled:
                dialled.sendall(b"hello")
                server.settimeout(10)
                accepted, _ = server.accept()
                with accepted:
                    assert accepted.recv(5) == b"hello"
        finally:
            distance.close()

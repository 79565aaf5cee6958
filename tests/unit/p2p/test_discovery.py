"""Peer exchange: a node that knows one member finds all, even without the bootstrap peer."""

import contextlib

from tests.support.hosts import host
from tests.support.waiting import until, wait_connected


async def test_chain_of_nodes_becomes_a_full_mesh(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        chain = [await stack.enter_async_context(host(tmp_path / "0"))]
        for number in range(1, 6):
            chain.append(
                await stack.enter_async_context(
                    host(tmp_path / str(number), initial_peers=chain[-1].listen_addrs)
                )
            )
            await wait_connected(chain[-1], 1)
        await until(lambda: all(len(each.connected()) == 5 for each in chain))


async def test_any_member_replaces_a_lost_bootstrap_peer(tmp_path):
    async with host(tmp_path / "a") as a:
        known = a.listen_addrs
        async with (
            host(tmp_path / "b", initial_peers=known) as b,
            host(tmp_path / "c", initial_peers=known) as c,
        ):
            await until(lambda: len(b.connected()) == len(c.connected()) == 2)
            b_at = b.listen_addrs
    async with (
        host(tmp_path / "b") as b,
        host(tmp_path / "c") as c,
        host(tmp_path / "d", initial_peers=b_at) as d,
    ):
        await until(lambda: set(d.connected()) == {b.peer_id, c.peer_id})

"""Port forwarding over hours with a real UPnP server and a fake clock."""

import logging
from contextlib import asynccontextmanager, suppress

import trio

from swarmnode.p2p import gateway
from swarmnode.p2p.gateway import ExternalView, Forwarding
from tests.support.router import Router

HOUR = 3600.0


class Home:
    """A node behind a router, with its external view and the times of its requests."""

    def __init__(self, router):
        self.router = router
        self.seen = ExternalView("8.8.8.8", private=True)
        self.asked_at = []
        self.checks = 0
        self.forwarding = Forwarding(9512, lambda: self.seen, self.check, self.ask)

    async def ask(self, port):
        self.asked_at.append(trio.current_time())
        answers = [gateway.Gateway()]
        with suppress(Exception):  # a refusal ends the querying process
            answers.extend(gateway.query(port, self.router.url))
        return answers[-1]

    async def check(self):
        """Simulate a successful dial-back."""
        self.checks += 1
        self.seen = ExternalView(self.seen.outside, private=False)


@asynccontextmanager
async def home(outside="8.8.8.8", refuses=False):
    with Router(outside, refuses) as router:
        async with trio.open_nursery() as nursery:
            lives = Home(router)
            nursery.start_soon(lives.forwarding.run)
            yield lives
            nursery.cancel_scope.cancel()


async def test_mapping_is_renewed_before_it_expires(autojump_clock):
    async with home() as node:
        await trio.sleep(4 * HOUR)
        gaps = [
            after - before for before, after in zip(node.asked_at, node.asked_at[1:], strict=False)
        ]
        assert len(gaps) >= 8
        assert max(gaps) < gateway.LEASE_SECONDS / 2, "one request may be lost"
        assert len(node.router.mappings) == len(node.asked_at)
        assert (node.checks, node.forwarding.kind) == (1, "public")


async def test_restarted_router_is_asked_again(autojump_clock):
    async with home() as node:
        await trio.sleep(HOUR + 100)
        node.router.mappings.clear()
        node.seen = ExternalView("8.8.8.8", private=True)  # the mapping is lost, and peers notice
        await trio.sleep(330)
        assert len(node.router.mappings) == 1
        assert node.checks == 2


async def test_new_public_address_is_mapped_at_once(autojump_clock):
    async with home() as node:
        await trio.sleep(100)
        node.seen = ExternalView()  # the line is down
        await trio.sleep(100)
        assert len(node.asked_at) == 1
        node.seen = ExternalView("9.9.9.9", private=True)
        await trio.sleep(20)
        assert len(node.router.mappings) == 2


async def test_reachable_node_asks_no_router(autojump_clock):
    async with home() as node:
        node.seen = ExternalView("8.8.8.8", private=False)
        await trio.sleep(HOUR)
        assert node.asked_at == []


async def test_refusing_router_is_asked_rarely(autojump_clock, caplog):
    with caplog.at_level(logging.WARNING):
        async with home("100.72.3.4", refuses=True) as node:
            await trio.sleep(HOUR)
            assert 6 <= len(node.asked_at) <= 13
            assert (node.checks, node.forwarding.kind) == (0, "carrier")
    assert sum("carrier-grade NAT" in line for line in caplog.messages) == 1

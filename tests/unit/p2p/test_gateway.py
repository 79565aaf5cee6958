"""UPnP queries against a real HTTP server, and their interpretation."""

import json
import logging
import subprocess
import sys
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from swarmnode.p2p import gateway
from swarmnode.p2p.gateway import ExternalView, Forwarding, Gateway, classify_address
from tests.support.router import Router


def asked(url, *arguments):
    command = [sys.executable, "-m", "swarmnode.p2p.gateway", "--url", url, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return [Gateway(**json.loads(line)) for line in done.stdout.splitlines()]


def test_router_forwards_a_port_for_an_hour():
    with Router("198.51.100.7") as router:
        assert asked(router.url, "--port", "9512")[-1] == Gateway("198.51.100.7", mapped=True)
        (mapping,) = router.mappings
    assert (mapping["NewExternalPort"], mapping["NewInternalPort"], mapping["NewProtocol"]) == (
        "9512",
        "9512",
        "TCP",
    )
    assert mapping["NewLeaseDuration"] == "3600"
    assert mapping["NewInternalClient"] == "127.0.0.1", "only to this machine"


def test_refusing_router_still_reports_its_address():
    with Router("100.72.3.4", refuses=True) as router:
        assert asked(router.url, "--port", "9512")[-1] == Gateway("100.72.3.4", mapped=False)
        router.mappings.clear()
        assert asked(router.url) == [Gateway("100.72.3.4")]
        assert router.mappings == []


def test_missing_router_gives_an_empty_answer():
    assert asked("http://127.0.0.1:9/description.xml") == []


@pytest.mark.parametrize(
    ("outside", "observed", "kind"),
    [
        ("8.8.8.8", "", "public"),
        ("8.8.8.8", "8.8.8.8", "public"),
        ("8.8.8.8", "9.9.9.9", "carrier"),
        ("8.8.8.8", "2600::1", "public"),
        ("100.64.0.1", "8.8.8.8", "carrier"),
        ("100.127.255.254", "", "carrier"),
        ("100.128.0.1", "", "public"),
        ("192.168.1.2", "8.8.8.8", "private"),
        ("10.0.0.2", "", "private"),
        ("", "8.8.8.8", "none"),
        ("nonsense", "", "none"),
    ],
)
def test_outside_addresses_are_classified(outside, observed, kind):
    assert classify_address(outside, observed) == kind


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

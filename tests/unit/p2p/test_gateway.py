"""UPnP queries against a real HTTP server, and their interpretation."""

import json
import subprocess
import sys

import pytest

from swarmnode.p2p.gateway import Gateway, classify_address
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

"""What a router says by UPnP, of a real HTTP server that speaks it; and what that means."""

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from swarmnode.doctor import probes
from swarmnode.doctor.checks import ReachFacts, RouterFacts, check_router
from swarmnode.p2p.gateway import Gateway, kind_of

SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DESCRIPTION = f"""<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0"><device>
<deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><serviceList><service>
<serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<controlURL>/control</controlURL><eventSubURL>/event</eventSubURL><SCPDURL>/scpd</SCPDURL>
</service></serviceList></device></deviceList></device></deviceList></device></root>"""


class Router:
    """An Internet Gateway Device. `mappings` are the fields of what it was asked to forward."""

    def __init__(self, outside, refuses=False):
        self.mappings = []
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(DESCRIPTION)

            def do_POST(self):
                asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
                action = re.search(r"#(\w+)", self.headers["SOAPAction"])[1]
                fields = {"NewExternalIPAddress": outside} if action == "GetExternalIPAddress" else {}
                if action == "GetStatusInfo":
                    fields = {"NewConnectionStatus": "Connected", "NewLastConnectionError": "ERROR_NONE", "NewUptime": "100"}
                if action == "AddPortMapping":
                    router.mappings.append(dict(re.findall(r"<(New\w+)>([^<]*)</", asked)))
                    if refuses:
                        return self.answer("<errorCode>725</errorCode><errorDescription>OnlyPermanentLeases</errorDescription>", 500)
                inner = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
                return self.answer(
                    '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>'
                    f'<u:{action}Response xmlns:u="{SERVICE}">{inner}</u:{action}Response></s:Body></s:Envelope>'
                )

            def answer(self, text, code=200):
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/description.xml"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def asked(url, *arguments):
    command = [sys.executable, "-m", "swarmnode.p2p.gateway", "--url", url, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return [Gateway(**json.loads(line)) for line in done.stdout.splitlines()]


def test_a_router_tells_its_outside_address_and_forwards_a_port_for_an_hour():
    with Router("198.51.100.7") as router:
        assert asked(router.url, "--port", "9512")[-1] == Gateway("198.51.100.7", mapped=True)
        (mapping,) = router.mappings
    assert (mapping["NewExternalPort"], mapping["NewInternalPort"], mapping["NewProtocol"]) == ("9512", "9512", "TCP")
    assert mapping["NewLeaseDuration"] == "3600"
    assert mapping["NewInternalClient"] == "127.0.0.1", "this machine, and nobody else"


def test_a_router_that_refuses_still_tells_its_address_and_asking_alone_maps_nothing():
    with Router("100.72.3.4", refuses=True) as router:
        assert asked(router.url, "--port", "9512")[-1] == Gateway("100.72.3.4", mapped=False)
        router.mappings.clear()
        assert asked(router.url) == [Gateway("100.72.3.4")]
        assert router.mappings == []


def test_nobody_there_says_nothing():
    assert asked("http://127.0.0.1:9/description.xml") == []


@pytest.mark.parametrize(
    ("outside", "observed", "kind"),
    [
        ("8.8.8.8", "", "public"), ("8.8.8.8", "8.8.8.8", "public"), ("8.8.8.8", "9.9.9.9", "carrier"), ("8.8.8.8", "2600::1", "public"),
        ("100.64.0.1", "8.8.8.8", "carrier"), ("100.127.255.254", "", "carrier"), ("100.128.0.1", "", "public"),
        ("192.168.1.2", "8.8.8.8", "private"), ("10.0.0.2", "", "private"), ("", "8.8.8.8", "none"), ("nonsense", "", "none"),
    ],
)  # fmt: skip
def test_what_an_outside_address_means(outside, observed, kind):
    assert kind_of(outside, observed) == kind


@pytest.mark.parametrize(
    ("facts", "level", "says"),
    [
        (RouterFacts(True, "carrier", "100.64.0.9"), "warn", "carrier-grade NAT"),
        (RouterFacts(True, "private", "192.168.0.2"), "warn", "another router"),
        (RouterFacts(True, "public", "8.8.8.8"), "ok", "8.8.8.8"),
        (RouterFacts(True), "ok", "by hand"),
        (RouterFacts(), "ok", "none in the way"),
    ],
)
def test_the_doctor_tells_carrier_grade_nat_plainly(facts, level, says):
    check = check_router(facts)
    assert check.level == level
    assert says in check.what


def test_no_router_is_asked_where_none_is_in_the_way(monkeypatch):
    monkeypatch.setattr(probes, "child", lambda *_: pytest.fail("asked"))
    for facts in (
        ReachFacts(["127.0.0.1"], [], ["192.168.1.5"], True), ReachFacts(["0.0.0.0"], [], ["8.8.8.8"], True),
        ReachFacts(["0.0.0.0"], ["/ip4/8.8.8.8/tcp/1"], ["192.168.1.5"], True),
    ):  # fmt: skip
        assert probes.router(facts) == RouterFacts()
    monkeypatch.setattr(probes, "child", lambda *_: Gateway("100.64.0.9"))
    assert probes.router(ReachFacts(["0.0.0.0"], [], ["192.168.1.5"], True)) == RouterFacts(True, "carrier", "100.64.0.9")

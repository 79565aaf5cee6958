"""An alert on its way: a node's metrics, compose's Prometheus and Alertmanager, an e-mail."""

import shutil
import socketserver
import threading
from email import message_from_bytes

import msgspec
import pytest
import yaml
from prometheus_client import start_http_server

from swarmnode.observe.collector import make_registry
from tests.support.chaos.nodes import until
from tests.support.snapshots import example
from tests.support.watch import ROOT, compose_configuration, server

ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or ALERTMANAGER is None,
    reason="Prometheus or Alertmanager is not installed",
)


class MailReceiver(socketserver.ThreadingTCPServer):
    """An SMTP server that stores the mails it receives."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Conversation)
        self.mails = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Conversation(socketserver.StreamRequestHandler):
    timeout = 20

    def handle(self):
        self.wfile.write(b"220 mail receiver\r\n")
        for line in self.rfile:
            command = line[:4].upper()
            self.wfile.write({b"DATA": b"354 \r\n", b"QUIT": b"221 \r\n"}.get(command, b"250 \r\n"))
            if command == b"DATA":
                self.server.mails.append(
                    message_from_bytes(b"".join(iter(self.rfile.readline, b".\r\n")))
                )
                self.wfile.write(b"250 \r\n")
            elif command == b"QUIT":
                return


def compose_command(service, paths):
    """Return the arguments that compose gives a service, with other paths."""
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    command = "\n".join(compose["services"][service]["command"])
    for inside, outside in paths.items():
        assert inside in command
        command = command.replace(inside, str(outside))
    return command.split("\n")


def test_a_critical_alert_arrives_as_an_email(tmp_path):
    healthy = example()
    crew = msgspec.structs.replace(healthy.stages.crew, stopped_seconds=90.0)
    stages = msgspec.structs.replace(healthy.stages, crew=crew)
    stopped = msgspec.structs.replace(healthy, stages=stages)
    node, _ = start_http_server(0, "127.0.0.1", make_registry(lambda: stopped))
    receiver = MailReceiver()
    text = (ROOT / "deploy" / "prometheus" / "alertmanager.yml").read_text()
    alertmanager = yaml.safe_load(text)
    alertmanager["global"]["smtp_smarthost"] = f"127.0.0.1:{receiver.server_address[1]}"
    alertmanager["route"]["routes"][0]["group_wait"] = "0s"
    (tmp_path / "alertmanager.yml").write_text(yaml.safe_dump(alertmanager))
    paths = {
        "/etc/alertmanager/alertmanager.yml": tmp_path / "alertmanager.yml",
        "=/alertmanager": f"={tmp_path / 'silences'}",
    }
    with server(ALERTMANAGER, compose_command("alertmanager", paths), tmp_path) as alertmanager_url:
        config = compose_configuration(
            [f"127.0.0.1:{node.server_port}"], alertmanager_url.removeprefix("http://")
        )
        config["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        paths = {
            "/etc/prometheus/prometheus.yml": tmp_path / "prometheus.yml",
            "=/prometheus": f"={tmp_path / 'series'}",
        }
        with server("prometheus", compose_command("prometheus", paths), tmp_path):
            subjects = lambda: [mail["Subject"] for mail in list(receiver.mails)]
            assert until(lambda: any("SwarmnodeCrewStopped" in one for one in subjects()), 30.0), (
                subjects(),
                (tmp_path / "prometheus.log").read_text()[-2000:],
            )
    node.shutdown()
    receiver.shutdown()
    mail = next(mail for mail in receiver.mails if "SwarmnodeCrewStopped" in mail["Subject"])
    assert mail["To"] == "you@example.org"
    body = "".join(str(part.get_payload(decode=True)) for part in mail.walk())
    assert "has taken no step for 1m 30s" in body

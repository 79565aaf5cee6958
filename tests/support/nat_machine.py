"""Real nodes in the namespaces of a `Topology`."""

import json
import os
import subprocess
import sys


class Machine:
    """A namespace with one node, driven by its command line and observed through its own HTTP
    server."""

    def __init__(self, net, name, directory, listen, *more):
        self.net, self.name, self.directory = net, name, directory
        directory.mkdir()
        sets = (
            f'network.listen_addrs=["/ip4/{listen}/tcp/9512"]',
            "network.mdns=false",
            "policy.threads=1",
            "training.step_interval=1.0",
            *more,
        )
        self.options = [
            "--data-dir",
            str(directory / "data"),
            *(word for each in sets for word in ("--set", each)),
        ]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SWARMNODE_")}
        self.environment = {**kept, "HF_HUB_OFFLINE": "1"}

    def command(self, *words):
        """Run a command to its end and return its standard output."""
        command = [sys.executable, "-m", "swarmnode", *words, *self.options]
        done = self.net.run(
            self.name, command, capture_output=True, text=True, timeout=240, env=self.environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def start(self, *words):
        """Start a command that keeps running. words: as in README.md."""
        with open(self.directory / "node.log", "ab") as log:
            command = [sys.executable, "-m", "swarmnode", *words, *self.options]
            self.process = self.net.spawn(
                self.name,
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
            )

    def snapshot(self):
        text = self.net.get(self.name, "http://127.0.0.1:9464/status?points=1")
        return json.loads(text)["snapshot"] if text else None

    @property
    def peer(self):
        view = self.snapshot()
        return view["node"]["peer"] if view else ""

    def used(self):
        """Return groups trained on, by peer."""
        view = self.snapshot()
        report = view["trainer"]["report"] if view else None
        return report["peers_used"] if report else {}

    def steps(self):
        view = self.snapshot()
        return view["trainer"]["report"]["step"] if view and view["trainer"]["report"] else 0

    def log(self):
        return (self.directory / "node.log").read_text(errors="replace")


def tails(what, machines):
    """Return a description for `wait_for`: what is missing, used groups and ends of the logs."""
    return lambda: (what, {each.name: (each.used(), each.log()[-1500:]) for each in machines})

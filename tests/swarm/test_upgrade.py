"""Two versions installed side by side, N with a second ordinal of everything that members must
speak alike, and N − 1 as it is now."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import swarmnode
from swarmnode.demo.nodes import toml_of, view_of

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(900)]

FAST = {
    "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
    "policy": {"threads": 1},
    "training": {"step_interval": 1.0, "eval_every": 1000},
    "task": {"names": ["builtin/copy", "builtin/sum"]},
    "weights": {"join_seconds": 1.0},
    "http": {"port": 0},
}
NEWER = {
    "FETCH_ORDINALS = (FETCH_PROTOCOL,)": 'FETCH_ORDINALS = ("/swarmnode/fetch/2", FETCH_PROTOCOL)',
    "ROLLOUT_ORDINALS = (ROLLOUT_TOPIC,)": (
        'ROLLOUT_ORDINALS = ("/swarmnode/rollouts/3", ROLLOUT_TOPIC)'
    ),
}


class Installed:
    """A version in a folder of its own, and a node that runs by it."""

    def __init__(self, site, directory):
        self.site, self.directory = site, directory
        directory.mkdir()
        self.config = directory / "config.toml"
        self.config.write_text(
            toml_of(
                {
                    **FAST,
                    "node": {"data_dir": str(directory / "data")},
                }
            )
        )
        self.process = None

    def _start(self, *words, **options):
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SWARMNODE_")}
        environment = {**kept, "PYTHONPATH": str(self.site), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "swarmnode", *words, "--config", str(self.config)]
        return subprocess.Popen(command, cwd=self.directory, env=environment, text=True, **options)

    def command(self, *words):
        """(exit code, standard output, standard error)."""
        process = self._start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=240)
        finally:
            process.kill()
        return process.returncode, out.strip(), err

    def run(self):
        with open(self.directory / "log", "ab") as log:
            self.process = self._start("run", stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def addresses(self):
        path = self.directory / "data" / "run" / "addresses.json"
        return json.loads(path.read_bytes()) if path.exists() else None

    def peers_used(self):
        import urllib.request

        try:
            with urllib.request.urlopen(
                f"{self.addresses()['http']}/status?points=1", timeout=5
            ) as answer:
                return view_of(json.load(answer)["snapshot"]).peers_used
        except (OSError, TypeError):
            return {}

    def log(self):
        return (self.directory / "log").read_text(errors="replace")[-2000:]

    def modules_from(self):
        """Folders that its processes were started from."""
        family = psutil.Process(self.process.pid)
        return {each.environ().get("PYTHONPATH") for each in [family, *family.children()]}


def until(condition, what, seconds=240.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds} s: {what()}")


def test_a_next_version_and_this_one_train_on_each_others_groups(tmp_path):
    package = Path(swarmnode.__file__).parent
    for site, changes in (("this", {}), ("next", NEWER)):
        # compiled as it is, but for what changes
        shutil.copytree(package, tmp_path / site / "swarmnode")
        names = tmp_path / site / "swarmnode" / "wire" / "ids.py"
        source = names.read_text()
        for present, changed in changes.items():
            assert source.count(present) == 1
            source = source.replace(present, changed)
        names.write_text(source)
    old, new = (
        Installed(tmp_path / "this", tmp_path / "old"),
        Installed(tmp_path / "next", tmp_path / "new"),
    )
    try:
        code, invite, error = old.command("init", "--name", "long-lived")
        assert code == 0, error
        old.run()
        until(old.addresses, old.log)
        code, _, error = new.command("join", invite, "--no-run")
        assert code == 0, error
        new.run()
        until(lambda: new.addresses() and old.addresses(), new.log)
        peers = {each: each.addresses()["peer"] for each in (old, new)}
        until(
            lambda: old.peers_used().get(peers[new]) and new.peers_used().get(peers[old]),
            lambda: old.log() + new.log(),
        )
        assert new.modules_from() == {str(tmp_path / "next")}

        # what the next version founds speaks its own ordinals; this version says so and stays out
        founder = Installed(tmp_path / "next", tmp_path / "founder")
        code, told, error = founder.command("init", "--name", "brand-new", "--json")
        assert code == 0, error
        late = Installed(tmp_path / "this", tmp_path / "late")
        code, _, error = late.command("bootstrap", "--manifest", json.loads(told)["manifest"])
        assert code == 77
        assert re.search(
            r"its members speak /swarmnode/\w+/2, this version of swarmnode does not: upgrade",
            error,
        )
    finally:
        for each in (old, new):
            if each.process is not None:
                each.process.send_signal(signal.SIGTERM)
        for each in (old, new):
            if each.process is not None:
                each.process.wait(120)

"""`init`, `join` and `bootstrap` as an operator uses them: real processes, one invite, one
swarm."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from swarmnode import cli
from swarmnode.config import Config
from swarmnode.daemon.node import node_info
from swarmnode.demo.nodes import DemoNode
from swarmnode.swarm import invite as invites
from swarmnode.swarm import membership
from swarmnode.swarm.manifest_store import ManifestStore
from tests.support.manifests import founded
from tests.support.terminal import typed
from tests.support.waiting import status, wait_for
from tests.support.whole_crew import stop

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(900)]

FAST = {
    "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
    "policy": {"threads": 1},
    "training": {"step_interval": 1.0, "eval_every": 50, "temperature": 0.9},
    "task": {"names": ["builtin/copy", "builtin/sum"]},
    "http": {"port": 0},
}


@pytest.fixture
def founded_at(tmp_path, capsys):
    """Return a founder that does not run yet, and its invite."""
    node = DemoNode("a", tmp_path / "a", {**FAST, "swarm": {"name": "trial"}})
    assert cli.run(["init", "--config", str(node.config_file)]) == 0
    return node, capsys.readouterr().out.strip()


@pytest.mark.slow
def test_member_bootstraps_a_node_and_detects_its_twin(tmp_path, founded_at):
    """The founder is the member. tests/swarm/test_docs_typed.py checks that joined nodes train on
    each other's groups."""
    a, invite = founded_at
    d = DemoNode("d", tmp_path / "d", {**FAST, "task": {"names": ["rg/gcd"]}})
    try:
        a.start([])
        a.wait_for_address(time.monotonic() + 180)
        bootstrap = ["-m", "swarmnode", "bootstrap", invite, "--config", str(d.config_file)]
        d.launch(*bootstrap)
        d.wait_for_address(time.monotonic() + 180)
        wait_for(lambda: status(d)["network"]["peers"]["connected"], d.last_log_line())
        node_status = status(d)["node"]
        assert node_status["swarm"] == invite.rpartition("/")[2]
        assert node_status["swarm_name"] == "trial"
        assert node_status["trainer"] is False  # a bootstrap node needs none
        assert set(status(d)["processes"]) == {"network"}
        wait_for(
            lambda: "a" in {row["name"] for row in status(d)["swarm"]["rows"]},
            f"it shows the swarm: {d.last_log_line()}",
        )

        # The member connected to both detects a second process with the key.
        twin = tmp_path / "twin"
        shutil.copytree(d.directory, twin, ignore=shutil.ignore_patterns("run", "port"))
        done = subprocess.run(
            [sys.executable, *bootstrap, "--data-dir", str(twin)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 77
        assert "another running node uses this node's key" in done.stderr
        assert d.alive()
        # It does not train and publishes no summary.
        assert node_status["peer"] not in {row["peer"] for row in status(a)["swarm"]["rows"]}
    finally:
        stop((a, d), 120)
    assert [node.exit_code() for node in (a, d)] == [0, 0]


# ---- refusals: one line and one exit code each


def served_by_a_child(monkeypatch, opened, successor=None):
    """Replace the output of `python -m swarmnode.swarm.join`."""
    answer = {
        "peer": "12D3KooWNobody",
        "manifest": opened.signed.hex(),
        "successor": successor.signed.hex() if successor else "",
    }
    printed = subprocess.CompletedProcess([], 0, json.dumps(answer), "")
    monkeypatch.setattr(membership.subprocess, "run", lambda *_, **__: printed)


def join(tmp_path, opened, *more):
    where = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
    return cli.run(
        [
            "join",
            f"{where}/swarm/{opened.swarm.hex()}",
            "--no-run",
            "--data-dir",
            str(tmp_path),
            *more,
        ]
    )


def refusal(capsys):
    lines = capsys.readouterr().err.splitlines()
    (error,) = [line for line in lines if "waiting for a peer" not in line]
    return error


@pytest.mark.parametrize(
    ("change", "says"), [({"minimum_version": "99.0"}, "99.0"), ({"protocols": ["/x/1"]}, "/x/1")]
)
def test_join_rejects_an_unsupported_swarm(tmp_path, monkeypatch, capsys, change, says):
    opened = founded(**change)
    served_by_a_child(monkeypatch, opened)
    assert join(tmp_path, opened) == 77
    assert says in refusal(capsys)
    assert ManifestStore(tmp_path).current() is None


def stored_settings(data_dir, capsys):
    """Return the settings of the data directory with their values."""
    assert cli.run(["config", "show", "--json", "--data-dir", str(data_dir)]) == 0
    shown = json.loads(capsys.readouterr().out)
    return {
        key: row["value"]
        for key, row in shown.items()
        if row["origin"] == str(data_dir / "config.toml")
    }


def test_join_stores_its_options(tmp_path, monkeypatch, capsys):
    served_by_a_child(monkeypatch, founded(minimum_version="99.0"))
    asked = ["--set", "node.name=evening", "--set", "http.port=9000"]
    assert join(tmp_path / "a", founded(minimum_version="99.0"), *asked) == 77
    assert not (tmp_path / "a" / "config.toml").exists()
    served_by_a_child(monkeypatch, founded())
    assert join(tmp_path / "a", founded(), *asked) == 0
    capsys.readouterr()
    assert stored_settings(tmp_path / "a", capsys) == {"node.name": "evening", "http.port": 9000}


def test_pasted_invite_brings_the_secret(tmp_path, monkeypatch, capsys):
    """`init --lan --private` prints the invite; `join --lan` asks for it."""
    founder, member = tmp_path / "a founder", tmp_path / "member"
    asked = ["--lan", "--private", "--any-model", "--set", 'task.names=["builtin/copy"]']
    assert cli.run(["init", *asked, "--data-dir", str(founder)]) == 0
    captured = capsys.readouterr()
    assert f"`swarmnode run -d '{founder}'`" in captured.err
    invite = captured.out.strip()
    public, secret = invites.split_secret(invite)
    assert secret == bytes.fromhex((founder / "swarm.secret").read_text())
    assert "/ip4/127." not in public
    lan = {"network.listen_addrs": ["/ip4/0.0.0.0/tcp/0"]}
    assert stored_settings(founder, capsys) == {**lan, "task.names": ["builtin/copy"]}
    assert cli.run(["manifest", "invite", "--data-dir", str(founder)]) == 0
    assert capsys.readouterr().out.strip() == invite

    opened = ManifestStore(founder).get(invites.parse(public).swarm)
    network = SimpleNamespace(peer_id="p", listen_addrs=[])
    member_of = SimpleNamespace(opened=opened, network=network, swarm=opened.swarm)
    assert "`swarmnode manifest invite`" in node_info(Config(), member_of).invite
    served_by_a_child(monkeypatch, opened)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{invite}\n"))
    assert cli.run(["join", "--lan", "--no-run", "--data-dir", str(member)]) == 0
    assert "waiting for a peer of the invite" in capsys.readouterr().err
    assert (member / "swarm.secret").read_text() == (founder / "swarm.secret").read_text()
    assert (member / "swarm.secret").stat().st_mode & 0o077 == 0
    assert stored_settings(member, capsys) == lan


def test_terminal_does_not_show_the_pasted_invite(tmp_path):
    line = f"{sys.executable} -m swarmnode join --data-dir {tmp_path}"
    reply = [("paste the invite (it is not shown): ", "/ip4/x/swarm/y/secret/z")]
    code, written = typed(line, {**os.environ, "TERM": "dumb"}, tmp_path, reply)
    assert code == 78
    assert "no 64 hex digits after /secret/" in written
    assert "/ip4/x" not in written


def test_join_rejects_a_manifest_of_another_swarm(tmp_path, monkeypatch, capsys):
    served_by_a_child(monkeypatch, founded(name="another"))
    assert join(tmp_path, founded()) == 77
    assert "does not belong to the invite" in refusal(capsys)
    assert ManifestStore(tmp_path).current() is None


def test_join_follows_a_successor_only_if_configured(tmp_path, monkeypatch):
    first = founded()
    second = founded(predecessor=first.swarm, created_at=first.manifest.created_at + 1)
    served_by_a_child(monkeypatch, first, second)
    for policy, expected in (("founder", second), ("ask", first), ("never", first)):
        assert join(tmp_path / policy, first, "--set", f"swarm.follow={policy}") == 0
        assert ManifestStore(tmp_path / policy).current() == expected.swarm


def test_join_refuses_a_readable_secret_file(tmp_path, capsys):
    file = tmp_path / "secret"
    file.write_text("00" * 32)
    file.chmod(0o644)
    assert join(tmp_path, founded(), "--secret-file", str(file)) == 77
    assert "chmod 600" in refusal(capsys)


def test_join_does_not_compare_clocks(tmp_path, monkeypatch):
    for name, days in (("past", -4000), ("future", 4000)):
        opened = founded(created_at=int((time.time() + 86_400 * days) * 1000))
        served_by_a_child(monkeypatch, opened)
        assert join(tmp_path / name, opened) == 0
        assert ManifestStore(tmp_path / name).current() == opened.swarm


def test_manifest_show_prints_invite_and_successor(tmp_path, capsys):
    assert cli.run(["manifest", "show", "--data-dir", str(tmp_path)]) == 69
    first = founded(
        bootstrap=["/ip4/192.0.2.7/tcp/1/p2p/12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"]
    )
    second = founded(predecessor=first.swarm, created_at=first.manifest.created_at + 1)
    store = ManifestStore(tmp_path)
    for opened in (second, first):
        store.add(opened)
    store.choose(first.swarm)
    capsys.readouterr()
    assert cli.run(["manifest", "show", "--data-dir", str(tmp_path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert invites.parse(shown["invite"]).swarm == first.swarm
    assert shown["successor"]["swarm"] == second.swarm.hex()
    assert shown["successor"]["changes"] == [f"- bootstrap {first.manifest.bootstrap[0]}: named"]


def test_oversized_manifest_file_is_not_read(tmp_path, capsys):
    (tmp_path / "m").write_bytes(founded().signed + bytes(1 << 20))
    assert (
        cli.run(["bootstrap", "--manifest", str(tmp_path / "m"), "--data-dir", str(tmp_path)]) == 77
    )
    assert "oversize" in refusal(capsys)
    assert ManifestStore(tmp_path).current() is None

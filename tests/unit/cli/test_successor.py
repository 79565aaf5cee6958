"""`init --successor` keeps unset values, shows the changes, and asks the operator to confirm."""

import io
import sys

import msgspec
import pytest

from swarmnode import cli
from swarmnode.config import Config
from swarmnode.daemon.member import Successors
from swarmnode.files import write_atomically
from swarmnode.observe import health
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.p2p.identity import load_or_create
from swarmnode.swarm import manifest
from swarmnode.swarm.manifest_store import ManifestStore
from swarmnode.wire.messages import Access
from tests.support.manifests import founded, succeeding
from tests.support.waiting import until

ELSEWHERE = "/ip4/192.0.2.7/tcp/9512/p2p/12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
SECRET = bytes(range(32))


@pytest.fixture
def founder(tmp_path):
    """Return a function that founds a swarm in tmp_path with the given fields of the manifest, and
    hashes no model."""

    def found(**changes):
        key = load_or_create(tmp_path / "identity.key").private_key
        opened = founded(key, **{"bootstrap": [ELSEWHERE], "completions": (3, 12), **changes})
        store = ManifestStore(tmp_path)
        store.add(opened)
        store.choose(opened.swarm)
        return opened

    return found


def successor(tmp_path, *arguments):
    return cli.run(["init", "--successor", "-d", str(tmp_path), *arguments])


def present(tmp_path):
    store = ManifestStore(tmp_path)
    return store.get(store.current())


def test_changes_only_given_settings_and_shows_them(tmp_path, founder, capsys):
    before = founder(access=Access([], b""))
    assert successor(tmp_path, "--yes", "--set", "training.temperature=0.8") == 0
    after = present(tmp_path)
    assert after.manifest.predecessor == before.swarm
    rules = msgspec.structs.replace(before.manifest.rollouts, temperature=0.8)
    same = {"created_at": after.manifest.created_at, "predecessor": before.swarm, "rollouts": rules}
    assert after.manifest == msgspec.structs.replace(before.manifest, **same)
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  ")]
    assert shown == ["  ~ rollouts.temperature: 1.0 → 0.8"]


def test_changes_name_tasks_and_bounds(tmp_path, founder, capsys):
    founder()
    options = ['--set=task.names=["builtin/copy"]', "--set=training.num_generations=8"]
    assert successor(tmp_path, "--yes", "--name", "second", *options, "--json") == 0
    now = present(tmp_path).manifest
    assert (now.name, [task.id for task in now.tasks]) == ("second", ["builtin/copy"])
    assert (now.rollouts.min_completions, now.rollouts.max_completions) == (4, 16)
    error = capsys.readouterr().err
    assert "~ name: 'test' → 'second'" in error
    assert "- task builtin/sum: version" in error
    assert "~ rollouts.min_completions: 3 → 4" in error


class Terminal:
    def __init__(self, answer):
        self._answer = answer

    def isatty(self):
        return True

    def readline(self):
        return self._answer


@pytest.mark.parametrize(
    ("answer", "code"), [("y\n", 0), ("YES\n", 0), ("\n", 77), ("n\n", 77), ("", 77)]
)
def test_asks_at_a_terminal(tmp_path, founder, capsys, monkeypatch, answer, code):
    before = founder()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert successor(tmp_path, "--name", "second") == code
    assert "Sign it?" in capsys.readouterr().err
    assert (ManifestStore(tmp_path).current() == before.swarm) is (code != 0)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--name second", "a successor needs confirmation, but there is no terminal: add --yes"),
        ("--yes", "would change nothing: add options"),
        ("--yes --name second --public --private", "--public contradicts --private and --member"),
        ("--yes --name second --member nobody", "--member 'nobody'"),
        ("--yes --name second --bootstrap nowhere", "--bootstrap"),
        ("--yes --set training.temperature=-1", "training.temperature"),
    ],
)
def test_an_invalid_successor_is_refused_in_one_line(
    tmp_path, founder, capsys, monkeypatch, arguments, problem
):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    before = founder()
    assert successor(tmp_path, *arguments.split()) == 78
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("swarmnode: ")
    assert problem in last
    assert ManifestStore(tmp_path).current() == before.swarm


def test_a_private_swarm_stays_private_without_public(tmp_path, founder, capsys):
    own = load_or_create(tmp_path / "identity.key").peer_id
    before = founder(access=Access([own], manifest.commitment(SECRET)))
    assert successor(tmp_path, "--yes", "--name", "second") == 77
    assert "secret of this private swarm is missing" in capsys.readouterr().err
    write_atomically(tmp_path / manifest.SECRET_FILE, SECRET.hex().encode(), mode=0o600)
    assert successor(tmp_path, "--yes", "--name", "second") == 0
    assert present(tmp_path).manifest.access == before.manifest.access
    assert successor(tmp_path, "--yes", "--public") == 0
    assert present(tmp_path).manifest.access == Access([], b"")


@pytest.mark.parametrize(
    ("before", "options", "after"),
    [
        (
            "/ip4/198.51.100.1/tcp/1",
            ["--set", 'network.listen_addrs=["/ip4/203.0.113.5/tcp/9512"]'],
            "/ip4/203.0.113.5/tcp/9512",
        ),
        ("/dns4/swarm.example.org/tcp/9512", [], "/dns4/swarm.example.org/tcp/9512"),
    ],
)
def test_updates_the_founders_address_only(tmp_path, founder, before, options, after):
    own = load_or_create(tmp_path / "identity.key").peer_id
    founder(bootstrap=[f"{before}/p2p/{own}", ELSEWHERE])
    assert successor(tmp_path, "--yes", "--name", "second", *options) == 0
    assert present(tmp_path).manifest.bootstrap == [f"{after}/p2p/{own}", ELSEWHERE]


def test_any_model_stays_with_a_configured_model(tmp_path, founder):
    founder(models=[])
    model = "policy.model=Qwen/Qwen2.5-0.5B-Instruct"
    assert cli.run(["config", "set", model, "-d", str(tmp_path)]) == 0
    assert successor(tmp_path, "--yes", "--name", "second") == 0
    assert present(tmp_path).manifest.models == []


class NoPeers:
    peer_id = ""


@pytest.mark.parametrize(
    ("follow", "models", "waits"),
    [("ask", None, True), ("never", None, False), ("founder", [], True)],
)
async def test_health_reports_a_waiting_successor(
    tmp_path, nursery, follow, models, waits, autojump_clock
):
    first = founded()
    second = succeeding(first, name="second", **({} if models is None else {"models": models}))
    store = ManifestStore(tmp_path)
    for opened in (first, second):
        store.add(opened)
    store.choose(first.swarm)
    settings = {"swarm": {"follow": follow}, "task": {"names": ["builtin/copy"]}}
    config = Config.model_validate({"node": {"data_dir": tmp_path}, **settings})
    successors = Successors(config, first, store, NoPeers())
    nursery.start_soon(successors.run)
    if waits:
        await until(lambda: successors.statistics().swarm == second.swarm.hex())
    statistics = successors.statistics()
    assert bool(statistics.swarm) is waits
    troubles = " ".join(health.troubles(NodeSnapshot(successor=statistics)))
    assert ("`swarmnode manifest follow` moves this node there" in troubles) is (follow == "ask")
    assert ("cannot follow: it trains another model" in troubles) is (follow == "founder")

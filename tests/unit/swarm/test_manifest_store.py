"""The manifests in a data directory: successors, choice, damage."""

import pytest
from structlog.testing import capture_logs

from protocol.generate.frames import OTHER_KEY, PEER
from swarmnode.config import Config
from swarmnode.errors import Refused, StateError
from swarmnode.swarm import manifest_store
from swarmnode.swarm.manifest_store import ManifestStore
from swarmnode.swarm.membership import Membership
from swarmnode.wire.messages import ModelRef
from tests.support.manifests import founded, succeeding

FIRST = founded()
SECOND = succeeding(FIRST)
THIRD = succeeding(SECOND)


HUB = ModelRef("org/model", "main", b"\x11" * 32, b"\x22" * 32)


def config_in(directory, **sections):
    return Config.model_validate({"node": {"data_dir": directory}, **sections})


def stored(directory, *opened):
    store = ManifestStore(directory)
    for each in opened:
        store.add(each)
    return store


def chosen(directory, opened):
    store = stored(directory, opened)
    store.choose(opened.swarm)
    return store


def test_chosen_manifest_sets_the_configuration(tmp_path):
    chosen(tmp_path, FIRST)
    assert ManifestStore(tmp_path).current() == FIRST.swarm
    config, _ = manifest_store.apply_stored(config_in(tmp_path))
    assert config.swarm.id == FIRST.swarm.hex()
    assert config.task.names == ["builtin/copy", "builtin/sum"]


def test_invite_peers_are_added_to_bootstrap(tmp_path):
    there = f"/ip4/192.0.2.1/tcp/1/p2p/{PEER}"
    opened = founded(bootstrap=[f"/ip4/192.0.2.2/tcp/1/p2p/{PEER}"])
    chosen(tmp_path, opened).save_peers([there])
    assert manifest_store.apply_stored(config_in(tmp_path))[0].network.initial_peers == [
        there,
        *opened.manifest.bootstrap,
    ]
    (tmp_path / "manifest" / "peers").write_text("nonsense")
    assert (
        manifest_store.apply_stored(config_in(tmp_path))[0].network.initial_peers
        == opened.manifest.bootstrap
    )


def test_unsupported_manifest_is_refused_in_one_line(tmp_path):
    chosen(tmp_path, founded(minimum_version="99"))
    with pytest.raises(Refused, match=r"cannot honour .*99.*upgrade") as raised:
        manifest_store.apply_stored(config_in(tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"",
        lambda data: SECOND.signed,
    ],
)
def test_damaged_manifest_is_an_error(tmp_path, damage):
    store = stored(tmp_path, FIRST)
    store.path(FIRST.swarm).write_bytes(damage(FIRST.signed))
    with pytest.raises(StateError, match=FIRST.swarm.hex()):
        store.get(FIRST.swarm)
    assert store.lookup(FIRST.swarm) == (b"", b"")


def test_follows_the_chain_of_successors(tmp_path):
    store = stored(tmp_path, FIRST, SECOND, THIRD)
    assert store.latest(FIRST.swarm) == THIRD
    assert store.lookup(FIRST.swarm) == (FIRST.signed, SECOND.signed)
    assert store.descends(THIRD.swarm, FIRST.swarm)
    assert not store.descends(FIRST.swarm, THIRD.swarm)


def test_newer_successor_replaces_the_older(tmp_path):
    store, younger = stored(tmp_path, FIRST), succeeding(FIRST, later=2)
    assert store.add_successor(FIRST, SECOND)
    assert store.add_successor(FIRST, younger)
    assert not store.add_successor(FIRST, SECOND)
    assert not store.add_successor(FIRST, younger)
    assert store.successor(FIRST) == younger
    assert store.get(SECOND.swarm) is None


def test_adopted_successor_is_kept(tmp_path):
    store = stored(tmp_path, FIRST)
    store.add_successor(FIRST, SECOND)
    store.choose(SECOND.swarm)
    store.add_successor(FIRST, succeeding(FIRST, later=2))
    assert store.get(SECOND.swarm) == SECOND


def test_successor_of_another_founder_is_ignored(tmp_path):
    store = stored(tmp_path, FIRST, succeeding(FIRST, OTHER_KEY))
    assert store.successor(FIRST) is None


@pytest.mark.parametrize(
    ("sections", "rate"),
    [
        ({}, 1e-6),
        ({"policy": {"lora": {"r": 8}}}, 1e-4),
        ({"training": {"learning_rate": 3e-4}}, 3e-4),
        ({"policy": {"model": "./"}}, 1e-6),
    ],
)
def test_real_model_gets_a_suitable_learning_rate(tmp_path, sections, rate):
    chosen(tmp_path, founded(models=[HUB]))
    agreed, changes = manifest_store.apply_stored(config_in(tmp_path, **sections))
    assert agreed.training.learning_rate == rate
    assert "training.learning_rate" not in {change.key for change in changes}


def test_overruled_setting_is_a_warning(tmp_path):
    there = f"/ip4/192.0.2.1/tcp/1/p2p/{PEER}"
    chosen(tmp_path, founded(bootstrap=[there]))
    own = {
        "policy": {"model": "org/other"},
        "task": {"names": ["builtin/sum", "builtin/copy"]},
        "network": {"initial_peers": []},
    }
    with capture_logs() as logged:
        Membership(config_in(tmp_path, **own)).prepare()
    levels = {line["key"]: line["log_level"] for line in logged if "key" in line}
    assert levels["policy.model"] == "warning"
    assert set(levels.values()) == {"warning", "info"}
    assert [key for key, level in levels.items() if level == "warning"] == ["policy.model"]

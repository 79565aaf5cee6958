"""A client written from protocol/ alone, on js-libp2p: it agrees with the vectors of what it reads,
and it joins, polls, fetches and verifies the groups of a real network process."""

import json
import threading
import time
from pathlib import Path

import pytest

from tests.support.foreign import Foreign, install, judged, missing, network_process
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"{missing()} not installed"),
    pytest.mark.timeout(300),
]

VECTORS = Path(__file__).parents[2] / "protocol" / "vectors"
DOCUMENTS = ("valid", "envelopes", "payloads", "compression", "listings", "manifests")
READ = {"group", "listing_response", "groups_response", "manifest_response"}


@pytest.fixture(scope="module", autouse=True)
def installed():
    install()


@pytest.fixture(scope="module")
def foreign(installed, tmp_path_factory):
    client = Foreign(tmp_path_factory.mktemp("client") / "errors")
    yield client
    client.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with network_process(tmp_path_factory.mktemp("node")) as process:
        yield process


@pytest.fixture(scope="module")
def joined(foreign, node):
    return foreign("join", invite=node.invite)


def test_client_agrees_with_the_vectors():
    files = [VECTORS / f"{name}.json" for name in DOCUMENTS]
    expected = [
        (path, vector)
        for path in files
        for vector in json.loads(path.read_text())["vectors"]
        if vector.get("read_as") in READ
    ]
    outcomes = judged(files)
    assert len(outcomes) == len(expected) > 240
    for (path, vector), outcome in zip(expected, outcomes, strict=True):
        assert outcome == (path, vector["name"], {field: vector.get(field) for field in outcome[2]})


def test_client_joins_polls_fetches_and_verifies(foreign, node, joined):
    assert (joined["encryption"], joined["multiplexer"]) == ("/noise", "/yamux/1.0.0")
    assert [task["id"] for task in joined["manifest"]["tasks"]] == ["builtin/copy", "builtin/sum"]
    published = {1: node.publish(1), 2: node.publish(2), 3: node.publish(3, long=True)}
    listing = wait_for(
        lambda: (found := foreign.unless_reset("list")) and len(found["groups"]) == 3 and found,
        lambda: foreign("list"),
        30.0,
        pause=1.0,
    )
    own_key = node.author.key.public_key().public_bytes_raw().hex()
    assert {group["author"] for group in listing["groups"]} == {own_key}
    fetched = foreign("fetch")
    assert [group["reason"] for group in fetched] == [None] * 3
    assert {group["peer"] for group in fetched} == {node.author.peer}
    assert {group["sequence"]: group["texts"] for group in fetched} == published
    damaged = foreign("fetch", damage=True)
    assert [group["reason"] for group in damaged] == ["mismatch"] * 3


def test_node_holds_a_poll_until_a_new_group(foreign, node, joined):
    listing = foreign("list")
    cursor = {"life": listing["life"], "position": listing["position"]}
    began = time.monotonic()
    empty = foreign("list", patience=1, **cursor)
    assert (empty["status"], empty["groups"]) == ("ok", [])
    assert 1.0 <= time.monotonic() - began < 5.0

    publishing = threading.Timer(0.5, node.publish, [5])
    publishing.start()
    began = time.monotonic()
    later = foreign("list", patience=10, **cursor)
    publishing.join()
    assert time.monotonic() - began < 8.0
    assert (len(later["groups"]), later["position"]) == (1, listing["position"] + 1)

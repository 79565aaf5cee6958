"""A client written from protocol/ alone, on js-libp2p, with a real network process: both
directions, and all kinds of malformed input.

The tests use one network process and one client process with several identities.
"""

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from swarmnode.rollouts.groups import OwnGroup
from swarmnode.rollouts.sampling import spread
from tests.support.authors import Author
from tests.support.foreign import Foreign, install, judged, missing, network_process, until
from tests.support.games import HIGH, TURNS, guessing_game

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"{missing()} not installed"),
    pytest.mark.timeout(600),
]

VECTORS = Path(__file__).parents[2] / "protocol" / "vectors"
DOCUMENTS = (
    "valid",
    "envelopes",
    "payloads",
    "compression",
    "listings",
    "peers",
    "manifests",
    "sessions",
    "summaries",
    "admission",
    "derivations",
    "tasks",
)
FORGIVEN = 2
"""Hostile messages of one identity before it is polled late or no longer."""
OF_AN_ADMITTED_GROUP = {"candidates", "admitted"}


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
def alice(foreign, node):
    """Return a member and the answer it got when it joined."""
    return foreign("join", name="alice", invite=node.invite)


@pytest.fixture(scope="module")
def bob(foreign, node, alice):
    """Return another identity, which publishes no groups."""
    return foreign("join", name="bob", invite=node.invite)


def reasons():
    """Return file/name of a vector → its reason."""
    documents = {
        path.stem: json.loads(path.read_text())["vectors"] for path in VECTORS.glob("*.json")
    }
    return {
        f"{name}/{vector['name']}": vector.get("reason")
        for name, vectors in documents.items()
        for vector in vectors
    }


def node_state(node):
    """Return the state of a node that did not do the expected."""
    network = node.status()["network"]
    return (
        node.outcomes(),
        {name: network[name] for name in ("guards", "reputation", "peers")},
        node.last_log_line(),
    )


def drawn(node, count):
    """Return `count` groups of peers as soon as they are available."""
    groups = []
    until(
        lambda: groups.extend(node.draw()) or len(groups) >= count,
        lambda: (node.outcomes(), node.last_log_line()),
    )
    return groups


def test_client_agrees_with_the_vectors():
    files = [VECTORS / f"{name}.json" for name in DOCUMENTS]
    vectors = [
        (path, vector) for path in files for vector in json.loads(path.read_text())["vectors"]
    ]
    outcomes = judged(files)
    assert len(outcomes) == len(vectors) > 450
    for (path, vector), outcome in zip(vectors, outcomes, strict=True):
        expected = {field: vector.get(field) for field in outcome[2]}
        assert outcome == (path, vector["name"], expected)


def greeting(foreign):
    """Return the node's own summary, or None while it has none or is rate-limiting this client."""
    greeted = foreign.unless_reset("greet", name="alice")
    return greeted if greeted and greeted["summaries"] else None


def test_client_joins_and_exchanges_summaries(foreign, node, alice):
    assert (alice["encryption"], alice["multiplexer"]) == ("/noise", "/yamux/1.0.0")
    assert [task["id"] for task in alice["manifest"]["tasks"]] == ["builtin/copy", "builtin/sum"]
    greeted = until(lambda: greeting(foreign), lambda: "no summary yet", seconds=60.0, pause=1.0)
    assert greeted["same"]
    assert greeted["sessions"] == []
    assert [summary["peer"] for summary in greeted["summaries"]] == [node.author.peer]
    received = until(
        lambda: (received := foreign("told", name="alice"))["sessions"] and received,
        lambda: foreign("told", name="alice"),
    )
    assert set(received["sessions"]) == {node.author.peer}
    shown = until(
        lambda: [row for row in node.status()["swarm"]["rows"] if row["peer"] == alice["peer"]],
        node.status,
    )
    assert shown[0]["name"] == "foreign"


def test_client_groups_are_fetched_scored_and_drawn(foreign, node, alice):
    offered = [
        foreign("offer", name="alice", sequence=sequence, long=sequence == 4, codec=codec)
        for sequence, codec in enumerate(("raw", "raw", "raw", "zstd", "raw"))
    ]
    groups = drawn(node, 5)
    assert {group.content.hex() for group in groups} == set(offered)
    assert {group.peer for group in groups} == {alice["peer"]}
    assert all(group.rewards[:4] == [1.0] * 4 and max(group.rewards[4:]) < 1.0 for group in groups)
    confirmed = lambda: node.status()["rollouts"]["pulling"]["claims"]["confirmed"]
    until(lambda: confirmed() == 5, lambda: node_state(node))
    assert {reason for reason, count in node.outcomes().items() if count} == OF_AN_ADMITTED_GROUP


def test_waiting_poll_of_the_node_gets_news(foreign, node, alice):
    held = foreign("told", name="alice")["held"]
    until(
        lambda: node.draw() or node.status()["rollouts"]["pulling"]["polled"],
        lambda: node_state(node),
    )
    began = time.monotonic()
    offered = foreign("offer", name="alice", sequence=5)
    groups = drawn(node, 1)
    assert time.monotonic() - began < 5.0  # seconds; the poll could wait 10
    assert [group.content.hex() for group in groups] == [offered]
    assert foreign("told", name="alice")["held"] > held


def test_client_fetches_groups_and_computes_equal_rewards(foreign, node, alice, bob):
    rewards = {sequence: node.publish(sequence, long=sequence == 3) for sequence in (1, 2, 3)}
    listing = until(
        lambda: (
            (found := foreign.unless_reset("list", name="bob"))
            and len(found["groups"]) == 9
            and found
        ),
        lambda: foreign("list", name="bob"),
        pause=1.0,
    )
    fetched = foreign("fetch", name="bob")
    assert [group["reason"] for group in fetched] == [None] * 9
    assert all(group["spreadAsListed"] for group in fetched)
    assert {group["peer"] for group in fetched} == {node.author.peer, alice["peer"]}
    assert {
        group["sequence"]: group["rewards"]
        for group in fetched
        if group["peer"] == node.author.peer
    } == rewards
    assert all(
        abs(spread(group["rewards"]) - listed["spread"]) < 1e-9
        for group, listed in zip(fetched, listing["groups"], strict=True)
    )


def test_node_holds_a_poll_until_a_new_group(foreign, node, bob):
    listing = foreign("list", name="bob")
    cursor = {"life": listing["life"], "position": listing["position"]}
    empty = foreign("list", name="bob", patience=1, **cursor)
    assert (empty["status"], empty["groups"]) == ("ok", [])
    assert 1.0 <= empty["took"] < 5.0

    foreign("poll", name="bob", patience=10, **cursor)
    until(lambda: node.status()["rollouts"]["serving"]["waiting"] >= 1, node.status)
    node.publish(5)
    later = foreign("polled", name="bob")
    assert later["took"] < 8.0
    own_key = node.author.key.public_key().public_bytes_raw().hex()
    assert [group["author"] for group in later["groups"]] == [own_key]
    assert (later["life"], later["position"]) == (listing["life"], listing["position"] + 1)


def test_malformed_request_resets_its_stream(foreign, node, bob):
    for protocol in ("listing", "groups", "manifest", "peers", "session", "summary"):
        asked = foreign("ask", name="bob", protocol=protocol, request="81a1")
        assert asked["error"] == "StreamResetError", protocol


def test_copies_of_the_nodes_own_groups_are_refused(foreign, node, alice, bob):
    """Unchanged copies, and copies under the copier's key, whose question belongs to another
    author."""
    foreign("list", name="bob")
    fetched = foreign("fetch", name="bob")
    own = next(group for group in fetched if group["peer"] == node.author.peer)
    before = Counter(node.outcomes())
    for signed, reason in ((False, "own"), (True, "seed")):
        foreign("copy", name="bob", content=own["content"], signed=signed)
        until(
            lambda reason=reason: node.draw() or node.outcomes().get(reason, 0) > before[reason],
            lambda: node_state(node),
        )


def test_malformed_groups_are_refused_as_in_the_vectors(foreign, node):
    expected, found = reasons(), {}
    faults = foreign("faults")
    assert len(faults) >= 35
    blamed, name = FORGIVEN, ""
    for number, fault in enumerate(faults):
        if blamed >= FORGIVEN:
            if name:
                foreign("leave", name=name)
            name, blamed = f"mallory {number}", 0
            foreign("join", name=name, invite=node.invite)
        before = Counter(node.outcomes())
        foreign("spoil", name=name, fault=fault, sequence=number)

        def refused(before=before):
            node.draw()
            return {
                reason for reason, count in node.outcomes().items() if count > before[reason]
            } - OF_AN_ADMITTED_GROUP

        found[fault] = until(refused, lambda fault=fault: (fault, node_state(node)), seconds=60.0)
        blamed += 1
    assert found == {fault: {expected[fault]} for fault in faults}
    rollouts = node.status()["rollouts"]
    assert rollouts["admission"]["last_internal_error"] == ""
    assert rollouts["pulling"]["pulled"]["refused"] >= len(faults)
    assert foreign("told", name=name)["served"]["groups"] >= 1


def test_episodes_pass_through_the_client(foreign, tmp_path, monkeypatch):
    """The client has no copy of the environment. It verifies form and signature of an episode, and
    lists episodes of other members."""
    with guessing_game(tmp_path, monkeypatch) as game:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
        settings = {"names": [game], "modules": [game]}
        settings["settings"] = {game: {"turns": TURNS, "high": HIGH}}
        with network_process(tmp_path / "node", settings) as node:
            node.author.tasks = (game,)
            foreign("join", name="erin", invite=node.invite, turns={game: TURNS})
            episodes = [["9", "0"], ["9"] * TURNS, ["9", "9", "0"], ["0"]]
            rewards = [0.25, 0.0, 0.25, 0.25]
            group = node.author.group(0, time.time(), episodes=episodes)
            node.share(OwnGroup(group.task, 0, 0, group.sampling, group.completions, rewards))
            listing = lambda: foreign.unless_reset("list", name="erin") or {"groups": []}
            until(lambda: listing()["groups"], lambda: node_state(node), pause=1.0)
            (fetched,) = foreign("fetch", name="erin")
            assert (fetched["reason"], fetched["turns"]) == (None, [2, TURNS, 3, 1])
            assert fetched["texts"] == ["".join(actions) for actions in episodes]

            author = Author(node.author.swarm, 78, (game,))
            frame = author.frame(author.group(0, time.time(), episodes=episodes))
            foreign("relay", name="erin", frame=frame.hex(), spread=spread(rewards))
            (drawn_group,) = drawn(node, 1)
            assert (drawn_group.peer, drawn_group.rewards) == (author.peer, rewards)
            assert drawn_group.observations[0] == ["lower", "you give up"]
            foreign("leave", name="erin")


def test_malformed_answers_are_refused_as_in_the_vectors(foreign, node):
    """The node drops the answer, charges the peer, and uses no group of the answer."""
    expected, found = reasons(), {}
    answers = foreign("answers")
    assert len(answers) >= 10
    before = Counter(node.outcomes())
    for number, fault in enumerate(answers):
        name = f"trudy {number}"
        foreign("join", name=name, invite=node.invite)
        charged = Counter(node.rejections())
        foreign("spoilAnswer", name=name, fault=fault, sequence=0)

        def refused(charged=charged):
            node.draw()
            return {
                reason for reason, count in node.rejections().items() if count > charged[reason]
            }

        found[fault] = until(refused, lambda fault=fault: (fault, node_state(node)), seconds=60.0)
        foreign("leave", name=name)
    assert found == {fault: {expected[fault]} for fault in answers}
    pulling = node.status()["rollouts"]["pulling"]
    assert pulling["listings"]["malformed"] + pulling["pulled"]["malformed"] >= len(answers)
    assert Counter(node.outcomes()) == before

"""A client that was written from protocol/ alone, on js-libp2p, against a real network process:
both ways, and every kind of nonsense.

One network process, and a process of the client with several identities.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from swarmnode.rollouts.sampling import spread
from tests.support.foreign import Foreign, install, judged, missing, network_process, until

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
    "fetch",
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
"""Lies of one identity after which it would be asked late, or not any more."""
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
    """A member; what it was told when it joined."""
    return foreign("join", name="alice", invite=node.invite)


@pytest.fixture(scope="module")
def bob(foreign, node, alice):
    """Another identity, which makes no groups."""
    return foreign("join", name="bob", invite=node.invite)


def reasons():
    """File/name of a vector → the reason that it names."""
    documents = {
        path.stem: json.loads(path.read_text())["vectors"] for path in VECTORS.glob("*.json")
    }
    return {
        f"{name}/{vector['name']}": vector.get("reason")
        for name, vectors in documents.items()
        for vector in vectors
    }


def told(node):
    """What a node that has not done what was expected says of it."""
    network = node.status()["network"]
    return (
        node.outcomes(),
        {name: network[name] for name in ("guards", "reputation", "peers")},
        node.last_words(),
    )


def drawn(node, count):
    """`count` groups of others, as soon as they are there."""
    groups = []
    until(
        lambda: groups.extend(node.draw()) or len(groups) >= count,
        lambda: (node.outcomes(), node.last_words()),
    )
    return groups


def test_it_judges_the_vectors_as_the_documents_do():
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
    """What the node tells of itself; None while it has made no summary, or does not answer who asks
    so often."""
    told = foreign.unless_reset("greet", name="alice")
    return told if told and told["summaries"] else None


def test_it_joins_by_an_invite_and_is_told_what_members_tell(foreign, node, alice):
    assert (alice["encryption"], alice["multiplexer"]) == ("/noise", "/yamux/1.0.0")
    assert [task["id"] for task in alice["manifest"]["tasks"]] == ["builtin/copy", "builtin/sum"]
    greeted = until(lambda: greeting(foreign), lambda: "no summary yet", seconds=60.0, pause=1.0)
    assert greeted["same"]
    assert greeted["sessions"] == []
    assert [summary["peer"] for summary in greeted["summaries"]] == [node.author.peer]
    told = until(
        lambda: (told := foreign("told", name="alice"))["sessions"] and told,
        lambda: foreign("told", name="alice"),
    )
    assert set(told["sessions"]) == {node.author.peer}
    shown = until(
        lambda: [row for row in node.status()["swarm"]["rows"] if row["peer"] == alice["peer"]],
        node.status,
    )
    assert shown[0]["name"] == "foreign"


def test_its_groups_are_pulled_scored_and_drawn_for_training(foreign, node, alice):
    offered = [
        foreign("offer", name="alice", sequence=sequence, long=sequence == 4, codec=codec)
        for sequence, codec in enumerate(("raw", "raw", "raw", "zstd", "raw"))
    ]
    groups = drawn(node, 5)
    assert {group.content.hex() for group in groups} == set(offered)
    assert {group.peer for group in groups} == {alice["peer"]}
    assert all(group.rewards[:4] == [1.0] * 4 and max(group.rewards[4:]) < 1.0 for group in groups)
    kept = lambda: node.status()["rollouts"]["pulling"]["claims"]["kept"]
    until(lambda: kept() == 5, lambda: told(node))
    assert set(node.outcomes()) == OF_AN_ADMITTED_GROUP


def test_it_pulls_what_the_node_has_also_of_others_and_finds_the_same_rewards(
    foreign, node, alice, bob
):
    rewards = {sequence: node.publish(sequence, long=sequence == 3) for sequence in (1, 2, 3)}
    listing = until(
        lambda: (
            (told := foreign.unless_reset("list", name="bob")) and len(told["groups"]) == 8 and told
        ),
        lambda: foreign("list", name="bob"),
        pause=1.0,
    )
    pulled = foreign("pull", name="bob")
    assert [group["reason"] for group in pulled] == [None] * 8
    assert all(group["spreadAsListed"] for group in pulled)
    assert {group["peer"] for group in pulled} == {node.author.peer, alice["peer"]}
    assert {
        group["sequence"]: group["rewards"] for group in pulled if group["peer"] == node.author.peer
    } == rewards
    assert all(
        abs(spread(group["rewards"]) - listed["spread"]) < 1e-9
        for group, listed in zip(pulled, listing["groups"], strict=True)
    )
    node.publish(5)
    cursor = {"life": listing["life"], "position": listing["position"]}
    later = until(
        lambda: (
            (told := foreign.unless_reset("list", name="bob", **cursor)) and told["groups"] and told
        ),
        lambda: "nothing new is listed",
        pause=1.0,
    )
    assert [group["author"] for group in later["groups"]] == [
        node.author.key.public_key().public_bytes_raw().hex()
    ]
    assert later["life"] == listing["life"]
    assert later["position"] == listing["position"] + 1
    for protocol in ("listing", "groups", "manifest", "peers", "session", "summary"):
        assert (
            foreign("ask", name="bob", protocol=protocol, request="81a1")["error"]
            == "StreamResetError"
        )


def test_copies_of_the_nodes_own_groups_are_refused(foreign, node, alice, bob):
    """As they are, and under the copier's key, where they answer another's question."""
    foreign("list", name="bob")
    own = next(group for group in foreign("pull", name="bob") if group["peer"] == node.author.peer)
    before = Counter(node.outcomes())
    for signed, reason in ((False, "own"), (True, "seed")):
        foreign("copy", name="bob", content=own["content"], signed=signed)
        until(
            lambda reason=reason: node.draw() or node.outcomes().get(reason, 0) > before[reason],
            lambda: told(node),
        )


def test_what_is_malformed_is_refused_for_the_reason_that_the_vectors_name(foreign, node):
    expected, found = reasons(), {}
    faults = foreign("faults")
    assert len(faults) >= 33
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

        found[fault] = until(refused, lambda fault=fault: (fault, told(node)), seconds=60.0)
        blamed += 1
    assert found == {fault: {expected[fault]} for fault in faults}
    rollouts = node.status()["rollouts"]
    assert rollouts["admission"]["last_internal_error"] == ""
    assert rollouts["pulling"]["pulled"]["refused"] >= len(faults)
    assert foreign("told", name=name)["served"]["groups"] >= 1

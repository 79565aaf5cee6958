"""A client that was written from protocol/ alone, on js-libp2p, against a real network process:
both ways, and every kind of nonsense.

Two network processes one after the other, one that gossips and one that pulls, and a process of the
client with several identities.
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
FORGIVEN = 4
"""Rejections of one identity after which the next would not be looked at any more."""
OF_AN_ADMITTED_GROUP = {"candidates", "admitted"}
TOO_LONG = "envelopes/one byte too long for gossip"


@pytest.fixture(scope="module", autouse=True)
def installed():
    install()


@pytest.fixture(scope="module")
def foreign(installed, tmp_path_factory):
    client = Foreign(tmp_path_factory.mktemp("client") / "errors")
    yield client
    client.close()


@pytest.fixture(scope="module")
def gossiping(tmp_path_factory):
    with network_process(tmp_path_factory.mktemp("gossiping"), "gossip") as node:
        yield node


@pytest.fixture(scope="module")
def alice(foreign, gossiping):
    """A member in the mesh of the node that gossips; what it was told when it joined."""
    joined = foreign("join", name="alice", invite=gossiping.invite)
    until(
        lambda: foreign("meshed", name="alice")["mesh"] == 1,
        lambda: foreign("meshed", name="alice"),
    )
    return joined


@pytest.fixture(scope="module")
def bob(foreign, gossiping, alice):
    """Another identity, which publishes nothing of its own."""
    return foreign("join", name="bob", invite=gossiping.invite)


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


def outcomes(node, fault):
    """Of admission; what is too long for gossip does not get as far, and is counted by the guards
    before it: of that fault alone, since a message that was refused so early may be asked for again
    (IWANT) while others are judged, if its sender has left the mesh."""
    if fault == TOO_LONG:
        return Counter(oversize=node.status()["network"]["guards"]["message_refused"])
    return Counter(node.outcomes())


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


def test_it_joins_by_an_invite_and_is_told_what_members_tell(foreign, gossiping, alice):
    assert (alice["encryption"], alice["multiplexer"]) == ("/noise", "/yamux/1.0.0")
    assert [task["id"] for task in alice["manifest"]["tasks"]] == ["builtin/copy", "builtin/sum"]
    greeted = until(lambda: greeting(foreign), lambda: "no summary yet", seconds=60.0, pause=1.0)
    assert greeted["same"]
    assert greeted["sessions"] == []
    assert [summary["peer"] for summary in greeted["summaries"]] == [gossiping.author.peer]
    told = until(
        lambda: (told := foreign("told", name="alice"))["sessions"] and told,
        lambda: foreign("told", name="alice"),
    )
    assert set(told["sessions"]) == {gossiping.author.peer}
    shown = until(
        lambda: [
            row for row in gossiping.status()["swarm"]["rows"] if row["peer"] == alice["peer"]
        ],
        gossiping.status,
    )
    assert shown[0]["name"] == "foreign"


def test_it_hears_the_groups_of_the_node_and_finds_the_same_rewards(foreign, gossiping, alice):
    rewards = {sequence: gossiping.publish(sequence) for sequence in (1, 2)}
    rewards[3] = gossiping.publish(3, long=True)
    heard = until(
        lambda: (heard := foreign("heard", name="alice")) and len(heard) >= 3 and heard,
        lambda: foreign("heard", name="alice"),
    )
    assert {group["peer"] for group in heard} == {gossiping.author.peer}
    assert {group["reason"] for group in heard} == {None}
    announced = next(group["announced"] for group in heard if group["announced"])
    fetched = foreign("fetch", name="alice", content=announced["content"])
    assert fetched["reason"] is None
    found = {
        group["sequence"]: group["rewards"] for group in [*heard, fetched] if group.get("rewards")
    }
    assert found == rewards


def test_its_groups_are_admitted_scored_and_drawn_for_training(foreign, gossiping, alice):
    published = [foreign("publish", name="alice", sequence=sequence) for sequence in range(3)]
    published.append(foreign("publish", name="alice", sequence=3, codec="zstd"))
    published.append(foreign("publish", name="alice", sequence=4, long=True))
    groups = drawn(gossiping, 5)
    assert {group.content.hex() for group in groups} == set(published)
    assert {group.peer for group in groups} == {alice["peer"]}
    assert all(group.rewards[:4] == [1.0] * 4 and max(group.rewards[4:]) < 1.0 for group in groups)
    assert set(gossiping.outcomes()) == OF_AN_ADMITTED_GROUP


def test_it_lists_and_pulls_what_the_node_has_also_of_others(foreign, gossiping, alice, bob):
    listing = foreign("list", name="bob")
    pulled = foreign("pull", name="bob")
    assert len(listing["groups"]) == len(pulled) >= 8
    assert [group["reason"] for group in pulled] == [None] * len(pulled)
    assert all(group["spreadAsListed"] for group in pulled)
    assert {group["peer"] for group in pulled} == {gossiping.author.peer, alice["peer"]}
    assert all(
        abs(spread(group["rewards"]) - listed["spread"]) < 1e-9
        for group, listed in zip(pulled, listing["groups"], strict=True)
    )
    gossiping.publish(5)
    cursor = {"life": listing["life"], "position": listing["position"]}
    later = until(
        lambda: (
            (told := foreign.unless_reset("list", name="bob", **cursor)) and told["groups"] and told
        ),
        lambda: "nothing new is listed",
        pause=1.0,
    )
    assert [group["author"] for group in later["groups"]] == [
        gossiping.author.key.public_key().public_bytes_raw().hex()
    ]
    assert later["life"] == listing["life"]
    assert later["position"] == listing["position"] + 1
    for protocol in ("listing", "groups", "fetch", "manifest", "peers", "session", "summary"):
        assert (
            foreign("ask", name="bob", protocol=protocol, request="81a1")["error"]
            == "StreamResetError"
        )


def test_what_is_malformed_is_refused_for_the_reason_that_the_vectors_name(foreign, gossiping):
    expected, found = reasons(), {}
    faults = foreign("faults")
    assert len(faults) >= 35
    blamed, name = FORGIVEN, ""
    for number, fault in enumerate(faults):
        if blamed >= FORGIVEN:
            name, blamed = f"mallory {number}", 0
            foreign("join", name=name, invite=gossiping.invite)
            until(
                lambda name=name: foreign("meshed", name=name)["subscribers"],
                lambda: "the node is in no topic",
            )
        before = outcomes(gossiping, fault)
        foreign("spoil", name=name, fault=fault, sequence=number)

        def refused(fault=fault, before=before):
            return {
                reason
                for reason, count in outcomes(gossiping, fault).items()
                if count > before[reason]
            } - OF_AN_ADMITTED_GROUP

        found[fault] = until(
            refused,
            lambda fault=fault, name=name: (fault, foreign("meshed", name=name), told(gossiping)),
        )
        blamed += 1
    assert found == {fault: {expected[fault]} for fault in faults}
    assert gossiping.status()["rollouts"]["admission"]["last_internal_error"] == ""


def test_copies_of_the_nodes_own_groups_are_refused(foreign, gossiping, alice, bob):
    """As they are, and under the copier's key, where they answer another's question."""
    own = next(
        group
        for group in foreign("heard", name="alice")
        if group["peer"] == gossiping.author.peer and group.get("rewards")
    )
    before = gossiping.outcomes()
    foreign("copy", name="bob", heard="alice", content=own["content"], signed=False)
    until(lambda: gossiping.outcomes().get("own", 0) == 1, gossiping.outcomes)
    foreign("copy", name="bob", heard="alice", content=own["content"], signed=True)
    until(lambda: gossiping.outcomes()["seed"] == before["seed"] + 1, gossiping.outcomes)


def test_a_node_that_pulls_trains_on_what_it_lists_and_refuses_what_is_not_as_listed(
    foreign, tmp_path
):
    with network_process(tmp_path / "pulling", "pull") as node:
        carol = foreign("join", name="carol", invite=node.invite)
        node.publish(1)
        offered = [
            foreign("offer", name="carol", sequence=sequence, long=sequence == 2, codec="zstd")
            for sequence in range(4)
        ]
        groups = drawn(node, 4)
        assert {group.content.hex() for group in groups} == set(offered)
        assert {group.peer for group in groups} == {carol["peer"]}
        assert node.status()["rollouts"]["pulling"]["claims"]["kept"] == 4
        assert set(node.outcomes()) == OF_AN_ADMITTED_GROUP

        faults = (
            "payloads/completions: 1 items",
            "admission/another sequence",
            "envelopes/another swarm",
        )
        for number, fault in enumerate(faults):
            foreign("spoil", name="carol", fault=fault, sequence=10 + number, offered=True)

        def refused():
            node.draw()
            return node.outcomes().keys() >= {reasons()[fault] for fault in faults}

        until(refused, node.outcomes, seconds=60.0)
        pulling = node.status()["rollouts"]["pulling"]
        assert pulling["pulled"] == {"ok": 4, "refused": 3}
        assert pulling["claims"]["lies"] == {"content": 3}
        assert foreign("told", name="carol")["served"]["groups"] >= 2
        assert foreign("list", name="carol")["groups"][0]["task"] == "builtin/sum"

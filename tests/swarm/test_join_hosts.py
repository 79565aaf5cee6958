"""Joining over real hosts: wrong peers in an invite, private swarms, successors, and a key used
twice."""

import contextlib
import itertools
import random
import shutil

import msgspec
import pytest
import trio

from protocol.generate.frames import KEY, OTHER_KEY
from swarmnode.config import Config, NetworkConfig
from swarmnode.daemon.member import Successors
from swarmnode.errors import LocalError, Refused, Unavailable
from swarmnode.p2p import manifests
from swarmnode.p2p.identity import from_key, load_or_create
from swarmnode.p2p.network import open_host
from swarmnode.p2p.sessions import Sessions, Stamps, Witness
from swarmnode.swarm import join
from swarmnode.swarm.invite import Invite
from swarmnode.swarm.manifest_store import ManifestStore
from swarmnode.wire import codec, limits
from swarmnode.wire.envelope import seal_session
from swarmnode.wire.messages import Envelope, Session, SessionResponse
from tests.support.hosts import host
from tests.support.manifests import CONFIG, founded, succeeding
from tests.support.waiting import until, wait_connected

FIRST = founded()
SECOND = succeeding(FIRST)
JOINER = from_key(OTHER_KEY)
NOWHERE = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
SECRET = bytes(range(32))


def invite(*networks, swarm=FIRST.swarm):
    return Invite(tuple(address for network in networks for address in network.listen_addrs), swarm)


def serving(network, manifest=FIRST.signed, successor=b""):
    manifests.serve(network.requests, lambda swarm: (manifest, successor))
    return network


def refounded(opened):
    """Return the same manifest with the signature of another key."""
    envelope = msgspec.msgpack.decode(opened.signed, type=Envelope)
    return msgspec.msgpack.encode(msgspec.structs.replace(envelope, signature=bytes(64)))


async def test_fetches_the_manifest_from_any_available_peer(tmp_path):
    async with host(tmp_path / "a") as a:
        where = Invite((NOWHERE, *serving(a).listen_addrs), FIRST.swarm)
        found = await join.fetch(JOINER, where, None)
    assert (found.manifest, found.successor) == (FIRST, None)


async def test_fetches_the_successor_with_the_manifest(tmp_path):
    async with host(tmp_path / "a") as a:
        found = await join.fetch(JOINER, invite(serving(a, successor=SECOND.signed)), None)
    assert found.successor == SECOND


@pytest.mark.parametrize(
    ("manifest", "successor", "says"),
    [
        (SECOND.signed, b"", "hashes to"),
        (refounded(FIRST), b"", "signature"),
        (FIRST.signed[:-1], b"", "malformed"),
        (b"\x93" * 60_000, b"", "schema"),
        (b"\x93" * (limits.MANIFEST_BYTES + 1), b"", "bounds: manifest is 0 to 65536"),
        (b"", b"", "does not have the manifest"),
        (FIRST.signed, FIRST.signed, "does not follow"),
        (FIRST.signed, succeeding(FIRST, OTHER_KEY).signed, "does not follow"),
    ],
)
async def test_wrong_manifests_are_rejected_by_reason(tmp_path, manifest, successor, says):
    async with host(tmp_path / "a") as a:
        with pytest.raises(Refused, match=says):
            await join.fetch(JOINER, invite(serving(a, manifest, successor)), None)


async def test_rejects_a_bootstrap_with_another_peer_id(tmp_path):
    async with host(tmp_path / "a") as a:
        where = serving(a).listen_addrs[0].partition("/p2p/")[0]
        with pytest.raises(Refused, match="different peer answers"):
            await join.fetch(
                JOINER, Invite((f"{where}/p2p/{NOWHERE.rpartition('/')[2]}",), FIRST.swarm), None
            )


async def test_one_honest_bootstrap_peer_is_enough(tmp_path):
    async with host(tmp_path / "a") as a, host(tmp_path / "b") as b:
        found = await join.fetch(JOINER, invite(serving(a, SECOND.signed), serving(b)), None)
    assert found.manifest == FIRST


async def test_unreachable_peers_are_unavailable_not_refused():
    with pytest.raises(Unavailable, match="Connection refused"):
        await join.fetch(JOINER, Invite((NOWHERE,), FIRST.swarm), None, seconds=0.5)


# ---- private swarms


async def test_private_manifest_requires_the_secret(tmp_path):
    founder = load_or_create(tmp_path / "identity.key")
    async with open_host(NetworkConfig(mdns=False), founder, tmp_path, secret=SECRET) as network:
        where = invite(serving(network))
        assert (await join.fetch(JOINER, where, SECRET)).manifest == FIRST
        with pytest.raises(Refused, match="--secret-file"):
            await join.fetch(JOINER, where, None)
        with pytest.raises(Unavailable, match="has another secret"):
            await join.fetch(JOINER, where, bytes(32), seconds=1.0)
        assert network.connected() == []


async def test_members_with_the_secret_connect(tmp_path):
    async with open_host(
        NetworkConfig(mdns=False), from_key(KEY), tmp_path / "a", secret=SECRET
    ) as a:
        cfg = NetworkConfig(mdns=False, initial_peers=a.listen_addrs)
        async with open_host(cfg, JOINER, tmp_path / "b", secret=SECRET) as b:
            with trio.fail_after(60):
                await wait_connected(b)


async def test_unlisted_peer_is_closed_at_the_handshake(tmp_path):
    founder = load_or_create(tmp_path / "identity.key")
    async with open_host(
        NetworkConfig(mdns=False), founder, tmp_path, members={JOINER.peer_id}
    ) as network:
        where = invite(serving(network))
        assert (await join.fetch(JOINER, where, None)).manifest == FIRST
        stranger = load_or_create(tmp_path / "stranger.key")
        with pytest.raises(Unavailable, match="not on the list of a private swarm"):
            await join.fetch(stranger, where, None, seconds=1.0)
        assert network.statistics().refused_connections >= 1


# ---- successors


def successors(network, directory, follow, opened=FIRST):
    store = ManifestStore(directory)
    store.add(opened)
    store.choose(opened.swarm)
    config = Config.model_validate({**CONFIG.model_dump(), "swarm": {"follow": follow}})
    return store, Successors(config, opened, store, network)


@pytest.mark.parametrize(("policy", "moves"), [("founder", True), ("ask", False), ("never", False)])
async def test_running_node_follows_a_successor_by_policy_only(tmp_path, policy, moves):
    async with host(tmp_path / "a") as a, host(tmp_path / "b", initial_peers=a.listen_addrs) as b:
        serving(a, FIRST.signed, SECOND.signed)
        store, following = successors(b, tmp_path / "b", policy)
        await wait_connected(b)
        async with trio.open_nursery() as nursery:

            async def run():
                if moves:
                    with pytest.raises(LocalError, match="restarting"):
                        await following.run()
                else:
                    await following.run()

            nursery.start_soon(run)
            await until(lambda: store.successor(FIRST) == SECOND)
            await until(lambda: store.current() == (SECOND.swarm if moves else FIRST.swarm))
            if not moves:
                nursery.cancel_scope.cancel()


async def test_successor_with_another_model_needs_the_operator(tmp_path):
    async with host(tmp_path / "a") as a, host(tmp_path / "b", initial_peers=a.listen_addrs) as b:
        serving(a, FIRST.signed, succeeding(FIRST, models=[]).signed)
        store, following = successors(b, tmp_path / "b", "founder")
        await wait_connected(b)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(following.run)
            await until(lambda: store.successor(FIRST) is not None)
            assert store.current() == FIRST.swarm
            nursery.cancel_scope.cancel()


# ---- one key, two processes


async def test_later_process_with_the_same_key_ends(tmp_path):
    async with host(tmp_path / "a") as a, host(tmp_path / "b", initial_peers=a.listen_addrs) as b:
        shutil.copytree(tmp_path / "b", tmp_path / "c", ignore=shutil.ignore_patterns("port"))
        async with host(tmp_path / "c", initial_peers=a.listen_addrs) as c:
            await until(lambda: b.connected() and c.connected())
            clock = itertools.count(1000).__next__
            key = load_or_create(tmp_path / "b" / "identity.key").private_key
            made = {
                name: Sessions(
                    network.requests,
                    network.peer_id,
                    own,
                    FIRST.swarm,
                    network.connected,
                    clock=clock,
                )
                for name, network, own in (("a", a, KEY), ("b", b, key))
            }
            later = Sessions(c.requests, c.peer_id, key, FIRST.swarm, c.connected, clock=clock)
            for sessions in (made["b"], later, made["b"]):
                # Neither has seen the other issue a second session.
                assert await sessions.notify(a.peer_id)
            with pytest.raises(
                Refused, match="another running node uses this node's key"
            ) as raised:
                await later.notify(a.peer_id)
            assert raised.value.exit_code == 77
            await made["b"].notify(a.peer_id)  # continues
            assert (made["b"].statistics().duplicates, later.statistics().duplicates) == (1, 1)


async def test_notifies_new_connections_more_often(autojump_clock):
    class Answers:
        def __init__(self):
            self.at = []

        def serve(self, *args, **options):
            pass

        async def request(self, peer, *args, **options):
            self.at.append(trio.current_time())
            return codec.encode(SessionResponse([]))

    answers = Answers()
    sessions = Sessions(
        answers,
        "own",
        KEY,
        FIRST.swarm,
        lambda: ["peer"],
        clock=itertools.count(1000).__next__,
        rng=random.Random(0),
    )
    began = trio.current_time()
    with trio.move_on_after(600):
        await sessions.run()
    gaps = [(at - began, after - at) for at, after in itertools.pairwise(answers.at)]
    assert all(5 <= gap <= 6 for at, gap in gaps if at < 59)
    assert all(15 <= gap <= 46 for at, gap in gaps if at > 61)
    assert len(gaps) > 20


async def test_earlier_session_is_not_a_twin(tmp_path):
    async with host(tmp_path / "a") as a:
        sessions = Sessions(
            a.requests, a.peer_id, KEY, FIRST.swarm, a.connected, clock=lambda: 1000.0
        )
        own, earlier, other = a.peer_id, bytes(16), bytes([1]) * 16
        assert not any(
            sessions.is_duplicate(own, Session(earlier, 0, at))
            for at in (900_000, 999_999, 1_000_000)
        )
        # The clock was set back, so the node issues no more stamps.
        assert not any(sessions.is_duplicate(own, Session(earlier, 0, 1_000_500)) for _ in range(3))
        assert [
            sessions.is_duplicate(own, Session(other, 0, at)) for at in (1_000_001, 1_000_002)
        ] == [
            False,
            True,
        ]
        assert not any(
            sessions.is_duplicate("somebody else", Session(other, 0, at))
            for at in (1_000_001, 1_000_002)
        )


async def test_earlier_fast_clock_does_not_end_a_restart(tmp_path):
    """Witnesses report two sessions of the earlier run, one later than the other."""

    class FakeWitness:
        def serve(self, *args, **options):
            pass

        async def request(self, peer, protocol, data, **options):
            sessions.append(data)
            return codec.encode(SessionResponse(reported))

    sessions: list[bytes] = []
    reported: list[bytes] = []

    def run(now):
        return Sessions(
            FakeWitness(),
            from_key(KEY).peer_id,
            KEY,
            FIRST.swarm,
            lambda: ["peer"],
            clock=lambda: now,
            stamp_file=tmp_path / "session-stamp",
        )

    day = 86_400.0
    earlier = run(1000.0 + day)
    for _ in range(3):
        assert await earlier.notify("peer")
    issued = list(sessions)
    for _ in range(3):  # restarts with the right clock
        later = run(1000.0)
        for frame in issued:
            reported[:] = [frame]
            assert await later.notify("peer")
        assert later.statistics().duplicates == 0
    # A copy of the directory running beside it is still detected.
    shutil.copy(tmp_path / "session-stamp", tmp_path / "copied")
    issued.clear()
    sessions.clear()
    twin = Sessions(
        FakeWitness(),
        from_key(KEY).peer_id,
        KEY,
        FIRST.swarm,
        lambda: ["peer"],
        clock=itertools.count(1000, 60).__next__,
        stamp_file=tmp_path / "copied",
    )
    reported[:] = []
    original = run(1000.0)
    for _ in range(2):
        await twin.notify("peer")
    issued = list(sessions)
    for frame in issued:
        reported[:] = [frame]
        # Both start at the same time, so the session ids decide which one ends.
        with contextlib.suppress(Refused):
            await original.notify("peer")
    assert original.statistics().duplicates == 1


@pytest.mark.parametrize("text", ["", "x", "-5", "1" * 400, "\u0663", "12\n13"])
async def test_ignores_a_damaged_stamp_file(tmp_path, text):
    (tmp_path / "stamp").write_text(text, encoding="utf-8")
    stamps = Stamps(lambda: 1000.0, tmp_path / "stamp")
    assert stamps.first == 1_000_000
    assert await stamps.next() == 1_000_001
    assert Stamps(lambda: 900.0, tmp_path / "stamp").first > 1_000_001


async def test_stamps_increase_when_the_clock_goes_back(tmp_path):
    clock = iter([1000.0, 1000.0, 5000.0, 10.0, 11.0, 6000.0]).__next__
    stamps = Stamps(clock, tmp_path / "stamp")
    issued = [await stamps.next() for _ in range(5)]
    assert issued == sorted(set(issued))
    assert issued[-1] == 6_000_000


def test_witness_memory_is_bounded_in_peers_and_time():
    witness = Witness()

    def observe(peer, number, now):
        session = Session(number.to_bytes(16, "big"), 0, 0)
        return witness.received(peer, session, seal_session(session, KEY, FIRST.swarm), now)

    assert observe("p", 1, 0.0) == []
    assert observe("p", 1, 1.0) == []
    assert len(observe("p", 2, 2.0)) == 1
    assert observe("q", 3, 2.0) == []
    assert len(observe("p", 3, 3.0)) == 2
    for number in range(4, 50):
        assert len(observe("p", number, 4.0)) <= 4
    assert observe("p", 50, 1000.0) == []
    for number in range(5000):
        observe(str(number), 1, 1000.0)
    assert len(witness) == 4096

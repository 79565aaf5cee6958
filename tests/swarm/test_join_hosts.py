"""Joining over real hosts: wrong peers in an invite, private swarms, successors, and a key used
twice."""

import shutil

import msgspec
import pytest
import trio

from protocol.generate.frames import KEY, OTHER_KEY
from swarmnode.config import Config, NetworkConfig
from swarmnode.daemon.member import Successors
from swarmnode.errors import Refused, RestartWanted, Unavailable
from swarmnode.p2p import manifests
from swarmnode.p2p.identity import from_key, load_or_create
from swarmnode.p2p.network import open_host
from swarmnode.swarm import join
from swarmnode.swarm.invite import Invite
from swarmnode.swarm.manifest_store import ManifestStore
from swarmnode.wire import limits
from swarmnode.wire.messages import Envelope
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


def serving(network, manifest=FIRST.signed, successor=None):
    signed = b"" if successor is None else successor.signed
    manifests.serve(network.requests, lambda swarm: (manifest, signed))
    network.neighbours.successor_of = lambda swarm: b"" if successor is None else successor.swarm
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
        found = await join.fetch(JOINER, invite(serving(a, successor=SECOND)), None)
    assert found.successor == SECOND


@pytest.mark.parametrize(
    ("manifest", "successor", "says"),
    [
        (SECOND.signed, None, "hashes to"),
        (refounded(FIRST), None, "signature"),
        (FIRST.signed[:-1], None, "malformed"),
        (b"\x93" * 60_000, None, "schema"),
        (b"\x93" * (limits.MANIFEST_BYTES + 1), None, "bounds: manifest is 0 to 65536"),
        (b"", None, "does not have the manifest"),
        (FIRST.signed, FIRST, "does not follow"),
        (FIRST.signed, succeeding(FIRST, OTHER_KEY), "does not follow"),
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
    following = Successors(config, opened, store, network)
    network.neighbours.on_successor = following.fetch
    return store, following


@pytest.mark.parametrize(("policy", "moves"), [("founder", True), ("ask", False), ("never", False)])
async def test_running_node_follows_a_successor_by_policy_only(tmp_path, policy, moves):
    async with host(tmp_path / "a") as a, host(tmp_path / "b", initial_peers=a.listen_addrs) as b:
        serving(a, FIRST.signed, SECOND)
        store, following = successors(b, tmp_path / "b", policy)
        await wait_connected(b)
        async with trio.open_nursery() as nursery:

            async def run():
                if moves:
                    with pytest.raises(RestartWanted):
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
        serving(a, FIRST.signed, succeeding(FIRST, models=[]))
        store, following = successors(b, tmp_path / "b", "founder")
        await wait_connected(b)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(following.run)
            await until(lambda: store.successor(FIRST) is not None)
            assert store.current() == FIRST.swarm
            nursery.cancel_scope.cancel()


# ---- one key, two processes


async def test_later_process_with_the_same_key_ends(tmp_path):
    async def run_copy():
        async with host(tmp_path / "c", initial_peers=a.listen_addrs) as copy:
            copy.neighbours.detect_duplicates()
            await wait_connected(copy)
            await copy.neighbours.ask(a.peer_id)
            await b.neighbours.ask(a.peer_id)  # which continues
            await copy.neighbours.ask(a.peer_id)

    async with host(tmp_path / "a") as a, host(tmp_path / "b", initial_peers=a.listen_addrs) as b:
        shutil.copytree(tmp_path / "b", tmp_path / "c", ignore=shutil.ignore_patterns("port"))
        b.neighbours.detect_duplicates()
        await wait_connected(b)
        with pytest.raises(Refused, match="another running node uses this node's key"):
            await run_copy()
        assert b.connected() == [a.peer_id]

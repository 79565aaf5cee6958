"""A partner that lies, dies or stalls over real sockets changes no bit of this node's weights. It
is counted by cause and loses reputation."""

import contextlib
from collections import Counter

import pytest
import trio

from swarmnode.averaging import codecs, gate
from swarmnode.demo.liar.weights import PAYLOAD_ATTACKS, PROTOCOL_ATTACKS, WeightLiar
from swarmnode.p2p import identity
from swarmnode.policy.ways import Row
from swarmnode.weights import discovery, exchange, local
from swarmnode.weights.fragments import pack
from swarmnode.weights.layout import CODECS
from swarmnode.weights.messages import Accepted, Busy, Here, Payload, Refused, Swap
from swarmnode.wire import ids
from tests.support.hosts import hosts
from tests.support.replica import CONFIG, SWARM, averaging, identical
from tests.support.waiting import until

pytestmark = pytest.mark.swarm

JUDGED = {
    "nan": "not_finite",
    "infinite": "not_finite",
    "huge": "bounds",
    "flipped": "probe",
    "shape": "shape",
    "dtype": "dtype",
    "names": "names",
    "checksum": "payload",
    "truncated": "payload",
    "longer": "payload",
    "codec": "payload",
    "fragment": "payload",
    "garbage": "payload",
}
FAILED = {
    "too_large": "size",
    "other_size": "broken",
    "other_root": "malformed",
    "not_offered": "broken",
    "wrong_hash": "hash",
    "silent": "no_payload",
    "denies": "withdrawn",
}
ENDED = {"no_answer": "unreachable", "other_id": "unreachable"}
BLAMELESS = {"other_size", "not_offered", "silent", "denies", "no_answer", "flipped"}
"""Failures that also occur with an honest partner that crashes or has learned differently."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(exchange, "COPY_WAIT_SECONDS", (2.0, 120.0))
    monkeypatch.setattr(discovery, "POLL_INTERVAL", 0.05)
    monkeypatch.setattr(gate, "LEAST_PROBE", 1)


@contextlib.asynccontextmanager
async def victim_and_liar(directory, *kinds, cfg=CONFIG, **options):
    """Yield a victim and a hostile node, which knows the victim's policy and is its only
    candidate."""
    async with hosts(directory, 2, swarm=SWARM) as (one, other), trio.open_nursery() as nursery:
        key = identity.load_or_create(directory / "0" / "identity.key").private_key
        async with averaging(one, key, directory / "0", cfg=cfg) as victim:
            victim.probe.remember([Row([1], [2])], [])
            victim.step(0.05)
            victim.replica.receive(local.SoloStep(0))
            await until(lambda: victim.counters.solo_steps_total == 1)
            liar = WeightLiar(other, kinds, **options)
            await nursery.start(liar.run)
            await liar.learn(one.peer_id)
            victim.step(0.05)
            if "flipped" in kinds:
                victim.judge.ideal = victim.weights()
            await until(lambda: victim.candidates() == 1)
            yield victim, liar, other.peer_id
            nursery.cancel_scope.cancel()


def score(victim, liar):
    return victim.network.reputation.score(liar, trio.current_time())


@pytest.mark.parametrize("kind", [*PAYLOAD_ATTACKS, *PROTOCOL_ATTACKS])
async def test_false_payload_changes_no_bit(kind, tmp_path):
    async with victim_and_liar(tmp_path, kind) as (victim, _, liar):
        before = victim.weights()
        victim.due()
        await until(lambda: victim.counters.solo_steps_total == 2)
        statistics = victim.service.statistics()
        assert identical(before, victim.weights())
        assert statistics.outcomes["applied"] == 0
        assert statistics.phase == "idle"
        if kind in JUDGED:
            assert +Counter(statistics.judged) == {JUDGED[kind]: 1}
            assert +Counter(statistics.failures) == {"gate": 1}
        elif kind in FAILED:
            assert +Counter(statistics.failures) == {FAILED[kind]: 1}
        else:
            assert statistics.outcomes[ENDED[kind]] == 1
        assert (score(victim, liar) < -1) == (kind not in BLAMELESS)
        assert not list((tmp_path / "0" / "weights").glob("in-*"))


@pytest.mark.parametrize("kind", ["nan", "huge", "flipped"])
@pytest.mark.parametrize("codec", CODECS)
async def test_rejects_hostile_values_in_every_codec(kind, codec, tmp_path, monkeypatch):
    monkeypatch.setattr(
        codecs,
        "encode_smallest",
        lambda tensors, layout, change, **given: codecs.encode(tensors, layout, codec, **given),
    )
    async with victim_and_liar(tmp_path, kind) as (victim, _, _):
        before = victim.weights()
        victim.due()
        refused = ("not_finite", "bounds", "norm_ratio", "probe")
        await until(lambda: any(victim.service.statistics().judged.get(name) for name in refused))
        assert identical(before, victim.weights())


async def test_honest_partner_is_averaged_the_same_way(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, _, liar):
        victim.due()
        await until(lambda: victim.outcome("applied") == 1)
        assert score(victim, liar) > 0


async def test_false_payload_suspends_its_sender(tmp_path):
    async with victim_and_liar(tmp_path, "nan") as (victim, liar, peer):
        for expected in range(1, 4):
            victim.due()
            await until(lambda expected=expected: victim.outcome("solo") == expected)
        assert +Counter(victim.service.statistics().judged) == {"not_finite": 1}
        assert isinstance(await liar.propose(victim.network.peer_id, follow=False), Busy)
        assert score(victim, peer) < -1


async def test_hostile_peer_stops_being_a_candidate(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "FALSE_DATA_SECONDS", 0.0)
    async with victim_and_liar(tmp_path, "nan") as (victim, _, peer):
        for expected in range(1, 7):
            # Otherwise it would fall far behind and be ignored for that reason.
            victim.counters.outer_clocks[0] = 1
            victim.due()
            await until(lambda expected=expected: victim.outcome("solo") == expected)
        assert not victim.network.is_allowed(peer)
        assert victim.service.statistics().judged["not_finite"] <= 6
        assert victim.candidates() == 0


async def test_vanishing_proposer_backs_off_longer_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "FAILURE_FACTOR", 0.2)
    async with victim_and_liar(tmp_path) as (victim, liar, peer):
        before, waits = victim.weights(), []
        for times in (1, 2):
            answer = await liar.propose(victim.network.peer_id, follow=False)
            assert isinstance(answer, Accepted)
            failed = lambda times=times: sum(victim.service.statistics().failures.values()) == times
            await until(failed)
            assert isinstance(await liar.propose(victim.network.peer_id, follow=False), Busy)
            backoff = victim.service._swaps._known(peer).backoff
            waits.append(backoff.until - trio.current_time())
            await trio.sleep(waits[-1] + 0.1)
        assert waits[1] > 1.2 * waits[0]
        assert identical(before, victim.weights())


async def test_flood_of_proposals_gets_one_swap(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, liar, _):
        answers = [await liar.propose(victim.network.peer_id, follow=False) for _ in range(40)]
        assert sum(isinstance(answer, Accepted) for answer in answers) == 1
        await until(lambda: victim.service.statistics().phase == "idle")
        copied, dropped = (
            [m for m in victim.to_trainer if isinstance(m, kind)]
            for kind in (local.TakeSnapshot, local.DropSwap)
        )
        assert [m.session for m in copied] == [m.session for m in dropped]
        assert len(copied) == 1


async def test_replayed_proposal_opens_no_session(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, liar, _):
        name = b"\x07" * 16
        assert isinstance(await liar.propose(victim.network.peer_id, name=name), Accepted)
        await until(lambda: victim.outcome("applied") == 1)
        again = await liar.propose(victim.network.peer_id, name=name)
        assert again == Refused(name, "over")
        assert victim.outcome("applied") == 1


async def test_other_policy_is_refused_without_blame(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, liar, peer):
        name = b"n" * 16
        foreign = Swap(name, bytes(32), 1023, 0, victim.blocks())
        assert await liar.ask(victim.network.peer_id, foreign) == Refused(name, "other_policy")
        elsewhere = Swap(name, victim.fingerprint(), 0, 0, pack({0, 1, 500}))
        assert await liar.ask(victim.network.peer_id, elsewhere) == Refused(name, "other_policy")
        assert victim.candidates() == 0
        assert score(victim, peer) >= 0


async def test_rejects_a_payload_of_another_swap(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, liar, peer):
        answer = await liar.ask(victim.network.peer_id, Payload(b"n" * 16))
        assert answer == Refused(b"n" * 16, "over")
        assert score(victim, peer) >= 0


async def test_claimed_lead_advances_the_outer_step_by_one(tmp_path):
    async with victim_and_liar(tmp_path, step=2**62) as (victim, liar, _):
        await liar.propose(victim.network.peer_id)
        await until(lambda: victim.outcome("applied") == 1)
        # First a solo step, then one with the partner that is ahead.
        assert victim.counters.outer_clocks == [3]
        await liar.ask(victim.network.peer_id, Here(liar.fingerprint, 2**63 - 1, liar.blocks))
        await until(lambda: victim.service.statistics().catch_up.source == "")
        assert victim.service.statistics().catch_up.adoptions == {}


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa4type\xa4swap", bytes(256), b"\x82" * 200])
async def test_garbage_costs_only_reputation(data, tmp_path):
    async with victim_and_liar(tmp_path) as (victim, liar, peer):
        with contextlib.suppress(Exception):
            await liar._network.requests.request(
                victim.network.peer_id,
                ids.WEIGHTS_PROTOCOL,
                data,
                deadline=5.0,
                max_response_bytes=256,
            )
        assert score(victim, peer) < -1
        victim.due()
        await until(lambda: victim.outcome("applied") == 1)


async def test_rejects_an_unsolicited_answer(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, liar, peer):
        with contextlib.suppress(Exception):
            await liar.ask(victim.network.peer_id, Accepted(b"n" * 16, 0, b"\1"))
        assert score(victim, peer) < -1
        assert victim.service.statistics().phase == "idle"


async def test_disconnected_partner_changes_nothing(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, _, peer):
        victim.hold = {local.TakeSnapshot}
        before = victim.weights()
        victim.due()
        await until(lambda: victim.service.statistics().phase == "copying")
        victim.network.disconnect(peer)
        await until(lambda: victim.service.statistics().phase == "idle")
        assert identical(before, victim.weights())


async def test_does_not_average_without_permission(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, liar, _):
        victim.may_average = False
        assert isinstance(await liar.propose(victim.network.peer_id, follow=False), Busy)
        victim.due()
        await until(lambda: victim.outcome("solo") == 1)
        assert victim.outcome("applied") == 0
        victim.may_average = True
        assert isinstance(await liar.propose(victim.network.peer_id, follow=False), Accepted)


async def test_accepts_no_proposal_without_a_trainer(tmp_path):
    """The node may load for minutes: a partner would wait for it and avoid it afterwards."""
    async with victim_and_liar(tmp_path) as (victim, liar, _):
        victim.hold = {local.TakeSnapshot}
        victim.due()
        await until(lambda: victim.service.statistics().phase == "copying")
        victim.service.trainer_left()
        assert victim.service.statistics().phase == "idle"
        assert isinstance(await liar.propose(victim.network.peer_id, follow=False), Busy)
        victim.hold = set()
        victim.connect()
        await trio.sleep(0.5)  # the node rests after a swap
        assert isinstance(await liar.propose(victim.network.peer_id, follow=False), Accepted)

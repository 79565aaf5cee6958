"""A partner that lies, dies or stalls, over real sockets: not one bit of ours changes, it is
counted by cause, and it costs standing."""

import contextlib

import pytest
import trio

from swarmnode.averaging import codecs, probe
from swarmnode.demo.liar.weights import MANNERS, PAYLOADS, WeightLiar
from swarmnode.errors import PeerError
from swarmnode.p2p import identity
from swarmnode.weights import discovery, driver, local, pairing
from swarmnode.weights.fragments import pack
from swarmnode.weights.layout import CODECS
from swarmnode.weights.messages import Accept, Busy, Here, Latest, Propose, Release
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
    "other_size": "failed",
    "other_root": "malformed",
    "not_offered": "failed",
    "wrong_hash": "hash",
}
ENDED = {
    "silent": "open_timeout",
    "release": "released",
    "no_answer": "propose_timeout",
    "other_nonce": "unreachable",
}
BLAMELESS = {"other_size", "not_offered", "silent", "release", "no_answer", "flipped"}
"""What an honest partner that crashes, or has learned something else, looks like too."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(driver, "OPEN_SECONDS", (2.0, 120.0))
    monkeypatch.setattr(discovery, "POLL_INTERVAL", 0.05)
    monkeypatch.setattr(probe, "LEAST_PROBE", 1)


@contextlib.asynccontextmanager
async def victim_and_liar(directory, *kinds, cfg=CONFIG, **options):
    """The liar knows the victim's policy and is its only candidate."""
    async with hosts(directory, 2, swarm=SWARM) as (one, other), trio.open_nursery() as nursery:
        key = identity.load_or_create(directory / "0" / "identity.key").private_key
        async with averaging(one, key, directory / "0", cfg=cfg) as victim:
            victim.probe.remember([([1], [2])], [])
            victim.step(0.05)
            victim.due()
            liar = WeightLiar(other, kinds, **options)
            await nursery.start(liar.run)
            await published(victim, liar)
            await liar.learn(one.peer_id)
            victim.step(0.05)
            if "flipped" in kinds:
                victim.judge.ideal = victim.weights()
            await until(lambda: victim.candidates() == 1)
            yield victim, liar, other.peer_id
            nursery.cancel_scope.cancel()


async def published(victim, liar):
    """Until the victim's copy can be pulled: its size."""
    with trio.fail_after(30):
        while True:
            with contextlib.suppress(PeerError):
                return (
                    await liar.ask(
                        victim.network.peer_id, Latest(victim.fingerprint(), 0, victim.blocks())
                    )
                ).size
            await trio.sleep(0.05)


def score(victim, liar):
    return victim.network.reputation.score(liar, trio.current_time())


@pytest.mark.parametrize("kind", [*PAYLOADS, *MANNERS])
async def test_a_lie_changes_not_one_bit(kind, tmp_path):
    async with victim_and_liar(tmp_path, kind) as (victim, _, liar):
        before = victim.weights()
        victim.due()
        await until(lambda: victim.outcome("solo") == 2)
        statistics = victim.service.statistics()
        assert identical(before, victim.weights())
        assert statistics.outcomes["applied"] == 0
        assert statistics.phase == "idle"
        if kind in JUDGED:
            assert statistics.judged == {JUDGED[kind]: 1}
        elif kind in FAILED:
            assert statistics.failures == {FAILED[kind]: 1}
        else:
            assert statistics.outcomes[ENDED[kind]] == 1
        assert (score(victim, liar) < -1) == (kind not in BLAMELESS)
        assert not list((tmp_path / "0" / "weights").glob("in-*"))


@pytest.mark.parametrize("kind", ["nan", "huge", "flipped"])
@pytest.mark.parametrize("codec", CODECS)
async def test_hostile_values_are_refused_in_every_codec(kind, codec, tmp_path, monkeypatch):
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


async def test_an_honest_partner_is_taken_by_the_same_road(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, _, liar):
        victim.due()
        await until(lambda: victim.outcome("applied") == 1)
        assert score(victim, liar) > 0


async def test_after_one_lie_no_other_is_listened_to_for_a_while(tmp_path):
    async with victim_and_liar(tmp_path, "nan") as (victim, liar, peer):
        for expected in range(2, 5):
            victim.due()
            await until(lambda expected=expected: victim.outcome("solo") == expected)
        assert victim.service.statistics().judged == {"not_finite": 1}
        assert isinstance(await liar.propose(victim.network.peer_id, follow=False), Busy)
        assert score(victim, peer) < -1


async def test_lies_are_not_listened_to_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "AVOID_SECONDS", 0.0)
    monkeypatch.setattr(pairing, "WASTED", 0.0)
    async with victim_and_liar(tmp_path, "nan") as (victim, _, peer):
        for expected in range(2, 8):
            # or it would be far behind us in the end, and not looked at
            victim.counters.outer_clocks[0] = 1
            victim.due()
            await until(lambda expected=expected: victim.outcome("solo") == expected)
        assert not victim.network.welcome(peer)
        assert victim.service.statistics().judged["not_finite"] <= 6
        assert victim.candidates() == 0


async def test_who_proposes_and_vanishes_is_avoided_and_worse_off_the_second_time(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(pairing, "WASTED", 0.1)
    async with victim_and_liar(tmp_path) as (victim, liar, peer):
        before = victim.weights()
        for times in (1, 2):
            assert isinstance(await liar.propose(victim.network.peer_id, follow=False), Accept)
            await until(lambda times=times: victim.outcome("vanished") == times)
            assert isinstance(await liar.propose(victim.network.peer_id, follow=False), Busy)
            assert (score(victim, peer) < 0) == (times == 2)
            await trio.sleep(0.6)
        assert identical(before, victim.weights())


async def test_a_flood_of_proposals_gets_one_accept_and_leaves_nothing_behind(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, liar, _):
        answers = [await liar.propose(victim.network.peer_id, follow=False) for _ in range(40)]
        assert sum(isinstance(answer, Accept) for answer in answers) == 1
        await until(lambda: victim.service.statistics().phase == "idle")
        copied, dropped = (
            [m for m in victim.to_trainer if isinstance(m, kind)]
            for kind in (local.TakeSnapshot, local.DropExchange)
        )
        assert [m.session for m in copied] == [m.session for m in dropped]
        assert len(copied) == 1


async def test_a_replayed_proposal_opens_nothing(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, liar, _):
        nonce = b"\x07" * 16
        assert isinstance(await liar.propose(victim.network.peer_id, nonce=nonce), Accept)
        await until(lambda: victim.outcome("applied") == 1)
        assert isinstance(await liar.propose(victim.network.peer_id, nonce=nonce), Busy)
        assert victim.outcome("applied") == 1


async def test_another_fingerprint_or_other_layers_are_told_so_and_blameless(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, liar, peer):
        answer = await liar.ask(
            victim.network.peer_id, Propose(b"n" * 16, bytes(32), 1023, 0, victim.blocks())
        )
        assert answer == Busy(b"n" * 16, "other_policy")
        elsewhere = pack({0, 1, 500})
        answer = await liar.ask(
            victim.network.peer_id, Propose(b"m" * 16, victim.fingerprint(), 0, 0, elsewhere)
        )
        assert answer == Busy(b"m" * 16, "other_policy")
        assert victim.candidates() == 0
        with pytest.raises(PeerError):  # what it published is of layers that are not asked for
            await liar.ask(victim.network.peer_id, Latest(victim.fingerprint(), 0, elsewhere))
        assert score(victim, peer) >= 0


async def test_claims_of_a_great_lead_move_the_clock_by_one(tmp_path):
    async with victim_and_liar(tmp_path, step=2**62) as (victim, liar, _):
        await liar.propose(victim.network.peer_id)
        await until(lambda: victim.outcome("applied") == 1)
        # one alone, and this one with the one that is ahead
        assert victim.counters.outer_clocks == [3]
        await liar.ask(victim.network.peer_id, Here(liar.fingerprint, 2**63 - 1, liar.blocks))
        await until(lambda: victim.service.statistics().catch_up.source == "")
        assert victim.service.statistics().catch_up.adoptions == {}


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x81\xa4type\xa7propose", bytes(256), b"\x82" * 200]
)
async def test_garbage_costs_standing_and_nothing_else(data, tmp_path):
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


async def test_an_answer_to_nothing_is_refused(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, liar, peer):
        with contextlib.suppress(Exception):
            await liar.ask(victim.network.peer_id, Accept(b"n" * 16, b"n" * 16, 0, 0, b"\1"))
        assert score(victim, peer) < -1
        assert victim.service.statistics().phase == "idle"


async def test_a_partner_that_is_cut_off_in_the_middle_leaves_everything_as_it_was(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, _, peer):
        victim.hold = {local.TakeSnapshot}
        before = victim.weights()
        victim.due()
        await until(lambda: victim.service.statistics().phase == "paired")
        victim.network.disconnect(peer)
        await until(lambda: victim.service.statistics().phase == "idle")
        assert identical(before, victim.weights())


async def test_a_node_that_may_not_average_proposes_accepts_and_leaves_nothing(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, liar, _):
        latest = Latest(victim.fingerprint(), 0, victim.blocks())
        victim.may_average = False
        assert isinstance(await liar.propose(victim.network.peer_id, follow=False), Busy)
        with pytest.raises(PeerError):
            await liar.ask(victim.network.peer_id, latest)
        victim.due()
        await until(lambda: victim.outcome("solo") == 2)
        assert victim.outcome("applied") == 0
        victim.may_average = True
        assert await published(victim, liar) > 0
        assert isinstance(await liar.propose(victim.network.peer_id, follow=False), Accept)


async def test_a_node_without_a_trainer_accepts_no_exchange(
    tmp_path,
):
    """It may load for minutes: whoever paired with it meanwhile would leave it alone for as long
    afterwards."""
    async with victim_and_liar(tmp_path) as (victim, liar, _):
        latest = Latest(victim.fingerprint(), 0, victim.blocks())
        victim.hold = {local.TakeSnapshot}
        victim.due()
        await until(lambda: victim.service.statistics().phase == "paired")
        victim.service.trainer_left()
        assert victim.service.statistics().phase == "idle"
        assert isinstance(await liar.propose(victim.network.peer_id, follow=False), Busy)
        # what it has published may be pulled all the same
        assert await liar.ask(victim.network.peer_id, latest)
        victim.hold = set()
        victim.connect()
        assert isinstance(await liar.propose(victim.network.peer_id, follow=False), Accept)


async def test_who_agrees_and_takes_it_back_is_left_alone_for_longer_than_it_took(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, liar, _):
        began = trio.current_time()
        answer = await liar.propose(victim.network.peer_id, follow=False)
        assert isinstance(answer, Accept)
        await trio.sleep(1.0)
        await liar.ask(victim.network.peer_id, Release(answer.session))
        await until(lambda: victim.outcome("released") == 1)
        for after in (2.0, 3.5):
            await trio.sleep(began + after - trio.current_time())
            assert isinstance(await liar.propose(victim.network.peer_id, follow=False), Busy)
        await trio.sleep(began + 8.0 - trio.current_time())
        assert isinstance(await liar.propose(victim.network.peer_id, follow=False), Accept)

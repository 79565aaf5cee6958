"""A partner that lies, dies or stalls over real sockets changes no bit of this node's weights. It
is counted by cause and loses reputation."""

import contextlib
from collections import Counter

import pytest
import trio

from swarmnode.demo.liar.weights import PAYLOAD_ATTACKS, PROTOCOL_ATTACKS, WeightLiar
from swarmnode.policy.ways import Row
from swarmnode.weights import local
from swarmnode.weights.messages import Accepted, Refused
from swarmnode.weights.network import discovery, swaps
from swarmnode.weights.trainer import gate
from tests.support.hosts import hosts
from tests.support.replica import SWARM, averaging, identical
from tests.support.waiting import until

pytestmark = pytest.mark.swarm

JUDGED = {
    "nan": "not_finite",
    "infinite": "not_finite",
    "huge": "bounds",
    "flipped": "probe",
    "shape": "shape",
    "dtype": "shape",
    "names": "shape",
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
    monkeypatch.setattr(swaps, "COPY_WAIT_SECONDS", (2.0, 120.0))
    monkeypatch.setattr(discovery, "POLL_INTERVAL", 0.05)
    monkeypatch.setattr(gate, "LEAST_PROBE", 1)


@contextlib.asynccontextmanager
async def victim_and_liar(directory, *kinds):
    """Yield a victim and a hostile node, which knows the victim's policy and is its only
    candidate."""
    async with hosts(directory, 2, swarm=SWARM) as (one, other), trio.open_nursery() as nursery:
        async with averaging(one, directory / "0") as victim:
            victim.probe.remember([Row([1], [2])], [])
            victim.step(0.05)
            victim.replica.receive(local.SoloStep(0, victim.blocks()))
            await until(lambda: victim.counters.solo_steps_total == 1)
            liar = WeightLiar(other, kinds)
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


async def test_replayed_proposal_opens_no_session(tmp_path):
    async with victim_and_liar(tmp_path) as (victim, liar, _):
        name = b"\x07" * 16
        assert isinstance(await liar.propose(victim.network.peer_id, name=name), Accepted)
        await until(lambda: victim.outcome("applied") == 1)
        again = await liar.propose(victim.network.peer_id, name=name)
        assert again == Refused(name, "over")
        assert victim.outcome("applied") == 1

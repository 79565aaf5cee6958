"""What the driver makes of an exchange, from a proposal of a peer's to what it keeps of it. No
network, no trainer, no files."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from swarmnode.weights import local
from swarmnode.weights.background import Background
from swarmnode.weights.discovery import Discovery
from swarmnode.weights.driver import ExchangeDriver
from swarmnode.weights.fragments import blocks_of
from swarmnode.weights.layout import make_layout
from swarmnode.weights.messages import Accept, Busy, Here, Propose, Ready
from swarmnode.weights.payload_store import PayloadOffer
from swarmnode.weights.replica import LocalReplica

LAYOUT = make_layout([("skill", (8,), "float32")])
BLOCKS = blocks_of(["skill"])
SIZE = 100
EVERY = 10


class StubStore:
    """Everything that is offered is of `size`, and everything is fetched in `takes` seconds."""

    def __init__(self):
        self.takes, self.size, self.offered, self.withdrawn = 1.0, SIZE, [], []

    async def open(self, path):
        await trio.lowlevel.checkpoint()
        return SimpleNamespace(path=Path(path), source=SimpleNamespace(size=self.size))

    def publish(self, *copy):
        pass

    def offer(self, payload, until, audience):
        self.offered.append(PayloadOffer(b"t" * 32, b"r" * 32, self.size, payload.path, until))
        return self.offered[-1]

    def withdraw(self, offer):
        self.withdrawn.append(offer)

    def expire(self, now):
        pass

    def new_path(self):
        return Path("in")

    def discard(self, path):
        pass

    async def fetch(self, *remote):
        await trio.sleep(self.takes)


class Driven:
    """A driver, and what it says to everybody."""

    def __init__(self):
        self.to_trainer, self.accepted, self.deadlines = [], [], {}
        self.store, self.replica, self.background = StubStore(), LocalReplica(), Background()
        network = SimpleNamespace(
            peer_id="me",
            connected=lambda: ["a", "b"],
            welcome=lambda peer: True,
            accepted=self.accepted.append,
            rejected=lambda *why: None,
            bulk=SimpleNamespace(deadline=lambda peer, size: self.deadlines.get(peer, 10.0)),
        )
        self.replica.start(
            local.ReplicaFacts(LAYOUT, 1, [20], False), bytes(32), bytes(32), bytes(32)
        )
        self.discovery = Discovery(network, None, self.replica, bytes(32), lambda: 0.0)
        self.answer = self._silence
        requests = SimpleNamespace(ask=lambda *asked: self.answer(*asked), notify=self._silence)
        self.driver = ExchangeDriver(
            network,
            requests,
            self.replica,
            self.discovery,
            self.store,
            lambda m: not self.to_trainer.append(m),
            self.background,
            EVERY,
        )
        for peer in ("a", "b"):
            self.discovery.received(peer, Here(self.replica.fingerprint, 20, BLOCKS))
        self.driver.trainer_started()
        self._proposals = 0

    async def _silence(self, *asked):
        await trio.sleep_forever()

    def proposes(self, peer):
        """The answer to a new proposal of `peer`, and the session that it would begin."""
        self._proposals += 1
        nonce = self._proposals.to_bytes(16, "big")
        return self.driver.proposed(
            peer, Propose(nonce, self.replica.fingerprint, 0, 20, BLOCKS)
        ), nonce

    def is_listened_to(self, peer):
        return isinstance(self.proposes(peer)[0], Accept)

    def written(self, session):
        self.driver.snapshot_written(local.SnapshotWritten(session, 0, "out", 20, BLOCKS))

    def ready(self, peer, session):
        self.driver.ready(peer, Ready(session, b"t" * 32, b"r" * 32, SIZE, 20))

    async def exchange(self, peer, outcome, committed=False, judged=1.0):
        """One that `peer` began, up to what our trainer makes of it `judged` seconds after it is
        here."""
        answer, session = self.proposes(peer)
        assert isinstance(answer, Accept)
        self.written(session)
        self.ready(peer, session)
        await trio.sleep(self.store.takes + judged)
        assert self.to_trainer[-1].session == session
        assert isinstance(self.to_trainer[-1], local.ApplyPayload)
        self.driver.exchange_ended(
            local.ExchangeEnded(session, 0, peer, outcome, committed, 20 + committed)
        )
        await trio.sleep(0.1)


@contextlib.asynccontextmanager
async def driving():
    driven = Driven()
    async with trio.open_nursery() as nursery:
        await nursery.start(driven.background.run)
        nursery.start_soon(driven.driver.run)
        yield driven
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("outcome", ["probe", "too_far", "lora_residual"])
async def test_whose_weights_are_refused_is_left_alone_for_a_while_and_for_longer_the_next_time(
    outcome, autojump_clock
):
    async with driving() as driven:
        driven.store.takes = 9.0
        for alone in (40.0, 200.0, 1000.0, 1000.0):
            await driven.exchange("a", outcome)
            await trio.sleep(alone - 1.0)
            assert not driven.is_listened_to("a")
            await trio.sleep(1.0)
        assert not driven.accepted
        assert driven.is_listened_to("b")


async def test_whose_exchanges_were_taken_back_is_left_alone_for_a_while(autojump_clock):
    async with driving() as driven:
        await driven.exchange("a", "accepted", committed=True)
        driven.driver.reverted("a")
        assert not driven.is_listened_to("a")
        await trio.sleep(20.0)
        assert driven.is_listened_to("a")


async def test_who_proposes_again_at_once_is_told_for_how_long_it_is_not_accepted_and_others_are(
    autojump_clock,
):
    """Two candidates: 0.4 of the time between two outer steps for each."""
    async with driving() as driven:
        driven.driver.outer_step_due(local.OuterStepDue(0, 20, 100.0 / EVERY), propose=True)
        await trio.sleep(20.0)
        assert driven.driver.statistics().outcomes["solo"] == 1
        await driven.exchange("a", "accepted", committed=True)
        await trio.sleep(39.9)
        assert driven.proposes("a")[0].retry_seconds == 40
        assert driven.is_listened_to("b")


async def test_who_is_far_behind_is_served_and_gains_nothing_by_that(autojump_clock):
    async with driving() as driven:
        driven.store.takes = 9.0
        await driven.exchange("a", "lagging", committed=True)
        assert isinstance(driven.proposes("a")[0], Busy)
        assert not driven.accepted
        assert driven.driver.statistics().outcomes["applied"] == 1


async def test_who_sends_slowly_is_left_alone_for_a_while_though_it_was_good(autojump_clock):
    async with driving() as driven:
        for takes, listened in ((9.0, True), (12.0, False)):
            driven.store.takes = takes
            await driven.exchange("a", "accepted", committed=True)
            await trio.sleep(30.0)
            assert driven.is_listened_to("a") is listened
            if listened:
                await trio.sleep(200.0)  # until that is given up
        assert driven.accepted == ["a", "a"]


async def test_where_outer_steps_are_close_together_who_is_refused_by_everybody_pulls_within_one(
    autojump_clock,
):
    """It stepped alone, with up to two seconds between two tries, and a newcomer that was left
    alone by both others drifted away."""

    async def busy(peer, message, *deadline):
        await trio.sleep(0.01)
        return (
            Busy(message.nonce, "busy")
            if isinstance(message, Propose)
            else Ready(b"", b"t" * 32, b"r" * 32, SIZE, 20)
        )

    async with driving() as driven:
        driven.store.takes, driven.answer = 0.05, busy
        for _ in range(50):
            driven.driver.outer_step_due(local.OuterStepDue(0, 20, 0.4 / EVERY), propose=True)
            await trio.sleep(0.3)
            arrived = driven.to_trainer[-1]
            assert isinstance(arrived, local.ApplyPayload)
            driven.driver.exchange_ended(
                local.ExchangeEnded(arrived.session, 0, arrived.peer, "clipped", True, 21)
            )
            await trio.sleep(0.1)
        outcomes = driven.driver.statistics().outcomes
        assert outcomes["pulled"] == 50
        assert outcomes["busy"] == 100


@pytest.mark.parametrize(
    ("interval", "alone"), [(0.5, (0.8, 2.0, 10.0)), (60.0, (0.8, 20.0, 100.0))]
)
async def test_where_outer_steps_are_close_together_nobody_is_left_alone_for_hundreds_of_them(
    interval, alone, autojump_clock
):
    async with driving() as driven:
        driven.driver.outer_step_due(local.OuterStepDue(0, 20, interval / EVERY), propose=False)
        driven.store.takes = 0.1
        for seconds in alone:
            await driven.exchange("a", "too_far", judged=0.1)
            await trio.sleep(seconds - 0.2)
            assert not driven.is_listened_to("a")
            await trio.sleep(0.2)
        assert driven.is_listened_to("a")


@pytest.mark.parametrize("outcome", ["local", "own_not_finite"])
async def test_what_went_wrong_here_is_held_against_nobody(outcome, autojump_clock):
    async with driving() as driven:
        await driven.exchange("a", outcome)
        assert driven.is_listened_to("a")


async def test_a_partner_goes_on_fetching_though_its_own_weights_were_refused(autojump_clock):
    async with driving() as driven:
        await driven.exchange("a", "probe")
        assert driven.store.offered
        assert not driven.store.withdrawn


async def test_a_copy_is_offered_for_as_long_as_a_partner_needs_that_we_serve_slowly(
    autojump_clock,
):
    """A quarter of 7 B over 100 Mbit/s here and 10 back."""
    async with driving() as driven:
        driven.store.size, driven.deadlines["a"] = 1_950_000_000, 470.0
        answer, session = driven.proposes("a")
        assert isinstance(answer, Accept)
        driven.written(session)
        await trio.sleep(1.0)
        (offer,) = driven.store.offered
        assert offer.until - trio.current_time() > 8 * driven.store.size / 10e6


@pytest.mark.parametrize("ready", [True, False])
async def test_who_is_there_when_our_own_copy_is_late_is_not_blamed(ready, autojump_clock):
    async with driving() as driven:
        answer, session = driven.proposes("a")
        assert isinstance(answer, Accept)
        if ready:
            driven.ready("a", session)
        await trio.sleep(6.0)
        assert driven.driver.statistics().phase == "idle"
        assert driven.is_listened_to("a") is ready
        assert driven.driver.totals.failures == ({"snapshot": 1} if ready else {})


async def test_large_copies_have_longer_to_be_written(autojump_clock):
    async with driving() as driven:
        driven.replica.limits = [2_000_000_000]
        driven.driver.trainer_started()
        driven.driver.outer_step_due(local.OuterStepDue(0, 20, 1.0), propose=False)
        assert isinstance(driven.proposes("a")[0], Accept)
        await trio.sleep(26.0)
        assert driven.driver.statistics().phase == "paired"
        await trio.sleep(2.0)
        assert driven.driver.statistics().phase == "idle"

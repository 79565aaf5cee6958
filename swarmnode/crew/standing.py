"""One node's standing in a crew: what is remembered from one event to the next, what may be read of it, and how it speaks. No torch.

`control.CrewControl` decides; this is what it decides with.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Final

import msgspec

from swarmnode.crew import events as ev
from swarmnode.crew import local, messages
from swarmnode.crew.backoff import PeerBackoff
from swarmnode.crew.detector import Detector
from swarmnode.crew.events import ControlStatistics, CrewState, Settings
from swarmnode.crew.forming import Forming
from swarmnode.crew.holding import Holding
from swarmnode.crew.messages import Leave, Offer, Record, Status, Voter
from swarmnode.crew.roster import Acceptor, Lease, Sign, Verify, remembered_incarnation
from swarmnode.crew.succession import Proposing
from swarmnode.crew.view import View

ENDED: Final = 32
"""Crews that this node has left, so that late messages of theirs bring nobody back."""
PARTED: Final = 256
"""Witnesses that left a crew of ours, so that they are not named again and again."""
OFFER_TRIES: Final = 3
"""Of one offer to a peer that does not answer."""
DOUBLINGS: Final = 7
"""Of the time until a crew that runs takes another witness: whoever becomes one and leaves, again and again, costs it ever fewer pauses."""
SENT: Final = 64
"""Heartbeats whose answers may still come."""


class Standing:
    """Of one node in at most one crew."""

    def __init__(self, me: str, sign: Sign, verify: Verify, settings: Settings, rng: random.Random, memory: bytes = b"") -> None:
        self.me, self.settings = me, settings
        self._verify, self._rng = verify, rng
        known = remembered_incarnation(memory)
        self.acceptor = Acceptor(Voter(me, known or rng.randbytes(messages.INCARNATION_BYTES)), sign, verify)
        if known:
            self.acceptor.remember(memory)
        self._detector = Detector(settings.heartbeat_seconds, settings.tick_seconds, settings.phi, settings.sigma_floor_seconds)
        self._lease = Lease(settings.lease_seconds)
        self._forming = Forming(me, settings, rng)
        self._proposing = Proposing(self.acceptor, settings, rng)
        self._notes = Counter(dict.fromkeys(ev.NOTES, 0))
        # this event
        self._now = 0.0
        self._started = False
        self._out: list[ev.Action] = []
        self._changed = False
        """Whether an event may have consequences beyond its own answer; most heartbeats have none."""
        self._announce = False
        """Whether the others are to hear our status now."""
        # the neighbourhood
        self._connected: dict[str, None] = {}
        self._gone: dict[str, float] = {}
        self._offered = -1e9
        self._said: Offer | None = None
        """What the others were told last."""
        self._again: dict[str, tuple[float, int]] = {}
        """Peer → (when to offer again what it did not answer, how often that was)."""
        self._foreign: dict[str, float] = {}
        """Peers that do not speak of crews → until when they are offered nothing."""
        self._ended: deque[bytes] = deque(maxlen=ENDED)
        self._parted: deque[Voter] = deque(maxlen=PARTED)
        # the own trainer and crew
        self._own = Holding(settings.slow_steps)
        self._draining: tuple[str, float] | None = None
        self._view: View | None = None
        self._sequence = 0
        self._sent: dict[int, float] = {}
        self._beat = -1e9
        self._running = self._ever_ran = self._fenced = False
        self._patience = PeerBackoff(settings.wait_seconds)
        self._signers: tuple[str, ...] = ()
        """Of the record with which we came to the crew."""
        self._stepped = False
        """Our stage has taken a step in this crew."""
        self._worked = False
        """It had something to do."""
        self._idle: tuple[float, int] | None = None
        """Since when the crew has run without any work for our stage, and the count of its pieces by then; None once there was some."""
        self._standing: float | None = None
        self._ran_from = 0.0
        """Since when the crew runs, where it does."""
        self._seconded = 0
        """Records that this crew made for nothing but a witness."""
        self._trouble: float | None = None
        """Since when the crew whose witness we are may need our vote; None while it does not."""
        self._recovery_seconds: float | None = None
        self._heard_crew = 0.0

    # ---- what others may read ---------------------------------------------------------------------------------------------

    @property
    def roster(self) -> Record | None:
        return self.acceptor.record

    @property
    def stage(self) -> int | None:
        """That we hold by the present record."""
        return None if self._view is None else self._view.stage

    @property
    def running(self) -> bool:
        """Whether steps are to be taken, as far as this node knows."""
        return self._running

    @property
    def may_average(self) -> bool:
        """Whether the own stage may be averaged with other crews' and rollouts be published: never in PROBATION, fenced, or in doubt."""
        return self._running and not self._fenced and self._own.status.phase == "active"

    @property
    def is_free(self) -> bool:
        """Whether we could take a seat in another crew: we hold none, and our vote is not needed where we have one.

        No crew keeps its witness by being in trouble for ever.
        """
        if self._view is None:
            return True
        return self._view.stage is None and (self._trouble is None or self._now - self._trouble >= self.settings.wait_seconds)

    def within_lease(self, now: float) -> bool:
        """Whether a majority is known to have heard us lately, also where no event has told control how late it is."""
        return self._view is not None and now < self._lease.ends(self.me, now)

    @property
    def state(self) -> CrewState:
        if self._view is None:
            return "none"
        if self._running or (self._view.stage is None and self._trouble is None):
            return "running"
        if not self._ever_ran and self._view.record.epoch == 1:
            return "forming"
        return "paused" if self._view.ran else "recovering"

    def statistics(self) -> ControlStatistics:
        view = self._view
        return ControlStatistics(
            state=self.state,
            crew="" if view is None else view.crew.hex(),
            roster_epoch=0 if view is None else view.record.epoch,
            stage=self.stage,
            slots=() if view is None else view.slots(self._detector),
            fenced=self._fenced,
            offers=len(self._forming.offers(self._now)),
            notes=dict(self._notes),
            standing_seconds=self._stood() if self.stage is not None else 0.0 if self._trouble is None else self._now - self._trouble,
            recovery_seconds=self._recovery_seconds,
        )

    # ---- what it wants done -----------------------------------------------------------------------------------------------

    def _do(self, action: ev.Action) -> None:
        self._out.append(action)

    def _note(self, what: str, detail: str = "") -> None:
        self._notes[what] += 1
        self._do(ev.Note(what, detail))

    def _persist(self) -> None:
        self._do(ev.Persist(self.acceptor.memory()))

    def _tell(self, message: local.ToTrainer) -> None:
        if self._own.trainer is not None:
            self._do(ev.TellTrainer(message))

    def _is_member(self, peer: str) -> bool:
        return self._view is not None and peer in self._view.members

    def _set_status(self, new: Status) -> None:
        before, status = self._own.status, self._own.set(new)
        if self._view is None or self._view.stage is None:
            return
        self._view.take(self.me, status, self._now)
        changed = (before.phase, before.broken) != (status.phase, status.broken)
        if changed or (not self._running and (before.step, before.journal) != (status.step, status.journal)):
            self._announce = True

    def _stood(self) -> float:
        """Seconds without steps."""
        return 0.0 if self._standing is None else self._now - self._standing

    @property
    def _offers_itself(self) -> bool:
        return self.stage is None and self._own.trainer is not None and self._draining is None

    def _send_heartbeats(self) -> None:
        self._announce = False
        if self._view is None:
            return
        self._beat = self._now
        self._sequence += 1
        self._sent[self._sequence] = self._now
        self._sent.pop(self._sequence - SENT, None)
        for peer in self._view.others:
            self._send_heartbeat(peer)

    def _send_heartbeat(self, peer: str) -> None:
        assert self._view is not None
        self._do(ev.Send(peer, messages.Heartbeat(self._view.crew, self._view.record.epoch, self._sequence, self._own.status)))

    def _send_leave(self, reason: str) -> None:
        assert self._view is not None
        leave = Leave(self._view.crew, self._view.record.epoch, reason[: messages.REASON_BYTES])
        for peer in self._view.others:
            self._do(ev.Send(peer, leave))

    def _send_offers(self) -> None:
        if self._offers_itself:
            self._offered, self._said = self._now, self._own.offer(self.acceptor.me.incarnation)
            self._again.clear()
            for peer in self._connected:
                self._send_offer(peer)

    def _take_back_offer(self) -> None:
        """Nobody is to wait for us: we are in a crew, or have no trainer."""
        if self._said is None:
            return
        nothing = msgspec.structs.replace(self._said, memory=0.0, speed=0.0)
        self._said = None
        for peer in self._connected:
            if not self._is_member(peer) and self._now >= self._foreign.get(peer, -1e18):
                self._do(ev.Send(peer, nothing))

    def _send_offer(self, peer: str) -> None:
        if not self.is_free and not self._is_member(peer):
            return
        if self._now >= self._foreign.get(peer, -1e18) and not self._patience.waits(peer, self._now):
            self._do(ev.Send(peer, self._own.offer(self.acceptor.me.incarnation)))

    def _repeat_offers(self) -> None:
        """To those who did not answer the last one."""
        due = [peer for peer, (when, _) in self._again.items() if self._now >= when]
        for peer in due if self._offers_itself else ():
            when, tries = self._again[peer]
            self._again[peer] = (when + 1e9, tries)  # until that is answered, or not
            self._send_offer(peer)

    def _offer_answered(self, peer: str, answer: messages.Answer | None, foreign: bool) -> None:
        if foreign and peer in self._connected:
            self._foreign[peer] = self._now + self.settings.foreign_seconds
        tries = self._again.get(peer, (0.0, 0))[1]
        if answer is None and not foreign and peer in self._connected and tries < OFFER_TRIES:
            self._again[peer] = (self._now + self.settings.offer_retry_seconds, tries + 1)
        else:
            self._again.pop(peer, None)

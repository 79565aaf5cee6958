"""How a node finds its partner and what becomes of the exchange: (state, event, now) → (state,
actions). No clock, no I/O, no torch.

    IDLE ──due──▶ PROPOSED ──ACCEPT──▶ PAIRED ──both copies──▶ TRANSFER ──bytes──▶ APPLY ──commit──▶
    IDLE
      ▲              │ BUSY, silence: back to IDLE for a moment, next candidate; after three a
      one-sided pull (TRANSFER), then a solo step
      └──PROPOSE: ACCEPT, straight to PAIRED

A PROPOSE is answered the moment it arrives, whatever we are doing: ACCEPT when idle, BUSY
otherwise, and ACCEPT when we have proposed to the same peer ourselves (then both know, and the
session is that of the lower peer id). Nothing is queued and nobody waits for somebody who waits, so
there are no cycles to wait in; every state but IDLE has a deadline, so lost messages cost time and
nothing else. The moment in IDLE, random and up to `backoff_seconds`, is for others to find us: a
node that always proposes can never be proposed to.

`Pairing` keeps the state and counts; `advance` is the machine.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec

from swarmnode.weights.messages import NONCE_BYTES, Accept, Busy, PairingMessage, Propose, Release

FINISHED: Final = 32
"""Sessions that are remembered, so that an old PROPOSE that arrives again opens nothing."""
AVOIDED: Final = 256
MET: Final = 256
RESTING: Final = 32
AVOID_FACTOR: Final = 5
WASTED: Final = 4.0
"""A peer whose exchange with us came to nothing is left alone for so many times as long as it took,
AVOID_FACTOR times as long when it happens again before one has gone well, and so on. (Without it
four in sixteen that proposed all the time and sent as slowly as they might kept the others from
averaging at all.)"""
LONGEST_AVOIDED: Final = 86400.0
MOST_TIMES: Final = 8.0
"""After so many it is LONGEST_AVOIDED."""
DELIVERED_TIMES: Final = 3.0
"""Whose copy has come, and was refused, slow or of long ago, is left alone for no longer than if
that had happened so often: an honest node can have learnt something else, and will not always
have."""
OUTCOMES: Final = (
    "applied",
    "pulled",
    "solo",  # how an outer step ended
    # how a try ended
    "busy",
    "other_policy",
    "unreachable",
    "propose_timeout",
    "released",
    "open_timeout",
    "vanished",
    "transfer_timeout",
    "apply_timeout",
    "failed",  # how an exchange ended without effect
)


class Phase(enum.Enum):
    IDLE = "idle"
    PROPOSED = "proposed"
    PAIRED = "paired"
    TRANSFER = "transfer"
    APPLY = "apply"


class PairingSettings(msgspec.Struct, frozen=True):
    """One node's settings; times are in seconds."""

    own: str
    """Own peer id."""
    fingerprint: bytes
    tries: int = 3
    propose_seconds: float = 2.0
    """Time for an answer to PROPOSE, which is given at once: a round trip and a busy event loop."""
    open_seconds: float = 5.0
    """Time for both copies to be offered after ACCEPT."""
    apply_seconds: float = 360.0
    """Time for our own trainer to judge what arrived and to come to the end of its step."""
    backoff_seconds: float = 2.0
    """Longest moment in IDLE between two tries."""
    rest_seconds: float = 0.0
    """Others' proposals are refused for so long after an exchange, so that eager peers do not set
    our sync interval."""
    short_seconds: float = 5.0
    """What was over as soon as this does not count as having come to nothing, once: acceptances
    that come late are taken back, among honest nodes, too. The next counts as having taken so
    long."""
    meet_seconds: float = 0.0
    """Whom we have averaged with is not accepted again for so long times the number of those whom
    we could as well average with: whoever proposes all the time would take all our exchanges
    otherwise."""
    avoid_seconds: float = 300.0
    """Refuse and skip a peer whose lie was proved, for so long at least, and AVOID_FACTOR times as
    long with each further one."""


# ---- events --------------------------------------------------------------------------------------


class Due(msgspec.Struct, frozen=True):
    """Our own outer step of `fragment` is due."""

    fragment: int
    outer_step: int
    candidates: tuple[str, ...]
    """`partners.partner_order` over compatible, fresh and trusted peers."""
    seed: bytes
    """Fresh random bytes; all nonces of this step follow from them."""
    lease_seconds: float
    """How long a transfer of the fragment may take."""
    best: int | None = None
    """How many of the first candidates are worth as much as the first; None for all."""


class Received(msgspec.Struct, frozen=True):
    """`message` came from `peer`, whose id the transport has authenticated and whose standing is
    good."""

    peer: str
    message: PairingMessage
    outer_step: int = 0
    """Ours, for an ACCEPT."""
    lease_seconds: float = 60.0
    """How long a transfer from `peer` may take."""


class Unreachable(msgspec.Struct, frozen=True):
    """A PROPOSE could not be delivered, or what came back was no answer to it."""

    peer: str
    nonce: bytes


class CopiesOffered(msgspec.Struct, frozen=True):
    """Both ends have offered their copy for `session`: the partner's is being fetched."""

    session: bytes
    usual_seconds: float = math.inf
    """How long that would take most others at most."""


class Transferred(msgspec.Struct, frozen=True):
    """All bytes of the partner's copy are here, hashes verified."""

    session: bytes


class Applied(msgspec.Struct, frozen=True):
    """The trainer has committed."""

    session: bytes
    mixed: bool = True
    """Whether the partner's weights counted; not where they are of too long ago."""


class Failed(msgspec.Struct, frozen=True):
    """The transfer broke, the bytes were bad, the gate refused them, or the trainer is gone. The
    cause is counted where it is known."""

    session: bytes
    blameless: bool = False
    """Whether it was by nothing that the partner did."""


class Lied(msgspec.Struct, frozen=True):
    """What `peer` sent was proved to be none of what was agreed on. Ends nothing by itself."""

    peer: str


class Reverted(msgspec.Struct, frozen=True):
    """What came of exchanges with `peer`, among others, was taken back. Ends nothing by itself."""

    peer: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; send one at `Pairing.deadline`."""


Event = (
    Due
    | Received
    | Unreachable
    | CopiesOffered
    | Transferred
    | Applied
    | Failed
    | Lied
    | Reverted
    | Tick
)


# ---- actions -------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send `message`: an answer where `peer` has just proposed, a request otherwise."""

    peer: str
    message: PairingMessage


class Pull(msgspec.Struct, frozen=True):
    """Fetch the last snapshot that `peer` published; it need not take part."""

    peer: str
    session: bytes
    fragment: int


class Apply(msgspec.Struct, frozen=True):
    """Have the trainer judge what was fetched for `session`, and commit it between two steps."""

    session: bytes


class Close(msgspec.Struct, frozen=True):
    """Drop what was fetched for `session`, and any commit not yet made of it: its weights must not
    be applied after this."""

    session: bytes
    serve: bool = False
    """The partner may go on fetching ours."""


class Solo(msgspec.Struct, frozen=True):
    """Take the outer step of `fragment` alone."""

    fragment: int


class Ended(msgspec.Struct, frozen=True):
    """Count `outcome` (one of OUTCOMES); `peer` is empty for a solo step."""

    peer: str
    outcome: str


Action = Send | Pull | Apply | Close | Solo | Ended


# ---- state ---------------------------------------------------------------------------------------


class OuterStep(msgspec.Struct, frozen=True):
    """An outer step of our own that has not been taken yet, and what was tried for it."""

    fragment: int
    outer_step: int
    seed: bytes
    lease_seconds: float
    untried: tuple[str, ...]
    """Candidates that were not asked, in order."""
    tried: int = 0
    answered: tuple[str, ...] = ()
    """Peers that said BUSY: alive, so worth a pull."""
    pulled: bool = False
    next_try: float = -math.inf
    """Not before this; no session that somebody else began and that came to nothing makes it
    later."""


class Avoided(msgspec.Struct, frozen=True):
    """A peer that is neither asked nor accepted for a while, as long as there is another one
    (`_left_alone`)."""

    peer: str
    until: float
    times: float
    """How often it has held us up in vain or lied; half of that after each exchange with it that
    went well."""
    lied: bool = False
    """Whether a lie was proved since the last exchange with it that went well."""


class Resting(msgspec.Struct, frozen=True):
    """A peer that says how long it will refuse us: asked after the others until then."""

    peer: str
    until: float


class Met(msgspec.Struct, frozen=True):
    """A peer that we have averaged with."""

    peer: str
    at: float


class Remembered(msgspec.Struct, frozen=True):
    """What one exchange leaves behind for the next; of peers the latest last."""

    rest_until: float = -math.inf
    """No proposal is accepted until then."""
    finished: tuple[bytes, ...] = ()
    """Names of sessions."""
    candidates: tuple[str, ...] = ()
    """Whom we could have asked at our last outer step."""
    best: int = 0
    """How many of the first of these were worth as much as the first."""
    avoided: tuple[Avoided, ...] = ()
    resting: tuple[Resting, ...] = ()
    met: tuple[Met, ...] = ()


class PairingState(msgspec.Struct, frozen=True):
    phase: Phase = Phase.IDLE
    peer: str = ""
    session: bytes = b""
    """Name of the session; in PROPOSED the nonce of our proposal."""
    answers: bytes = b""
    """Nonce of the partner's proposal that led to this session, if one did."""
    fragment: int = 0
    initiator: bool = False
    """Whether the session is that of our proposal."""
    one_sided: bool = False
    lease_seconds: float = 0.0
    usual_seconds: float = math.inf
    slow: bool = False
    """What the partner sent took longer than is usual."""
    deadline: float = math.inf
    began: float = 0.0
    """When a partner was found."""
    due: OuterStep | None = None
    remembered: Remembered = Remembered()


_Result = tuple[PairingState, tuple[Action, ...]]


def advance(state: PairingState, event: Event, now: float, settings: PairingSettings) -> _Result:
    """One transition. Events of a session that is not the present one change nothing, whoever sends
    them and however often."""
    if isinstance(event, Received):
        return _received(state, event, now, settings)
    if isinstance(event, Due):
        return _due(state, event, now, settings)
    if isinstance(event, Lied):
        times = vanished(state, event.peer)
        seconds = min(settings.avoid_seconds * AVOID_FACTOR**times, LONGEST_AVOIDED)
        return _avoid_longer(state, Avoided(event.peer, now + seconds, 1 + times, lied=True)), ()
    if isinstance(event, Reverted):
        times = 1 + vanished(state, event.peer)
        seconds = (
            WASTED * settings.short_seconds * AVOID_FACTOR ** (min(times, DELIVERED_TIMES) - 1)
        )
        return _avoid_longer(state, Avoided(event.peer, now + seconds, times)), ()
    if isinstance(event, Tick):
        return _timeout(state, now, settings) if now >= state.deadline else (state, ())
    if isinstance(event, Unreachable):
        if state.phase is Phase.PROPOSED and (event.peer, event.nonce) == (
            state.peer,
            state.session,
        ):
            return _next_try(state, now, settings, "unreachable")
        return state, ()
    if event.session != state.session or state.phase in (Phase.IDLE, Phase.PROPOSED):
        return state, ()
    return _session_event(state, event, now, settings)


def _session_event(
    state: PairingState, event: Event, now: float, settings: PairingSettings
) -> _Result:
    if isinstance(event, Failed):
        return _abort(
            state if event.blameless else _in_vain(state, now, settings), now, settings, "failed"
        )
    if isinstance(event, CopiesOffered) and state.phase is Phase.PAIRED:
        return _replace(
            state,
            phase=Phase.TRANSFER,
            deadline=now + state.lease_seconds,
            usual_seconds=event.usual_seconds,
        ), ()
    if isinstance(event, Transferred) and state.phase is Phase.TRANSFER:
        slow = now - (state.deadline - state.lease_seconds) > max(
            state.usual_seconds, settings.short_seconds
        )
        return _replace(
            state, phase=Phase.APPLY, deadline=now + settings.apply_seconds, slow=slow
        ), (Apply(state.session),)
    if isinstance(event, Applied) and state.phase is Phase.APPLY:
        ended = Ended(state.peer, "pulled" if state.one_sided else "applied")
        due = state.due
        # also when the partner proposed: our step was taken early
        if due is not None and due.fragment == state.fragment:
            due = None
        if not event.mixed or state.slow:
            state = _in_vain(state, now, settings)
        elif not state.one_sided:
            state = _met(_went_well(state), now)
        idle = _remember(_replace(_idle(state), due=due), rest_until=now + settings.rest_seconds)
        return _with((ended,), _go_on(idle, now, settings))
    return state, ()


# ---- our own proposals ---------------------------------------------------------------------------


def _due(state: PairingState, event: Due, now: float, settings: PairingSettings) -> _Result:
    actions: tuple[Action, ...] = ()
    served = state.phase not in (Phase.IDLE, Phase.PROPOSED) and not state.one_sided
    if state.due is not None and not (served and state.fragment == state.due.fragment):
        # training does not wait: what is still not exchanged by now is stepped alone, and the try
        # made for it dropped
        actions = (Solo(state.due.fragment), Ended("", "solo"))
        if not served and state.phase is not Phase.IDLE:
            state, more = _drop(state)
            actions = more + actions
    due = OuterStep(
        event.fragment, event.outer_step, event.seed, event.lease_seconds, event.candidates
    )
    best = len(event.candidates) if event.best is None else event.best
    state = _remember(
        state,
        candidates=tuple(peer for peer in event.candidates if peer != settings.own),
        best=best,
    )
    state = _replace(
        state, due=due, deadline=math.inf if state.phase is Phase.IDLE else state.deadline
    )
    return _with(
        actions, _go_on(state, now, settings) if state.phase is Phase.IDLE else (state, ())
    )


def _go_on(state: PairingState, now: float, settings: PairingSettings) -> _Result:
    """The next candidate, or a pull, or a solo step; IDLE when no outer step is due."""
    due = state.due
    if due is None:
        return state, ()
    alone, resting = (
        _left_alone(state, now),
        {entry.peer for entry in state.remembered.resting if entry.until > now},
    )
    best, met = (
        set(state.remembered.candidates[: state.remembered.best]),
        _met_lately(state, now, settings),
    )
    later = lambda peer: (peer in resting, peer not in best, peer in met)
    left = sorted(
        (peer for peer in due.untried if peer not in alone and peer != settings.own), key=later
    )
    if due.tried < settings.tries and left:
        peer, nonce = left[0], _nonce(due.seed, due.tried)
        due = msgspec.structs.replace(
            due, untried=tuple(p for p in due.untried if p != peer), tried=due.tried + 1
        )
        state = _replace(
            state,
            phase=Phase.PROPOSED,
            peer=peer,
            session=nonce,
            deadline=now + settings.propose_seconds,
            due=due,
        )
        return state, (
            Send(peer, Propose(nonce, settings.fingerprint, due.fragment, due.outer_step)),
        )
    if due.answered and not due.pulled:
        peer, session = due.answered[0], _nonce(due.seed, 255)
        state = _replace(
            state,
            phase=Phase.TRANSFER,
            peer=peer,
            session=session,
            fragment=due.fragment,
            one_sided=True,
            lease_seconds=due.lease_seconds,
            deadline=now + due.lease_seconds,
            began=now,
            due=msgspec.structs.replace(due, pulled=True),
        )
        return state, (Pull(peer, session, due.fragment),)
    return _replace(state, due=None), (Solo(due.fragment), Ended("", "solo"))


def _next_try(
    state: PairingState, now: float, settings: PairingSettings, outcome: str, *, alive: bool = False
) -> _Result:
    peer, due = state.peer, state.due
    if alive and due is not None:
        due = msgspec.structs.replace(due, answered=(*due.answered, peer))
    return _wait(_replace(_idle(state), due=due), (Ended(peer, outcome),), now, settings)


def _wait(
    state: PairingState, actions: tuple[Action, ...], now: float, settings: PairingSettings
) -> _Result:
    """IDLE until the next try, for as long as the step's own seed says; without anything due, for
    ever."""
    due = state.due
    if due is None:
        return state, actions
    share = int.from_bytes(_nonce(due.seed, 128 + due.tried)[:4], "big") / 2**32
    at = now + share * settings.backoff_seconds
    return _replace(state, due=msgspec.structs.replace(due, next_try=at), deadline=at), actions


# ---- what peers send -----------------------------------------------------------------------------


def _received(
    state: PairingState, event: Received, now: float, settings: PairingSettings
) -> _Result:
    peer, message = event.peer, event.message
    if isinstance(message, Propose):
        return _proposal(state, event, message, now, settings)
    if isinstance(message, Accept):
        return _accepted(state, event, message, now, settings)
    if isinstance(message, Busy):
        if state.phase is Phase.PROPOSED and (peer, message.nonce) == (state.peer, state.session):
            if message.retry_seconds:
                others = tuple(entry for entry in state.remembered.resting if entry.peer != peer)
                state = _remember(
                    state, resting=(*others, Resting(peer, now + message.retry_seconds))[-RESTING:]
                )
            return _next_try(state, now, settings, message.reason, alive=message.reason == "busy")
        return state, ()
    if (
        (peer, message.session) == (state.peer, state.session)
        and state.phase in (Phase.PAIRED, Phase.TRANSFER)
        and not state.one_sided
    ):
        return _abort(_in_vain(state, now, settings), now, settings, "released", release=False)
    return state, ()  # a peer may send anything at any time


def _proposal(
    state: PairingState, event: Received, message: Propose, now: float, settings: PairingSettings
) -> _Result:
    peer, nonce = event.peer, message.nonce
    if message.fingerprint != settings.fingerprint:
        return state, (Send(peer, Busy(nonce, "other_policy")),)
    in_session = (
        state.peer == peer and state.phase in (Phase.PAIRED, Phase.TRANSFER) and not state.one_sided
    )
    if in_session and nonce in (state.session, state.answers):  # it arrived twice: answer it twice
        return state, (Send(peer, Accept(nonce, state.session, state.fragment, event.outer_step)),)
    memory = state.remembered
    if peer == settings.own or nonce in memory.finished or peer in _left_alone(state, now):
        return state, (Send(peer, Busy(nonce, "busy")),)
    # both proposed
    if state.phase is Phase.PROPOSED and state.peer == peer and state.due is not None:
        first = settings.own < peer
        session, fragment = (
            (state.session, state.due.fragment) if first else (nonce, message.fragment)
        )
    elif state.phase is not Phase.IDLE:
        return state, (Send(peer, Busy(nonce, "busy")),)
    elif (
        rest := max(memory.rest_until - now, _met_lately(state, now, settings).get(peer, 0.0))
    ) > 0:
        return state, (Send(peer, Busy(nonce, "busy", min(3600, math.ceil(rest)))),)
    else:
        first, session, fragment = False, nonce, message.fragment
    accept = Send(peer, Accept(nonce, session, fragment, event.outer_step))
    return _replace(_pair(state, event, session, fragment, first, now, settings), answers=nonce), (
        accept,
    )


def _accepted(
    state: PairingState, event: Received, message: Accept, now: float, settings: PairingSettings
) -> _Result:
    peer, session = event.peer, message.session
    if state.phase is Phase.PROPOSED and (peer, message.nonce) == (state.peer, state.session):
        ours = session == state.session
        # another name only where the lower peer id proposed too, with its fragment; ours only with
        # our fragment; and none used up
        other = (
            settings.own < peer
            if not ours
            else state.due is None or message.fragment != state.due.fragment
        )
        if other or session in state.remembered.finished:
            return _with((Send(peer, Release(session)),), _next_try(state, now, settings, "failed"))
        return _pair(state, event, session, message.fragment, ours, now, settings), ()
    if (peer, session) == (state.peer, state.session) and state.phase is not Phase.IDLE:
        return state, ()  # it arrived twice
    return state, (Send(peer, Release(session)),)  # too late: we have moved on


def _pair(
    state: PairingState,
    event: Received,
    session: bytes,
    fragment: int,
    initiator: bool,
    now: float,
    settings: PairingSettings,
) -> PairingState:
    lease = state.due.lease_seconds if state.due is not None and initiator else event.lease_seconds
    return _replace(
        state,
        phase=Phase.PAIRED,
        peer=event.peer,
        session=session,
        answers=b"",
        fragment=fragment,
        initiator=initiator,
        one_sided=False,
        lease_seconds=lease,
        deadline=now + settings.open_seconds,
        began=now,
    )


# ---- ends ----------------------------------------------------------------------------------------


def _timeout(state: PairingState, now: float, settings: PairingSettings) -> _Result:
    if state.phase is Phase.IDLE:
        return _go_on(_replace(state, deadline=math.inf), now, settings)
    # whoever accepts after this gets Release, and so does one whose ACCEPT was lost
    if state.phase is Phase.PROPOSED:
        return _with(
            (Send(state.peer, Release(state.session)),),
            _next_try(state, now, settings, "propose_timeout"),
        )
    if state.phase is Phase.PAIRED:
        return _abort(
            _in_vain(state, now, settings, silent=True),
            now,
            settings,
            "open_timeout" if state.initiator else "vanished",
        )
    return _abort(
        _in_vain(state, now, settings) if state.phase is Phase.TRANSFER else state,
        now,
        settings,
        f"{state.phase.value}_timeout",
    )


def _abort(
    state: PairingState,
    now: float,
    settings: PairingSettings,
    outcome: str,
    *,
    release: bool = True,
) -> _Result:
    """End the session without effect. Before bytes moved the next candidate is tried; after, the
    step is taken alone."""
    judged = state.phase is Phase.APPLY  # what the partner makes of our copy is its own affair
    actions: tuple[Action, ...] = (Close(state.session, judged), Ended(state.peer, outcome))
    if release and not state.one_sided and not judged:
        actions = (Send(state.peer, Release(state.session)), *actions)
    due, fragment, ours = state.due, state.fragment, state.initiator
    started = state.phase is not Phase.PAIRED
    state = _idle(state)
    if due is not None and started and due.fragment == fragment:
        return _replace(state, due=None), (*actions, Solo(fragment), Ended("", "solo"))
    if due is None or ours:
        return _wait(state, actions, now, settings)
    if due.next_try <= now:  # at once: in another moment of IDLE the next would find us
        return _with(actions, _go_on(state, now, settings))
    return _replace(state, deadline=due.next_try), actions


def _in_vain(
    state: PairingState, now: float, settings: PairingSettings, *, silent: bool = False
) -> PairingState:
    """The exchange at hand has come to nothing, and not by us: who holds others up, by sending as
    slowly as it may, or what nobody can use, or by taking back what it agreed to, is worth a share
    of our time that gets smaller. silent: nothing was heard of it."""
    held, before = now - state.began, _avoided(state, state.peer)
    counts = silent or held >= settings.short_seconds or before is not None
    times = (before.times if before is not None else 0) + counts
    growth = min(times, DELIVERED_TIMES) if state.phase is Phase.APPLY else times
    seconds = (
        WASTED
        * (max(held, settings.short_seconds) if counts else held)
        * AVOID_FACTOR ** max(0.0, growth - 1)
    )
    return _avoid_longer(state, Avoided(state.peer, now + min(seconds, LONGEST_AVOIDED), times))


def _went_well(state: PairingState) -> PairingState:
    """What the partner did before counts for half: were it forgotten, one that sent well and
    trickled by turns had most of our time."""
    times = vanished(state, state.peer) / 2
    if times < 0.5:
        return _remember(state, avoided=_others(state, state.peer))
    return _avoid(state, Avoided(state.peer, -math.inf, times))


def _met(state: PairingState, now: float) -> PairingState:
    others = tuple(entry for entry in state.remembered.met if entry.peer != state.peer)
    return _remember(state, met=(*others, Met(state.peer, now))[-MET:])


def _met_lately(state: PairingState, now: float, settings: PairingSettings) -> dict[str, float]:
    """Whom we are not to average with again yet, and for how many seconds."""
    memory = state.remembered
    best = set(memory.candidates[: memory.best])
    times = lambda peer: memory.best if peer in best else max(1, len(memory.candidates))
    left = {
        entry.peer: entry.at + settings.meet_seconds * times(entry.peer) - now
        for entry in memory.met
    }
    return {peer: seconds for peer, seconds in left.items() if seconds > 0}


def _avoid_longer(state: PairingState, entry: Avoided) -> PairingState:
    """What is known against it stands."""
    before = _avoided(state, entry.peer)
    if before is not None:
        entry = _replace(
            entry, until=max(before.until, entry.until), lied=before.lied or entry.lied
        )
    return _avoid(state, entry)


def _avoid(state: PairingState, entry: Avoided) -> PairingState:
    entry = _replace(entry, times=min(entry.times, MOST_TIMES))
    return _remember(state, avoided=(*_others(state, entry.peer), entry)[-AVOIDED:])


def _left_alone(state: PairingState, now: float) -> set[str]:
    """Whom we neither ask nor accept. Where that is everybody whom we could ask, the one of them
    that would be listened to soonest is not among them, unless it lied: an honest partner was
    killed, or stood still for a while, and would be missed for minutes; with one that is not there
    is nobody whom it keeps us from."""
    avoided = {entry.peer: entry for entry in state.remembered.avoided if entry.until > now}
    candidates = state.remembered.candidates
    if candidates and avoided.keys() >= set(candidates):
        least = min(
            (avoided[peer] for peer in candidates), key=lambda entry: (entry.lied, entry.until)
        )
        if not least.lied:
            del avoided[least.peer]
    return set(avoided)


def vanished(state: PairingState, peer: str) -> float:
    """How often an exchange with `peer` has come to nothing, as long as that is remembered; half of
    it after each that went well."""
    entry = _avoided(state, peer)
    return entry.times if entry is not None else 0.0


def _avoided(state: PairingState, peer: str) -> Avoided | None:
    return next((entry for entry in state.remembered.avoided if entry.peer == peer), None)


def _others(state: PairingState, peer: str) -> tuple[Avoided, ...]:
    return tuple(entry for entry in state.remembered.avoided if entry.peer != peer)


def _remember(state: PairingState, **changes: object) -> PairingState:
    return _replace(state, remembered=_replace(state.remembered, **changes))


def _drop(state: PairingState) -> _Result:
    """Leave a try of ours without an outcome."""
    last = Close(state.session) if state.one_sided else Send(state.peer, Release(state.session))
    return _replace(_idle(state), due=None), (last,)


def _idle(state: PairingState) -> PairingState:
    """IDLE, with what is remembered across sessions."""
    if state.session:
        state = _remember(state, finished=(*state.remembered.finished, state.session)[-FINISHED:])
    return PairingState(due=state.due, remembered=state.remembered)


def _with(actions: tuple[Action, ...], result: _Result) -> _Result:
    return result[0], actions + result[1]


def _nonce(seed: bytes, number: int) -> bytes:
    return hashlib.blake2b(seed + bytes([number]), digest_size=NONCE_BYTES).digest()


_replace = msgspec.structs.replace


# ---- the machine with its counters ---------------------------------------------------------------


class PairingStatistics(msgspec.Struct, frozen=True):
    phase: str
    peer: str
    """Partner, empty when idle."""
    outcomes: dict[str, int]
    """Counts by outcome, for all of OUTCOMES."""


class Pairing:
    """State, counters and nothing else. Whoever drives it carries every action out before the next
    event."""

    def __init__(self, settings: PairingSettings) -> None:
        self.settings = settings
        self.state = PairingState()
        self._outcomes = Counter(dict.fromkeys(OUTCOMES, 0))

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        """Take one event, and say what is to be done about it. `now` is any monotonic time in
        seconds."""
        self.state, actions = advance(self.state, event, now, self.settings)
        for ended in _ended(actions):
            self._outcomes[ended.outcome] += 1
        return actions

    @property
    def deadline(self) -> float:
        """When a Tick is due; infinite when there is nothing to do."""
        return self.state.deadline

    def statistics(self) -> PairingStatistics:
        return PairingStatistics(self.state.phase.value, self.state.peer, dict(self._outcomes))


def _ended(actions: tuple[Action, ...]) -> Iterator[Ended]:
    return (action for action in actions if isinstance(action, Ended))

"""How a node finds its partner and what becomes of the exchange: (state, event, now) → (state, actions). No clock, no I/O, no torch.

    IDLE ──due──▶ PROPOSED ──ACCEPT──▶ PAIRED ──stream──▶ TRANSFER ──bytes──▶ VERIFY ──gate──▶ APPLY ──commit──▶ IDLE
      ▲              │ BUSY, silence: back to IDLE for a moment, next candidate; after three a one-sided pull (TRANSFER), then a solo step
      └──PROPOSE: ACCEPT, straight to PAIRED

A PROPOSE is answered the moment it is heard, whatever we are doing: ACCEPT when idle, BUSY otherwise, and ACCEPT when we have proposed
to the same peer ourselves (then both know, and the lower peer id opens the stream). Nothing is queued and nobody waits for somebody who
waits, so there are no cycles to wait in; every state but IDLE has a deadline, so lost messages cost time and nothing else. The moment in
IDLE, random and up to `backoff_seconds`, is for others to find us: a node that always proposes can never be proposed to.

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

from swarmnode.weights.messages import NONCE_BYTES, Accept, Busy, Message, Propose, Release

FINISHED: Final = 32
"""Sessions that are remembered, so that an old PROPOSE heard again opens nothing."""
AVOIDED: Final = 32
AVOID_FACTOR: Final = 5

OUTCOMES: Final = (
    "applied", "pulled", "solo",  # how an outer step ended
    "busy", "other_policy", "unreachable", "propose_timeout", "released", "open_timeout", "vanished",  # how a try ended
    "transfer_timeout", "verify_timeout", "apply_timeout", "failed",  # how an exchange ended without effect
)  # fmt: skip


class Phase(enum.Enum):
    IDLE = "idle"
    PROPOSED = "proposed"
    PAIRED = "paired"
    TRANSFER = "transfer"
    VERIFY = "verify"
    APPLY = "apply"


class Settings(msgspec.Struct, frozen=True):
    """Of one node; seconds."""

    own: str
    """Own peer id."""
    fingerprint: bytes
    tries: int = 3
    propose_seconds: float = 2.0
    """For an answer to PROPOSE, which is given at once: a round trip and a busy event loop."""
    open_seconds: float = 5.0
    """For the stream to be there after ACCEPT."""
    verify_seconds: float = 60.0
    """For our own gate."""
    apply_seconds: float = 300.0
    """For our own trainer to come to the end of its step."""
    backoff_seconds: float = 2.0
    """Longest moment in IDLE between two tries."""
    rest_seconds: float = 0.0
    """After an exchange: refuse others' proposals for so long, so that eager peers do not set our sync interval."""
    avoid_first_seconds: float = 15.0
    """Refuse and skip a peer that agreed to an exchange and was not heard of, for so long: a node that was killed is back by then. Five
    times as long when it does so again before an exchange with it has gone well."""
    avoid_seconds: float = 300.0
    """But no longer than this; and for so long one whose lie was proved."""


# ---- events -------------------------------------------------------------------------------------------------------------------


class Due(msgspec.Struct, frozen=True):
    """Our own outer step of `fragment` is due."""

    fragment: int
    outer_step: int
    candidates: tuple[str, ...]
    """`partners.partner_order` over compatible, fresh and trusted peers."""
    seed: bytes
    """Fresh random bytes; all nonces of this step follow from them."""
    lease_seconds: float
    """`Throughput.deadline_seconds` of the fragment."""
    tried: int = 0
    answered: tuple[str, ...] = ()
    """Peers that said BUSY: alive, so worth a pull."""
    pulled: bool = False


class Received(msgspec.Struct, frozen=True):
    """`message` came from `peer`, whose id the transport has authenticated and whose standing is good."""

    peer: str
    message: Message
    outer_step: int = 0
    """Ours, for an ACCEPT."""
    lease_seconds: float = 60.0


class Unreachable(msgspec.Struct, frozen=True):
    """A PROPOSE could not be delivered."""

    peer: str
    nonce: bytes


class Opened(msgspec.Struct, frozen=True):
    """The transfer stream of `session` is there and its first bytes named the session; on both ends."""

    session: bytes


class Transferred(msgspec.Struct, frozen=True):
    """All bytes are in the shadow buffer, hashes verified."""

    session: bytes


class Verified(msgspec.Struct, frozen=True):
    """The gate has taken them."""

    session: bytes


class Applied(msgspec.Struct, frozen=True):
    """The trainer has committed."""

    session: bytes


class Failed(msgspec.Struct, frozen=True):
    """Stream broken, bytes bad, gate refused, trainer gone. The cause is counted where it is known."""

    session: bytes


class Lied(msgspec.Struct, frozen=True):
    """What `peer` sent was proved to be none of what was agreed on. Ends nothing by itself."""

    peer: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; send one at `Pairing.deadline`."""


Event = Due | Received | Unreachable | Opened | Transferred | Verified | Applied | Failed | Lied | Tick


# ---- actions ------------------------------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    peer: str
    message: Message


class Open(msgspec.Struct, frozen=True):
    """Open the transfer stream; the peer waits for it."""

    peer: str
    session: bytes
    fragment: int


class Pull(msgspec.Struct, frozen=True):
    """Fetch the last snapshot that `peer` published; it need not take part."""

    peer: str
    session: bytes
    fragment: int


class Verify(msgspec.Struct, frozen=True):
    """Hand the shadow buffer to the gate."""

    peer: str
    session: bytes
    fragment: int
    outer_step: int
    """The partner's claim, for the lag."""


class Apply(msgspec.Struct, frozen=True):
    """Commit between two inner steps."""

    peer: str
    session: bytes
    fragment: int


class Close(msgspec.Struct, frozen=True):
    """Drop stream, shadow buffer and any commit not yet made of `session`: its weights must not be applied after this."""

    session: bytes


class Solo(msgspec.Struct, frozen=True):
    """Take the outer step of `fragment` alone."""

    fragment: int


class Ended(msgspec.Struct, frozen=True):
    """Count `outcome` (one of OUTCOMES); `peer` is empty for a solo step."""

    peer: str
    outcome: str


Action = Send | Open | Pull | Verify | Apply | Close | Solo | Ended


# ---- state --------------------------------------------------------------------------------------------------------------------


class State(msgspec.Struct, frozen=True):
    phase: Phase = Phase.IDLE
    peer: str = ""
    session: bytes = b""
    """In PROPOSED the nonce of our proposal."""
    answers: bytes = b""
    """Nonce of the partner's proposal that led to this session, if one did."""
    fragment: int = 0
    outer_step: int = 0
    """The partner's claim."""
    initiator: bool = False
    one_sided: bool = False
    lease_seconds: float = 0.0
    deadline: float = math.inf
    due: Due | None = None
    """Our own outer step that has not been taken yet."""
    rest_until: float = -math.inf
    finished: tuple[bytes, ...] = ()
    avoided: tuple[tuple[str, float, int], ...] = ()
    """(peer, until, how often it was not heard of), the latest last."""


_Result = tuple[State, tuple[Action, ...]]


def advance(state: State, event: Event, now: float, settings: Settings) -> _Result:
    """One transition. Events of a session that is not the present one change nothing, whoever sends them and however often."""
    if isinstance(event, Received):
        return _received(state, event, now, settings)
    if isinstance(event, Due):
        return _due(state, event, now, settings)
    if isinstance(event, Lied):
        return _avoid(state, event.peer, now + settings.avoid_seconds, 1 + vanished(state, event.peer)), ()
    if isinstance(event, Tick):
        return _timeout(state, now, settings) if now >= state.deadline else (state, ())
    if isinstance(event, Unreachable):
        if state.phase is Phase.PROPOSED and (event.peer, event.nonce) == (state.peer, state.session):
            return _next_try(state, now, settings, "unreachable")
        return state, ()
    if event.session != state.session or state.phase in (Phase.IDLE, Phase.PROPOSED):
        return state, ()
    return _session_event(state, event, now, settings)


def _session_event(state: State, event: Event, now: float, settings: Settings) -> _Result:
    if isinstance(event, Failed):
        return _abort(state, now, settings, "failed")
    if isinstance(event, Opened) and state.phase is Phase.PAIRED:
        return _replace(state, phase=Phase.TRANSFER, deadline=now + state.lease_seconds), ()
    if isinstance(event, Transferred) and state.phase is Phase.TRANSFER:
        verify = Verify(state.peer, state.session, state.fragment, state.outer_step)
        return _replace(state, phase=Phase.VERIFY, deadline=now + settings.verify_seconds), (verify,)
    if isinstance(event, Verified) and state.phase is Phase.VERIFY:
        apply = Apply(state.peer, state.session, state.fragment)
        return _replace(state, phase=Phase.APPLY, deadline=now + settings.apply_seconds), (apply,)
    if isinstance(event, Applied) and state.phase is Phase.APPLY:
        ended = Ended(state.peer, "pulled" if state.one_sided else "applied")
        due = state.due
        if due is not None and due.fragment == state.fragment:  # also when the partner proposed: our step was taken early
            due = None
        avoided = state.avoided if state.one_sided else _forgiven(state, state.peer)
        idle = _replace(_idle(state), due=due, rest_until=now + settings.rest_seconds, avoided=avoided)
        return _with((ended,), _go_on(idle, now, settings))
    return state, ()


# ---- our own proposals ----------------------------------------------------------------------------------------------------------


def _due(state: State, event: Due, now: float, settings: Settings) -> _Result:
    actions: tuple[Action, ...] = ()
    served = state.phase not in (Phase.IDLE, Phase.PROPOSED) and not state.one_sided
    if state.due is not None and not (served and state.fragment == state.due.fragment):
        # training does not wait: what is still not exchanged by now is stepped alone, and the try made for it dropped
        actions = (Solo(state.due.fragment), Ended("", "solo"))
        if not served and state.phase is not Phase.IDLE:
            state, more = _drop(state)
            actions = more + actions
    state = _replace(state, due=event, deadline=math.inf if state.phase is Phase.IDLE else state.deadline)
    return _with(actions, _go_on(state, now, settings) if state.phase is Phase.IDLE else (state, ()))


def _go_on(state: State, now: float, settings: Settings) -> _Result:
    """The next candidate, or a pull, or a solo step; IDLE when no outer step is due."""
    due = state.due
    if due is None:
        return state, ()
    avoided = {peer for peer, until, _ in state.avoided if until > now}
    left = [peer for peer in due.candidates if peer not in avoided and peer != settings.own]
    if due.tried < settings.tries and left:
        peer, nonce = left[0], _nonce(due.seed, due.tried)
        rest = tuple(p for p in due.candidates if p != peer)
        due = msgspec.structs.replace(due, candidates=rest, tried=due.tried + 1)
        state = _replace(state, phase=Phase.PROPOSED, peer=peer, session=nonce, deadline=now + settings.propose_seconds, due=due)
        return state, (Send(peer, Propose(nonce, settings.fingerprint, due.fragment, due.outer_step)),)
    if due.answered and not due.pulled:
        peer, session = due.answered[0], _nonce(due.seed, 255)
        state = _replace(
            state, phase=Phase.TRANSFER, peer=peer, session=session, fragment=due.fragment, outer_step=due.outer_step, one_sided=True,
            lease_seconds=due.lease_seconds, deadline=now + due.lease_seconds, due=msgspec.structs.replace(due, pulled=True),
        )  # fmt: skip
        return state, (Pull(peer, session, due.fragment),)
    return _replace(state, due=None), (Solo(due.fragment), Ended("", "solo"))


def _next_try(state: State, now: float, settings: Settings, outcome: str, *, alive: bool = False) -> _Result:
    peer, due = state.peer, state.due
    if alive and due is not None:
        due = msgspec.structs.replace(due, answered=(*due.answered, peer))
    return _wait(_replace(_idle(state), due=due), (Ended(peer, outcome),), now, settings)


def _wait(state: State, actions: tuple[Action, ...], now: float, settings: Settings) -> _Result:
    """IDLE until the next try, for as long as the step's own seed says; without anything due, for ever."""
    if state.due is None:
        return state, actions
    share = int.from_bytes(_nonce(state.due.seed, 128 + state.due.tried)[:4], "big") / 2**32
    return _replace(state, deadline=now + share * settings.backoff_seconds), actions


# ---- what peers say -------------------------------------------------------------------------------------------------------------


def _received(state: State, event: Received, now: float, settings: Settings) -> _Result:
    peer, message = event.peer, event.message
    if isinstance(message, Propose):
        return _proposal(state, event, message, now, settings)
    if isinstance(message, Accept):
        return _accepted(state, event, message, now, settings)
    if isinstance(message, Busy):
        if state.phase is Phase.PROPOSED and (peer, message.nonce) == (state.peer, state.session):
            return _next_try(state, now, settings, message.reason, alive=message.reason == "busy")
        return state, ()
    ours = isinstance(message, Release) and (peer, message.session) == (state.peer, state.session)
    if ours and state.phase in (Phase.PAIRED, Phase.TRANSFER) and not state.one_sided:
        return _abort(state, now, settings, "released", tell=False)
    return state, ()  # messages for the driver end here too: a peer may send anything at any time


def _proposal(state: State, event: Received, message: Propose, now: float, settings: Settings) -> _Result:
    peer, nonce = event.peer, message.nonce
    if message.fingerprint != settings.fingerprint:
        return state, (Send(peer, Busy(nonce, "other_policy")),)
    in_session = state.peer == peer and state.phase in (Phase.PAIRED, Phase.TRANSFER) and not state.one_sided
    if in_session and nonce in (state.session, state.answers):  # heard twice: say it twice
        return state, (Send(peer, Accept(nonce, state.session, state.fragment, event.outer_step)),)
    if peer == settings.own or nonce in state.finished or any(p == peer and until > now for p, until, _ in state.avoided):
        return state, (Send(peer, Busy(nonce, "busy")),)
    if state.phase is Phase.PROPOSED and state.peer == peer and state.due is not None:  # both proposed
        first = settings.own < peer
        session, fragment = (state.session, state.due.fragment) if first else (nonce, message.fragment)
    elif state.phase is Phase.IDLE and now >= state.rest_until:
        first, session, fragment = False, nonce, message.fragment
    else:
        rest = max(0.0, state.rest_until - now) if state.phase is Phase.IDLE else 0.0
        return state, (Send(peer, Busy(nonce, "busy", min(3600, math.ceil(rest)))),)
    accept = Send(peer, Accept(nonce, session, fragment, event.outer_step))
    paired, actions = _pair(state, event, session, fragment, message.outer_step, first, now, settings)
    return _replace(paired, answers=nonce), (accept, *actions)


def _accepted(state: State, event: Received, message: Accept, now: float, settings: Settings) -> _Result:
    peer, session = event.peer, message.session
    if state.phase is Phase.PROPOSED and (peer, message.nonce) == (state.peer, state.session):
        ours = session == state.session
        # another name only where the lower peer id proposed too, with its fragment; ours only with our fragment; and none used up
        other = settings.own < peer if not ours else state.due is None or message.fragment != state.due.fragment
        if other or session in state.finished:
            return _with((Send(peer, Release(session)),), _next_try(state, now, settings, "failed"))
        return _pair(state, event, session, message.fragment, message.outer_step, ours, now, settings)
    if (peer, session) == (state.peer, state.session) and state.phase is not Phase.IDLE:
        return state, ()  # heard twice
    return state, (Send(peer, Release(session)),)  # too late: we have moved on


def _pair(
    state: State, event: Received, session: bytes, fragment: int, outer_step: int, initiator: bool, now: float, settings: Settings
) -> _Result:
    lease = state.due.lease_seconds if state.due is not None and initiator else event.lease_seconds
    state = _replace(
        state, phase=Phase.PAIRED, peer=event.peer, session=session, answers=b"", fragment=fragment, outer_step=outer_step,
        initiator=initiator, one_sided=False, lease_seconds=lease, deadline=now + settings.open_seconds,
    )  # fmt: skip
    return state, (Open(event.peer, session, fragment),) if initiator else ()


# ---- ends -----------------------------------------------------------------------------------------------------------------------


def _timeout(state: State, now: float, settings: Settings) -> _Result:
    if state.phase is Phase.IDLE:
        return _go_on(_replace(state, deadline=math.inf), now, settings)
    if state.phase is Phase.PROPOSED:  # whoever accepts after this hears Release, and so does one whose ACCEPT was lost
        return _with((Send(state.peer, Release(state.session)),), _next_try(state, now, settings, "propose_timeout"))
    if state.phase is Phase.PAIRED:
        times = 1 + vanished(state, state.peer)
        seconds = min(settings.avoid_seconds, settings.avoid_first_seconds * AVOID_FACTOR ** (times - 1))
        outcome = "open_timeout" if state.initiator else "vanished"
        return _abort(_avoid(state, state.peer, now + seconds, times), now, settings, outcome)
    return _abort(state, now, settings, f"{state.phase.value}_timeout")


def _abort(state: State, now: float, settings: Settings, outcome: str, *, tell: bool = True) -> _Result:
    """End the session without effect. Before bytes moved the next candidate is tried; after, the step is taken alone."""
    actions: tuple[Action, ...] = (Close(state.session), Ended(state.peer, outcome))
    if tell and not state.one_sided:
        actions = (Send(state.peer, Release(state.session)), *actions)
    due, fragment = state.due, state.fragment
    started = state.phase is not Phase.PAIRED
    state = _idle(state)
    if due is not None and started and due.fragment == fragment:
        return _replace(state, due=None), (*actions, Solo(fragment), Ended("", "solo"))
    return _wait(state, actions, now, settings)


def _avoid(state: State, peer: str, until: float, times: int) -> State:
    return _replace(state, avoided=(*_forgiven(state, peer), (peer, until, times))[-AVOIDED:])


def vanished(state: State, peer: str) -> int:
    """How often `peer` has agreed and not been heard of since the last exchange with it; as long as that is remembered."""
    return next((times for p, _, times in state.avoided if p == peer), 0)


def _forgiven(state: State, peer: str) -> tuple[tuple[str, float, int], ...]:
    return tuple(entry for entry in state.avoided if entry[0] != peer)


def _drop(state: State) -> _Result:
    """Leave a try of ours without an outcome."""
    last = Close(state.session) if state.one_sided else Send(state.peer, Release(state.session))
    return _replace(_idle(state), due=None), (last,)


def _idle(state: State) -> State:
    """IDLE, with what is remembered across sessions."""
    finished = (*state.finished, state.session)[-FINISHED:] if state.session else state.finished
    return State(due=state.due, rest_until=state.rest_until, finished=finished, avoided=state.avoided)


def _with(actions: tuple[Action, ...], result: _Result) -> _Result:
    return result[0], actions + result[1]


def _nonce(seed: bytes, number: int) -> bytes:
    return hashlib.blake2b(seed + bytes([number]), digest_size=NONCE_BYTES).digest()


_replace = msgspec.structs.replace


# ---- the machine with its counters ------------------------------------------------------------------------------------------------


class PairingStatistics(msgspec.Struct, frozen=True):
    phase: str
    peer: str
    """Partner, empty when idle."""
    outcomes: dict[str, int]
    """By outcome, all of OUTCOMES."""
    solo_share: float
    """Solo steps ÷ outer steps of our own; 0 before the first."""


class Pairing:
    """State, counters and nothing else. Whoever drives it carries every action out before the next event."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state = State()
        self._outcomes = Counter(dict.fromkeys(OUTCOMES, 0))

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        """What is to be done about `event`; `now` is any monotonic time in seconds."""
        self.state, actions = advance(self.state, event, now, self.settings)
        for ended in _ended(actions):
            self._outcomes[ended.outcome] += 1
        return actions

    @property
    def deadline(self) -> float:
        """When a Tick is due; infinite when there is nothing to do."""
        return self.state.deadline

    def statistics(self) -> PairingStatistics:
        done = self._outcomes["applied"] + self._outcomes["pulled"] + self._outcomes["solo"]
        return PairingStatistics(
            phase=self.state.phase.value,
            peer=self.state.peer,
            outcomes=dict(self._outcomes),
            solo_share=self._outcomes["solo"] / done if done else 0.0,
        )


def _ended(actions: tuple[Action, ...]) -> Iterator[Ended]:
    return (action for action in actions if isinstance(action, Ended))

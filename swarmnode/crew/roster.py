"""Exactly one record per epoch: a voter, a proposer, a lease. Pure; no clock, no I/O, no torch.

    proposer:  Prepare(ballot) ──▶ all voters of the present record        "vote in no lower ballot; for what have you voted?"
    voter:     Promise ──▶ proposer, with its vote of the highest ballot so far; or Refuse
    proposer:  once a majority has promised, Propose(record, ballot) ──▶ all: the record voted for in the highest ballot, where
               there is one, else its own wish
    voter:     Vote ──▶ proposer, signed
    proposer:  a majority's votes of one ballot are the record's certificate: Adopt ──▶ everybody

This is Paxos (Lamport 1998), an instance per epoch: the epoch is the compare-and-swap's expected value, and a majority of those who hold
the crew under the present record decide what the next one is, those who are gone counted. Two proposers cost each other time, never
agreement; the lowest stage that is left proposes first. A voter's promise and vote must be on disk before they are sent
(`Acceptor.memory`); a voter that forgot is another incarnation, and none.

Time decides nothing here. The lease only tells a member that nobody may be left to contradict it: it stops by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from swarmnode.crew import messages
from swarmnode.crew.messages import (
    CHAIN,
    Adopt,
    Certificate,
    Prepare,
    Promise,
    Propose,
    Record,
    Refuse,
    Signed,
    Vote,
    Voter,
    check_certificate,
    check_record,
    check_successor,
    crew_id,
    majority,
    record_hash,
    vote_bytes,
    voters_of,
)
from swarmnode.errors import BadMessage

BALLOT_PLACES: Final = 16
"""Ballots of a round: one for each voter."""
LEAP: Final = 2**24
"""A ballot that is so far above what was promised is refused: a million rounds are weeks, and one who counts to the end ends the crew."""

Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]


class _Memory(msgspec.Struct, frozen=True):
    incarnation: bytes
    starts: int = 0
    chain: tuple[Certificate, ...] = ()
    promised: int = 0
    accepted_ballot: int = 0
    accepted: Record | None = None


_decoder = msgspec.msgpack.Decoder(_Memory)


def remembered_incarnation(memory: bytes) -> bytes | None:
    """Of `Acceptor.memory`; None where that is nothing of ours, e.g. cut short by a full disk."""
    try:
        return _decoder.decode(memory).incarnation
    except (msgspec.ValidationError, ValueError):
        return None


class Acceptor:
    """One node's part in one crew at a time: the records it knows, and its promise and vote for the next one."""

    def __init__(self, me: Voter, sign: Sign, verify: Verify) -> None:
        self.me = me
        self._sign, self._verify = sign, verify
        self.chain: tuple[Certificate, ...] = ()
        self.promised = 0
        self.accepted_ballot = 0
        self.accepted: Record | None = None
        self.crew = messages.NO_CREW
        self.starts = 0
        """Of this process and those before it with the same memory."""

    # What is remembered.

    @property
    def record(self) -> Record | None:
        return self.chain[-1].record if self.chain else None

    @property
    def is_voter(self) -> bool:
        return self.record is not None and self.me in voters_of(self.record)

    def begin(self) -> int:
        """Number of this start, to be remembered before anything is sent."""
        self.starts += 1
        return self.starts

    def memory(self) -> bytes:
        state = self.chain, self.promised, self.accepted_ballot, self.accepted
        return msgspec.msgpack.encode(_Memory(self.me.incarnation, self.starts, *state))

    def remember(self, memory: bytes) -> None:
        """Go on from what `memory` said; its incarnation must be ours."""
        known = _decoder.decode(memory)
        if known.incarnation != self.me.incarnation:
            return
        self.starts = known.starts
        if known.chain:
            self.chain, self.promised = known.chain, known.promised
            self.accepted_ballot, self.accepted = known.accepted_ballot, known.accepted
            self.crew = crew_id(self.chain[-1].record)

    def forget(self, incarnation: bytes) -> None:
        """In no crew any more, and with the votes the voter goes: whoever comes back to the crew is another one, `incarnation`."""
        self.me = Voter(self.me.peer, incarnation)
        self.chain, self.crew = (), messages.NO_CREW
        self.promised, self.accepted_ballot, self.accepted = 0, 0, None

    # As a voter.

    def sign_founding(self, record: Record) -> Vote:
        return self._vote(record, 0)

    def prepare(self, message: Prepare) -> Promise | Refuse | Adopt:
        refusal = self._out_of_place(message.crew, message.epoch, message.previous)
        if refusal is not None:
            return refusal
        if not self.promised <= message.ballot <= self.promised + LEAP:
            return Refuse("ballot", self.promised)
        self.promised = message.ballot
        return Promise(message.crew, message.epoch, message.ballot, self.accepted_ballot, self.accepted)

    def propose(self, message: Propose) -> Vote | Refuse | Adopt:
        record = message.record
        refusal = self._out_of_place(record.crew, record.epoch, record.previous)
        if refusal is not None:
            return refusal
        again = message.ballot == self.accepted_ballot and record != self.accepted
        if again or not self.promised <= message.ballot <= self.promised + LEAP:
            return Refuse("ballot", self.promised)
        try:
            check_successor(self._present, record)
        except BadMessage:
            return Refuse("record")
        self.promised = self.accepted_ballot = message.ballot
        self.accepted = record
        return self._vote(record, message.ballot)

    def _out_of_place(self, crew: bytes, epoch: int, previous: bytes) -> Refuse | Adopt | None:
        if self.record is None or crew != self.crew:
            return Refuse("unknown")
        if epoch <= self.record.epoch:
            return self.newer_than(epoch - 1)
        if epoch > self.record.epoch + 1 or previous != record_hash(self.record) or not self.is_voter:
            return Refuse("epoch")
        return None

    def _vote(self, record: Record, ballot: int) -> Vote:
        crew, digest = crew_id(record), record_hash(record)
        signature = self._sign(vote_bytes(crew, record.epoch, ballot, digest, self.me.incarnation))
        return Vote(record.crew, record.epoch, ballot, digest, self.me.incarnation, signature)

    @property
    def _present(self) -> Record:
        assert self.record is not None
        return self.record

    # As one who is told.

    def newer_than(self, epoch: int) -> Adopt:
        """What a peer at `epoch` needs, as far as we have it."""
        newer = tuple(certificate for certificate in self.chain if certificate.record.epoch > epoch)
        return Adopt(newer or self.chain[-1:])

    def check_chain(self, certificates: tuple[Certificate, ...], *, elsewhere: bool = False) -> tuple[Certificate, ...]:
        """What of it is new here, every signature and link checked.

        Raises BadMessage: bounds where it does not follow what we have, signature where votes lack. Where we are in no crew, or it is to be
        `elsewhere`, the first one stands on its own votes.
        """
        last = None if elsewhere else self.record
        if last is not None and crew_id(certificates[0].record) != self.crew:
            raise BadMessage("bounds", "another crew")
        new = []
        for certificate in certificates:
            if last is not None and certificate.record.epoch <= last.epoch:
                continue
            check_record(certificate.record)
            check_certificate(certificate, self._verify)
            if last is not None:
                check_successor(last, certificate.record)
            new.append(certificate)
            last = certificate.record
        return tuple(new)

    def learn(self, checked: tuple[Certificate, ...]) -> None:
        """Take over what `check_chain` returned; promise and vote were for the epoch that is decided now.

        A witness that goes to another crew stays the same voter and forgets what it promised in the first one. So it must answer nothing
        there any more, and it cannot: whoever leaves the second crew is another incarnation.
        """
        if checked:
            crew = crew_id(checked[-1].record)
            self.chain = (*(self.chain if crew == self.crew else ()), *checked)[-CHAIN:]
            self.crew = crew
            self.promised, self.accepted_ballot, self.accepted = 0, 0, None


class Proposal:
    """One ballot of ours for the record after `previous`."""

    def __init__(self, previous: Record, ballot: int, evicting: tuple[str, ...], deadline: float) -> None:
        self.previous, self.ballot, self.deadline = previous, ballot, deadline
        self.prepare = Prepare(crew_id(previous), previous.epoch + 1, record_hash(previous), ballot, evicting)
        self.voters = {voter.peer: voter.incarnation for voter in voters_of(previous)}
        self.record: Record | None = None
        self._promises: dict[str, Promise] = {}
        self._votes: dict[str, Signed] = {}

    @property
    def needed(self) -> int:
        return majority(len(self.voters))

    def promised(self, peer: str, promise: Promise) -> bool:
        """Whether this one makes the majority: then call `choose`."""
        fits = (promise.crew, promise.epoch, promise.ballot) == (self.prepare.crew, self.prepare.epoch, self.ballot)
        if not fits or peer not in self.voters or self.record is not None:
            return False
        self._promises[peer] = promise
        return len(self._promises) == self.needed

    def choose(self, wish: Record | None) -> Propose | None:
        """What to propose: a record that may have been decided on already goes before our wish. None where there is neither."""
        voted = max(self._promises.values(), key=lambda promise: promise.accepted_ballot)
        self.record = voted.accepted if voted.accepted is not None else wish
        return None if self.record is None else Propose(self.record, self.ballot)

    def voted(self, peer: str, vote: Vote, verify: Verify) -> Certificate | None:
        """The certificate, once with the vote that makes the majority."""
        if self.record is None or peer not in self.voters or peer in self._votes or vote.incarnation != self.voters[peer]:
            return None
        digest = record_hash(self.record)
        if (vote.epoch, vote.ballot, vote.hash) != (self.record.epoch, self.ballot, digest):
            return None
        if not verify(peer, vote_bytes(crew_id(self.record), vote.epoch, vote.ballot, digest, vote.incarnation), vote.signature):
            return None
        self._votes[peer] = Signed(peer, vote.incarnation, vote.signature)
        if len(self._votes) != self.needed:
            return None
        return Certificate(self.record, self.ballot, tuple(self._votes.values()))


class Founding:
    """A founding record on its way: everybody that it names has to sign."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._digest = record_hash(record)
        self._voters = {voter.peer: voter.incarnation for voter in record.voters}
        self._votes: dict[str, Signed] = {}

    def voted(self, peer: str, vote: Vote, verify: Verify) -> Certificate | None:
        if vote.hash != self._digest or vote.ballot != 0 or vote.incarnation != self._voters.get(peer) or peer in self._votes:
            return None
        if not verify(peer, vote_bytes(self._digest, 1, 0, self._digest, vote.incarnation), vote.signature):
            return None
        self._votes[peer] = Signed(peer, vote.incarnation, vote.signature)
        return None if self.missing else Certificate(self.record, 0, tuple(self._votes.values()))

    @property
    def missing(self) -> frozenset[str]:
        """Who has not signed."""
        return frozenset(self._voters.keys() - self._votes.keys())


def next_ballot(at_least: int, place: int) -> int:
    """Above `at_least`, and never the same as another voter's; `place` is ours among the voters."""
    return (at_least // BALLOT_PLACES + 1) * BALLOT_PLACES + place


class Lease:
    """Until when a majority of voters, ourselves counted, is known to have heard us."""

    def __init__(self, seconds: float) -> None:
        self._most = self.seconds = seconds
        self._heard: dict[str, float] = {}

    def begin(self, voters: Iterable[str], now: float, seconds: float) -> None:
        """A new record: its voters stood by it just now. `seconds` as it says; never more than ours."""
        self.seconds = min(self._most, seconds)
        self._heard = {peer: max(self._heard.get(peer, now), now) for peer in voters}

    def renewed(self, peer: str, sent: float) -> None:
        """`peer` has answered what we sent at `sent`."""
        if peer in self._heard:
            self._heard[peer] = max(self._heard[peer], sent)

    def ends(self, me: str, now: float) -> float:
        """Half a lease after the last moment at which a majority heard us."""
        times = sorted((now if peer == me else heard for peer, heard in self._heard.items()), reverse=True)
        if not times:
            return now
        return times[majority(len(times)) - 1] + self.seconds / 2

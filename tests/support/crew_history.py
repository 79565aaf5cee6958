"""What must be true of a crew whatever fails: the history of a simulated swarm is held to it while it happens.

records     one per crew and epoch, signed by a majority of the one before, by each voter for one record per ballot
witnesses   one that goes to another crew gets a seat there and says nothing more in the first; none is named again and again
writers     at most one per (crew, stage, stage epoch), as those see it who accept its frames
steps       a stage takes each once, all stages the same micro-batches, and a step that all have taken is never taken back
averaging   never in PROBATION, never by a member that no majority has heard for half a lease
weights     equal to a run without failures, wherever every restoration was exact (R0, R1)
the end     when faults are over, within a bound: everybody in a crew that runs and takes steps, or in none
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from swarmnode.crew.messages import Certificate, Record, Voter, crew_id, majority, record_hash, voters_of

OFTEN = 3
"""No crew names the same voter its witness so often, each time anew."""


class Violation(AssertionError):
    """Raised when an invariant does not hold."""


def next_weight(weight: bytes, step: int, micro_batches: Iterable[int]) -> bytes:
    """A stage's weights are a hash over all that was learnt."""
    return hashlib.blake2b(weight + repr((step, sorted(micro_batches))).encode(), digest_size=8).digest()


def first_weight(stage: int) -> bytes:
    return hashlib.blake2b(b"stage%d" % stage, digest_size=8).digest()


def step_micro_batches(step: int) -> tuple[int, ...]:
    """Of one step, whenever it is tried."""
    return (3 * step, 3 * step + 1, 3 * step + 2)


class History:
    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        """Over all that happened: the same seed gives the same."""
        self.counts: dict[str, int] = {}
        self._records: dict[tuple[bytes, int], bytes] = {}
        self._by_hash: dict[bytes, Record] = {}
        self._votes: dict[tuple[bytes, int, int, str, bytes], bytes] = {}
        self._left: set[tuple[bytes, Voter]] = set()
        self._named: dict[tuple[bytes, Voter], int] = {}
        self._writers: dict[tuple[bytes, int, int], str] = {}
        self._sets: dict[tuple[bytes, int], tuple[int, ...]] = {}
        self._taken: dict[tuple[str, bytes, int], int] = {}
        self._all_took: dict[bytes, tuple[int, set[str]]] = {}
        self._took: dict[tuple[bytes, int], dict[int, str]] = {}
        self._stages: dict[bytes, int] = {}
        self._chain: dict[int, list[bytes]] = {}

    def note(self, now: float, what: str, *details: object) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        self.digest.update(repr((round(now, 6), what, details)).encode())

    def adopted(self, now: float, node: str, certificates: Iterable[Certificate]) -> None:
        for certificate in certificates:
            record = certificate.record
            key, digest = (crew_id(record), record.epoch), record_hash(record)
            if self._records.get(key) == digest:
                continue
            if key in self._records:
                raise Violation(f"two records of epoch {record.epoch}: {node} goes by another one")
            self._records[key] = digest
            self._by_hash[digest] = record
            self._stages[key[0]] = len(record.seats)
            before = record if record.epoch == 1 else self._by_hash.get(record.previous)
            if before is None:
                raise Violation("a record that follows none that anybody went by")
            lawful = {(voter.peer, voter.incarnation) for voter in voters_of(before)}
            signers = {(vote.peer, vote.incarnation) for vote in certificate.votes}
            needed = len(lawful) if record.epoch == 1 else majority(len(lawful))
            if not signers <= lawful or len(signers) < needed:
                raise Violation(f"record {record.epoch} has {len(signers & lawful)} lawful votes of {needed}")
            for witness in set(record.witnesses) - (set(before.witnesses) if record.epoch > 1 else set()):
                self._named[key[0], witness] = times = self._named.get((key[0], witness), 0) + 1
                if times >= OFTEN:
                    raise Violation(f"{witness.peer} is named a witness {times} times")
        self.note(now, "adopted", node)

    def voted(self, node: str, crew: bytes, epoch: int, ballot: int, incarnation: bytes, digest: bytes) -> None:
        if epoch > 1 and self._votes.setdefault((crew, epoch, ballot, node, incarnation), digest) != digest:
            raise Violation(f"{node} votes for two records in ballot {ballot} of epoch {epoch}")

    def moved(self, voter: Voter, crew: bytes, stage: int | None) -> None:
        """`voter` has gone from `crew` to another, in which it has `stage`."""
        self._left.add((crew, voter))
        if stage is None:
            raise Violation(f"{voter.peer} goes from one crew to another and has a seat in none")

    def spoke(self, crew: bytes, voter: Voter) -> None:
        """`voter` has promised or voted for a record of `crew`."""
        if (crew, voter) in self._left:
            raise Violation(f"{voter.peer} has a say in a crew that it left")

    def accepted(self, crew: bytes, stage: int, stage_epoch: int, writer: str) -> None:
        """A frame of `writer`, a trainer process, was taken as the stage's, in the epoch that the receiver goes by."""
        known = self._writers.setdefault((crew, stage, stage_epoch), writer)
        if known != writer:
            raise Violation(f"two writers of stage {stage}, epoch {stage_epoch}: {known} and {writer}")

    def took(self, now: float, crew: bytes, stage: int, step: int, micro_batches: tuple[int, ...], writer: str) -> None:
        """`writer` has gone from `step` steps to one more."""
        self.note(now, "took", stage, step, writer)
        if self._sets.setdefault((crew, step), micro_batches) != micro_batches:
            raise Violation(f"step {step} of {micro_batches} at stage {stage}, and of {self._sets[crew, step]} elsewhere")
        if self._taken.get((writer, crew, stage), -1) >= step:
            raise Violation(f"{writer} takes step {step} twice")
        self._taken[writer, crew, stage] = step
        takers = self._took.setdefault((crew, step), {})
        takers[stage] = writer
        if len(takers) == self._stages[crew]:
            self._all_took[crew] = (step + 1, set(takers.values()))
            self.counts["steps"] = self.counts.get("steps", 0) + 1

    def settled(self, crew: bytes, epoch: int, step: int, keeping: set[str]) -> None:
        """The crew goes on at `step`; `keeping` are the trainer processes that are part of it with what they hold.

        What somebody who missed the newest record believes counts for nothing.
        """
        if (crew, epoch + 1) in self._records:
            return
        taken, takers = self._all_took.get(crew, (0, set()))
        if step < taken and takers & keeping:
            raise Violation(f"the crew goes on at {step}, and {taken} steps had been taken by all")

    def averaged(self, now: float, node: str, phase: str, lease_left: float) -> None:
        self.note(now, "averaged", node)
        if phase != "active":
            raise Violation(f"{node} averages in {phase}")
        if lease_left < 0:
            raise Violation(f"{node} averages {-lease_left:.1f} s after its lease")

    def weight(self, stage: int, step: int) -> bytes:
        """Of a run without failures."""
        chain = self._chain.setdefault(stage, [first_weight(stage)])
        while len(chain) <= step:
            chain.append(next_weight(chain[-1], len(chain) - 1, step_micro_batches(len(chain) - 1)))
        return chain[step]

    def check_weight(self, stage: int, step: int, weight: bytes, who: str) -> None:
        if weight != self.weight(stage, step):
            raise Violation(f"{who}: stage {stage} after {step} steps is not that of a run without failures")

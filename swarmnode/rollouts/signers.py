"""What a node remembers of each author of rollouts, pace, sequence numbers seen, newest policy
version, and of frames. Bounded per author, in authors and in frames.

Identities are free, so nothing here may grow with their number: the author that was silent for
longest is forgotten first, and being forgotten gives an author nothing but a fresh allowance. What
is ignored costs its sender nothing, so it is remembered apart, and pushes nothing out of what is
remembered of candidates.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from swarmnode.wire import limits

MOST_SIGNERS = 4096
"""Authors of whom something became a candidate; and as many others."""
MOST_CANDIDATES = 131_072
"""Candidates whose content ids are remembered, in 28 MiB: 36 a second for as long as one can be
admitted."""
WINDOW = 4096
"""Sequence numbers below the newest that are still told apart; older ones count as late. A bit
each."""
BURST_SECONDS = 4.0
"""A peer that was silent may catch up by this many seconds of its allowance."""
VERSION_MEMORY_SECONDS = 600.0
"""After so long without an equal or newer one, a sender's newest policy version no longer makes
older ones outdated: its trainer may have gone back to an older state."""


class Signer:
    """One author: a token bucket, a replay window (as in IPsec, RFC 4303 section 3.4.3), and its
    newest policy version.

    Times are Unix seconds; a clock that steps back only delays.
    """

    __slots__ = (
        "_bits",
        "_last_seen",
        "_newest_sequence",
        "_refilled_at",
        "_tokens",
        "_version",
        "_version_at",
        "peer",
    )

    def __init__(self, peer: str, rate: float, now: float) -> None:
        self.peer = peer
        self._tokens = max(1.0, rate * BURST_SECONDS)
        self._refilled_at = now
        self._newest_sequence = -1
        self._bits = 0
        self._last_seen = now
        self._version: tuple[bytes, int] | None = None
        self._version_at = now

    def has_token(self, rate: float, now: float) -> bool:
        """Whether one more group fits `rate` groups per second; takes nothing."""
        elapsed = max(0.0, now - self._refilled_at)
        self._tokens = min(max(1.0, rate * BURST_SECONDS), self._tokens + elapsed * rate)
        self._refilled_at = now
        return self._tokens >= 1.0

    def take_token(self) -> None:
        self._tokens -= 1.0

    def sequence_reason(self, sequence: int, now: float) -> str | None:
        """`sequence_reused`, `stale` (below the window), or None. An author silent for longer than
        a group lives starts anew."""
        if now - self._last_seen > limits.GROUP_AGE_SECONDS + limits.CLOCK_SKEW_SECONDS:
            self._newest_sequence, self._bits = -1, 0
        behind = self._newest_sequence - sequence
        if behind < 0:
            return None
        if behind >= WINDOW:
            return "stale"
        return "sequence_reused" if self._bits >> behind & 1 else None

    def is_outdated(self, model: bytes, version: int, most_behind: int, now: float) -> bool:
        """Whether `version` is more than `most_behind` behind the newest of the same model that
        arrived lately."""
        if (
            self._version is None
            or self._version[0] != model
            or now - self._version_at > VERSION_MEMORY_SECONDS
        ):
            return False
        return self._version[1] - version > most_behind

    def note(self, sequence: int, now: float) -> None:
        """Remember that `sequence` was taken."""
        ahead = sequence - self._newest_sequence
        if ahead > 0:
            self._bits = (self._bits << ahead | 1) & _MASK if ahead < WINDOW else 1
            self._newest_sequence = sequence
        else:
            self._bits |= 1 << -ahead
        self._last_seen = now

    def note_version(self, model: bytes, version: int, now: float) -> None:
        """Remember the newest version of the sender's model."""
        forgotten = now - self._version_at > VERSION_MEMORY_SECONDS
        if (
            self._version is None
            or self._version[0] != model
            or forgotten
            or version >= self._version[1]
        ):
            self._version, self._version_at = (model, version), now


_MASK = (1 << WINDOW) - 1


class Signers:
    """Authors by raw public key, at most MOST_SIGNERS of whom something became a candidate, and
    MOST_SIGNERS others."""

    def __init__(self) -> None:
        self._proven: OrderedDict[bytes, Signer] = OrderedDict()
        self._others: OrderedDict[bytes, Signer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._proven) + len(self._others)

    def find(self, key: bytes) -> Signer | None:
        """The author with this key, now the most recently active; None when unknown. Never creates
        one: the key may be made up."""
        for known in (self._proven, self._others):
            if key in known:
                known.move_to_end(key)
                return known[key]
        return None

    def add(self, key: bytes, signer: Signer) -> None:
        """Remember an author whose signature was verified."""
        _put(self._others, key, signer)

    def prove(self, key: bytes, signer: Signer) -> None:
        """Something of this author became a candidate."""
        self._others.pop(key, None)
        _put(self._proven, key, signer)


def _put(signers: OrderedDict[bytes, Signer], key: bytes, signer: Signer) -> None:
    signers[key] = signer
    if len(signers) > MOST_SIGNERS:
        signers.popitem(last=False)


class Frames:
    """Content ids of frames that were here: those that became candidates, each for as long as it
    could be admitted again, and the last `most` of the others.

    Where more than MOST_CANDIDATES come in that time the oldest are forgotten, and `is_forgotten`
    is true of all that is as old.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._others: OrderedDict[bytes, None] = OrderedDict()
        self._candidates: OrderedDict[bytes, float] = OrderedDict()
        self._forgotten_at = -math.inf

    def __len__(self) -> int:
        return len(self._others) + len(self._candidates)

    def __contains__(self, content: bytes) -> bool:
        return content in self._candidates or content in self._others

    def add(self, content: bytes) -> None:
        """A frame was here."""
        self._others[content] = None
        if len(self._others) > self.most:
            self._others.popitem(last=False)

    def prove(self, content: bytes, now: float) -> None:
        """A frame became a candidate."""
        self._others.pop(content, None)
        self._candidates[content] = now
        longest = limits.GROUP_AGE_SECONDS + limits.CLOCK_SKEW_SECONDS
        while (
            len(self._candidates) > MOST_CANDIDATES
            or now - next(iter(self._candidates.values())) > longest
        ):
            _, at = self._candidates.popitem(last=False)
            if at <= now:  # else the clock stepped back
                self._forgotten_at = at

    def is_forgotten(self, created_at: int) -> bool:
        """Whether a group made then, Unix milliseconds, may have been a candidate that is not
        remembered any more."""
        return created_at / 1000 <= self._forgotten_at + limits.CLOCK_SKEW_SECONDS

"""State of the authors of rollouts: rate, sequence numbers, newest policy version; and the set of
frames seen. All of it is bounded.

Identities are free, so memory must not grow with their number. The least recently active author is
forgotten first; a forgotten author gains a fresh rate allowance only. Ignored frames cost their
sender nothing. They are therefore stored separately from candidates, so that they cannot displace
them.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from swarmnode.wire import limits

MOST_SIGNERS = 4096
"""Largest number of stored authors with a candidate, and of authors without one."""
MOST_CANDIDATES = 131_072
"""Stored content ids of candidates, 28 MiB: 36 per second for the time in which a group can be
admitted."""
WINDOW = 4096
"""Size of the replay window in sequence numbers, one bit each. Lower numbers are refused as
stale."""
BURST_SECONDS = 4.0
"""Size of the token bucket, in seconds of the allowed rate."""
VERSION_MEMORY_SECONDS = 600.0
"""Time without an equal or newer policy version after which older versions are accepted again: the
sender's trainer may have been restored to an older state."""


class Signer:
    """State of one author: a token bucket, a replay window (as in IPsec, RFC 4303 section 3.4.3),
    and the newest policy version.

    Times are Unix seconds. A clock that steps back only causes a delay.
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
        """Return True if `rate` groups per second allow one more group. Does not take the token."""
        elapsed = max(0.0, now - self._refilled_at)
        self._tokens = min(max(1.0, rate * BURST_SECONDS), self._tokens + elapsed * rate)
        self._refilled_at = now
        return self._tokens >= 1.0

    def take_token(self) -> None:
        self._tokens -= 1.0

    def sequence_reason(self, sequence: int, now: float) -> str | None:
        """Return `sequence_reused`, `stale` (below the window), or None. The window is reset after
        a silence longer than the lifetime of a group."""
        if now - self._last_seen > limits.GROUP_AGE_SECONDS + limits.CLOCK_SKEW_SECONDS:
            self._newest_sequence, self._bits = -1, 0
        behind = self._newest_sequence - sequence
        if behind < 0:
            return None
        if behind >= WINDOW:
            return "stale"
        return "sequence_reused" if self._bits >> behind & 1 else None

    def is_outdated(self, model: bytes, version: int, most_behind: int, now: float) -> bool:
        """Return True if `version` is more than `most_behind` behind the newest recent version of
        the same model."""
        if (
            self._version is None
            or self._version[0] != model
            or now - self._version_at > VERSION_MEMORY_SECONDS
        ):
            return False
        return self._version[1] - version > most_behind

    def note(self, sequence: int, now: float) -> None:
        """Record an accepted sequence number."""
        ahead = sequence - self._newest_sequence
        if ahead > 0:
            self._bits = (self._bits << ahead | 1) & _MASK if ahead < WINDOW else 1
            self._newest_sequence = sequence
        else:
            self._bits |= 1 << -ahead
        self._last_seen = now

    def note_version(self, model: bytes, version: int, now: float) -> None:
        """Record the newest version of the author's model."""
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
    """Authors by raw public key: at most MOST_SIGNERS that sent a candidate, and MOST_SIGNERS
    that did not."""

    def __init__(self) -> None:
        self._proven: OrderedDict[bytes, Signer] = OrderedDict()
        self._others: OrderedDict[bytes, Signer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._proven) + len(self._others)

    def find(self, key: bytes) -> Signer | None:
        """Return the author with this key and mark it as most recently active; None if unknown.
        Never creates an author, because the key may be invented."""
        for known in (self._proven, self._others):
            if key in known:
                known.move_to_end(key)
                return known[key]
        return None

    def add(self, key: bytes, signer: Signer) -> None:
        """Store an author whose signature was verified."""
        _put(self._others, key, signer)

    def prove(self, key: bytes, signer: Signer) -> None:
        """Record that a group of this author became a candidate."""
        self._others.pop(key, None)
        _put(self._proven, key, signer)


def _put(signers: OrderedDict[bytes, Signer], key: bytes, signer: Signer) -> None:
    signers[key] = signer
    if len(signers) > MOST_SIGNERS:
        signers.popitem(last=False)


class Frames:
    """Content ids of the frames seen: candidates while they could be admitted again, and the last
    `most` other frames.

    If more than MOST_CANDIDATES arrive in that time, the oldest are forgotten, and `is_forgotten`
    returns True for groups of that age.
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
        """Record a frame."""
        self._others[content] = None
        if len(self._others) > self.most:
            self._others.popitem(last=False)

    def prove(self, content: bytes, now: float) -> None:
        """Record that a frame became a candidate."""
        self._others.pop(content, None)
        self._candidates[content] = now
        longest = limits.GROUP_AGE_SECONDS + limits.CLOCK_SKEW_SECONDS
        while (
            len(self._candidates) > MOST_CANDIDATES
            or now - next(iter(self._candidates.values())) > longest
        ):
            _, at = self._candidates.popitem(last=False)
            if at <= now:  # otherwise the clock stepped back
                self._forgotten_at = at

    def is_forgotten(self, created_at: int) -> bool:
        """Return True if a group created at `created_at` (Unix milliseconds) may have been a
        candidate that was forgotten."""
        return created_at / 1000 <= self._forgotten_at + limits.CLOCK_SKEW_SECONDS

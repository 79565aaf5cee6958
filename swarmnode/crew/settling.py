"""How many steps the crew has taken, as a new roster begins. Pure; no torch.

A new record ends all links, so every stage that was kept in memory has stopped when it reports under that record's epoch, and can take
nothing any more that the old roster decided. What they report is final, and everybody who has all reports comes to the same answer. A step
that somebody took is taken by all who prepared it, and who did not is restored; one that nobody took is dropped.

When all are prepared and nobody has taken the step, those who are gone may have. If one of them comes back with its own journal, that
knows; so a stage that is still looking for its journal is waited for then, and only then.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.crew.local import Settled
from swarmnode.crew.messages import Status

KEPT = ("ready", "active")
WAITED_FOR = ("absent", "claiming", "stopping", "failed")


def settle(epoch: int, known: int, statuses: Sequence[Status | None]) -> Settled | None:
    """Where the crew goes on, from each stage's report under the roster `epoch`; None while it has to be waited for.

    `known` is the record's step: without any copy that says otherwise the crew goes on there.
    """
    reports = [status for status in statuses if status is not None]
    if len(reports) < len(statuses) or any(status.phase in WAITED_FOR for status in reports):
        return None
    kept = [status for status in reports if status.phase in KEPT]
    restored = [status for status in reports if status.phase not in KEPT]
    journals = [status for status in restored if status.journal]
    searching = any(status.phase == "loading" and not status.journal for status in restored)
    if not kept:
        if searching:
            return None
        return _at(epoch, max((known, *(status.step for status in journals))), journals)
    taken = max(status.step for status in kept)
    undecided = all(status.prepared and status.step == taken for status in kept)
    if undecided and searching:
        return None
    if undecided and any(status.step == taken + 1 for status in journals):
        return _at(epoch, taken + 1, journals)
    return _at(epoch, taken, kept)


def _at(epoch: int, step: int, sources: Sequence[Status]) -> Settled:
    took = next((status for status in sources if status.step == step and not status.prepared), None)
    return Settled(epoch, step) if took is None else Settled(epoch, step, took.attempt, took.clip, took.learning_rate)

"""Admission: the checks that a group from a stranger must pass before a node trains on it, cheapest
first. Pure, bounded, cannot raise.

    envelope ─ size ─ seen before? ─ decode ─ own? greylisted? ─ pace ─ signature ─ payload
             ─ clock ─ sequence ─ policy version ─ task and version ─ seed ─ tokens, length, charset
             ─▶ Candidate
    Candidate ─ [scorer: prompt, rewards] ─ rewards in range ─ not all equal ─▶ ExternalGroup

A sender chooses neither the question nor its answer nor the reward: the question follows from
(swarm, its peer id, its counter), and the rest is recomputed here. So a rollout cannot be stolen:
whoever signs another's completions must carry its own seed, whose question they do not answer. The
share of a liar is bounded elsewhere: in the pool, in a step (sampling), and by an importance weight
of at most 1.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection

import msgspec

from swarmnode.config import SharingConfig
from swarmnode.errors import BadMessage
from swarmnode.rollouts.groups import (
    Candidate,
    ExternalGroup,
    has_unwanted_characters,
    is_useful,
)
from swarmnode.rollouts.pool import DROP_VERSIONS
from swarmnode.rollouts.reasons import REASONS, Verdict
from swarmnode.rollouts.signers import Frames, Signer, Signers
from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.seeds import check_seed
from swarmnode.wire import codec, envelope, ids, limits, tensors
from swarmnode.wire.messages import Completion, Envelope, RolloutGroup

log = logging.getLogger(__name__)

SEEN_FRAMES = 16_384
"""Content ids remembered of what became no candidate, so that a frame that comes twice costs one
hash."""
BYTES_PER_TOKEN = 256
"""No tokenizer in use has a longer token; text beyond this is not what was sampled."""
LONGER_THAN_OURS = 4
"""Completions up to this many times our own limit are trained on."""


class Rejected(msgspec.Struct, frozen=True):
    """A refused group. `peer` is the author where the signature proved it, else None: then the peer
    that gave it is answerable."""

    verdict: Verdict
    reason: str
    peer: str | None = None


class AdmissionStatistics(msgspec.Struct, frozen=True):
    """Groups by how far they came. Reasons are those of `reasons.REASONS` that occurred, never
    something that a peer chose."""

    candidates: int = 0
    """Complete groups that passed every check but the scorer's."""
    admitted: int = 0
    """Groups that passed every check and went into the pool."""
    ignored: dict[str, int] = {}
    """Groups dropped without blame, by reason."""
    rejected: dict[str, int] = {}
    """Groups dropped at the cost of somebody's reputation, by reason."""
    signers: int = 0
    seen: int = 0
    last_internal_error: str = ""

    @property
    def outcomes(self) -> dict[str, int]:
        """All of them by name, without those that did not occur."""
        passed = {
            "candidate": self.candidates,
            "admitted": self.admitted,
        }
        return {
            name: count for name, count in (passed | self.ignored | self.rejected).items() if count
        }


class Admission:
    """Checks frames for one node. `now` is Unix seconds everywhere.

    swarm: 32-byte swarm id; own_peer: this node's peer id; tasks: names it trains on;
    is_greylisted: peers not to be listened to; keeps_rules: whether a group is one that the swarm's
    manifest allows; chooses: members choose the difficulty of their questions.
    """

    def __init__(
        self,
        swarm: bytes,
        own_peer: str,
        tasks: Collection[str],
        cfg: SharingConfig,
        *,
        max_completion_length: int = limits.TOKENS,
        is_greylisted: Callable[[str], bool] = lambda peer: False,
        keeps_rules: Callable[[RolloutGroup], bool] = lambda group: True,
        chooses: bool = False,
    ) -> None:
        self.swarm = swarm
        self.own_peer = own_peer
        self.cfg = cfg
        self.max_completion_length = max_completion_length
        self.is_greylisted = is_greylisted
        self.keeps_rules = keeps_rules
        self.chooses = chooses
        self.policy = (b"", b"")
        """Fingerprints of this node's model and tokenizer."""
        self.tokens_per_text_byte = 1.0
        self._versions = {name: task_version(name) for name in tasks if name in TASKS}
        self._signers = Signers()
        self._seen = Frames(SEEN_FRAMES)
        self._outcomes: Counter[str] = Counter()
        self._last_internal_error = ""

    def set_policy(self, model: bytes, tokenizer: bytes, tokens_per_text_byte: float) -> None:
        """Take what this node samples with, and how many tokens it makes of a byte. Until then
        every text counts one token a byte."""
        self.policy = (model, tokenizer)
        self.tokens_per_text_byte = tokens_per_text_byte

    def check(self, body: bytes, now: float) -> Candidate | Rejected:
        """Check everything that needs no scorer on a fetched envelope. Cannot raise."""
        try:
            result = self._check(body, now)
        except Exception as error:  # noqa: BLE001
            # a defect of ours that an envelope found must cost that group, not the node
            self._last_internal_error = f"{type(error).__name__}: {error}"[:200]
            return self.refuse("internal")
        if isinstance(result, str):
            return self.refuse(result)
        if isinstance(result, tuple):
            return self.refuse(*result)
        self._outcomes["candidate"] += 1
        return result

    def has_seen(self, content: bytes) -> bool:
        """Whether this frame was here before, whatever became of it."""
        return content in self._seen

    def check_scored(
        self, candidate: Candidate, prompt: str, rewards: list[float]
    ) -> ExternalGroup | Rejected:
        """`rewards` (G,) as this node's scorer computed them. Cannot raise."""
        if len(rewards) != len(candidate.group.completions) or not all(
            math.isfinite(r) and 0.0 <= r <= 1.0 for r in rewards
        ):
            return self.refuse("scorer", candidate.peer)
        if not is_useful(rewards):
            return self.refuse("zero_advantage", candidate.peer)
        return ExternalGroup(
            candidate.content, candidate.peer, candidate.group, prompt, list(rewards), staleness=0
        )

    def refuse(self, reason: str, peer: str | None = None) -> Rejected:
        """Count `reason` and make the answer for it; also for the steps around admission (queue,
        scorer, fetch, trainer)."""
        verdict = REASONS[reason]
        if not self._outcomes[reason]:
            level = log.warning if verdict is Verdict.REJECT else log.info
            level("group from a peer refused for the first time: %s, peer %s", reason, peer)
        self._outcomes[reason] += 1
        return Rejected(verdict, reason, peer)

    def note_admitted(self) -> None:
        """Count a group that reached the pool."""
        self._outcomes["admitted"] += 1

    def statistics(self) -> AdmissionStatistics:
        by_verdict = lambda verdict: {
            reason: n for reason, n in self._outcomes.items() if REASONS.get(reason) is verdict
        }
        return AdmissionStatistics(
            candidates=self._outcomes["candidate"],
            admitted=self._outcomes["admitted"],
            ignored=by_verdict(Verdict.IGNORE),
            rejected=by_verdict(Verdict.REJECT),
            signers=len(self._signers),
            seen=len(self._seen),
            last_internal_error=self._last_internal_error,
        )

    def _check(self, body: bytes, now: float) -> Candidate | str | tuple[str, str]:
        """Return the candidate, or the reason why there is none, with the author where the
        signature proved it."""
        if len(body) > limits.GROUP_BYTES:
            return "oversize"
        content = envelope.content_id(body)
        if content in self._seen:
            return "duplicate"
        try:
            signed = codec.decode(body, Envelope, limits.GROUP_BYTES)
            signer = self._signers.find(signed.key)
            peer = signer.peer if signer else envelope.peer_id(signed.key)
            if peer == self.own_peer:
                return "own"
            if self.is_greylisted(peer):
                return "greylisted"
            if signer and not signer.has_token(self.cfg.groups_per_second, now):
                # before the signature on purpose: a storm costs a hash, and a forged envelope takes
                # no token
                return "rate"
            envelope.verify(signed, ids.DOMAIN_ROLLOUT, self.swarm)
        except BadMessage as bad:
            return bad.reason
        self._seen.add(content)
        if signer is None:
            signer = Signer(peer, self.cfg.groups_per_second, now)
            self._signers.add(signed.key, signer)
        signer.take_token()
        try:
            group = codec.decode_payload(signed, limits.GROUP_BYTES)
        except BadMessage as bad:
            return bad.reason, peer
        forgotten = "stale" if self._seen.is_forgotten(group.created_at) else None
        reason = (
            clock_reason(group.created_at, now)
            or forgotten
            or signer.sequence_reason(group.sequence, now)
            or self._group_reason(group, signer, now)
        )
        if reason:
            return reason, peer
        signer.note(group.sequence, now)
        signer.note_version(group.model, group.policy_version, now)
        self._signers.prove(signed.key, signer)
        self._seen.prove(content, now)
        return Candidate(content, peer, group, body)

    def _group_reason(self, group: RolloutGroup, signer: Signer, now: float) -> str | None:
        if signer.is_outdated(group.model, group.policy_version, DROP_VERSIONS, now):
            return "outdated"
        task = group.task
        if task.difficulty and not self.chooses:
            return "seed"
        if not check_seed(self.swarm, signer.peer, group.sequence, task):
            return "seed"
        version = self._versions.get(task.id)
        if version is None:
            return "unknown_task"
        if version != task.version:
            return "unknown_version"
        if not self.keeps_rules(group):
            return "agreement"
        if not all(_adds_up(c) for c in group.completions):
            return "tokens"
        if any(
            self._own_tokens(c, group.tokenizer) > LONGER_THAN_OURS * self.max_completion_length
            for c in group.completions
        ):
            return "too_long"
        if any(has_unwanted_characters(c.text) for c in group.completions):
            return "charset"
        ours = (group.model, group.tokenizer) == self.policy
        if ours and not all(c.token_ids and c.logprobs for c in group.completions):
            return "no_ids"
        return None

    def _own_tokens(self, completion: Completion, tokenizer: bytes) -> float:
        """About how many tokens a completion costs this node: as counted by a sender with the same
        tokenizer, else from its length."""
        if tokenizer == self.policy[1]:
            return completion.tokens
        return len(completion.text.encode()) * self.tokens_per_text_byte


def clock_reason(created_at: int, now: float) -> str | None:
    """Return `stale` or `future` for a group made at `created_at`, Unix milliseconds, that is too
    old or too new at `now`, Unix seconds; None for a timely one."""
    age = now - created_at / 1000
    if age > limits.GROUP_AGE_SECONDS:
        return "stale"
    return "future" if age < -limits.CLOCK_SKEW_SECONDS else None


def _adds_up(completion: Completion) -> bool:
    """Whether text, token count and log-probabilities can belong together. The sum may differ by
    how it was rounded: 1 % and 0.05 nats."""
    if len(completion.text.encode()) > BYTES_PER_TOKEN * completion.tokens:
        return False
    if not completion.logprobs:
        return True
    total = float(tensors.unpack_logprobs(completion.logprobs).sum(dtype="float64"))
    return abs(total - completion.logprob) <= 0.05 + 0.01 * abs(total)

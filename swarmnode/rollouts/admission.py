"""Admission: the checks that a peer's group must pass before a node trains on it, cheapest first.
The module does no I/O, its memory is bounded, and no group can make it raise.

    envelope ─ size ─ seen before? ─ decode ─ own? greylisted? ─ pace ─ signature ─ payload
             ─ clock ─ sequence ─ policy version ─ seed ─ task and its version ─ turns ─ manifest
             ─ tokens, length, charset ─▶ Candidate
    Candidate ─ [scorer: prompt, rewards, replays of episodes] ─ rewards in range ─ replays end
              where the author's episodes end ─ rewards not all equal ─▶ ExternalGroup

An author chooses neither the question nor its answer nor the reward. The question follows from the
swarm, the author's peer id, its counter, the task and the difficulty; answer, observations and
reward are recomputed here. So a peer cannot sign stolen completions: they answer another question
than its own. Pool, sampling and an importance weight of at most 1 bound the influence of each
author.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection

import msgspec

from swarmnode import __version__
from swarmnode.config import SharingConfig
from swarmnode.errors import BadMessage
from swarmnode.rollouts.groups import (
    Candidate,
    ExternalGroup,
    has_turns,
    has_unwanted_characters,
    is_useful,
    played_actions,
)
from swarmnode.rollouts.pool import DROP_VERSIONS
from swarmnode.rollouts.reasons import REASONS, Verdict
from swarmnode.rollouts.signers import Frames, Signer, Signers
from swarmnode.tasks.frames import Episode, Scored
from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.seeds import check_seed
from swarmnode.wire import codec, envelope, ids, limits, tensors
from swarmnode.wire.messages import Completion, Envelope, RolloutGroup, Turn

log = logging.getLogger(__name__)

SEEN_FRAMES = 16_384
"""Number of stored content ids of envelopes that did not become candidates. A repeated envelope
then costs one hash."""
BYTES_PER_TOKEN = 256
"""Most UTF-8 bytes of text per token. No tokenizer in use has a longer token."""
LONGER_THAN_OURS = 4
"""Longest completion that is trained on, in units of this node's own limit."""


class Rejected(msgspec.Struct, frozen=True):
    """A refused group. `peer` is the author if the signature is valid, else None."""

    verdict: Verdict
    reason: str
    peer: str | None = None


class AdmissionStatistics(msgspec.Struct, frozen=True):
    """Counts of groups by outcome. Reasons are keys of `reasons.REASONS`, never a peer's text."""

    candidates: int = 0
    """Groups that passed every check except the scorer's."""
    admitted: int = 0
    """Groups that passed every check and went into the pool."""
    ignored: dict[str, int] = {}
    """Groups dropped without blame, by reason."""
    rejected: dict[str, int] = {}
    """Groups dropped at the cost of a peer's reputation, by reason."""
    signers: int = 0
    """Number of authors with stored state."""
    seen: int = 0
    """Number of stored content ids."""
    last_internal_error: str = ""
    """The last exception that a group caused; empty if there was none."""

    @property
    def outcomes(self) -> dict[str, int]:
        """Counts of all outcomes that occurred, by name."""
        passed = {
            "candidate": self.candidates,
            "admitted": self.admitted,
        }
        return {
            name: count for name, count in (passed | self.ignored | self.rejected).items() if count
        }


class Admission:
    """Checks envelopes for one node. `now` is in Unix seconds.

    Args:
        swarm: Swarm id, 32 bytes.
        own_peer: This node's peer id.
        tasks: Names of the tasks that it trains on.
        cfg: The settings `sharing.*`.
        max_completion_length: This node's own limit, tokens.
        is_greylisted: Peer id → True if the peer's groups are ignored.
        meets_rules: Returns True if the swarm's manifest allows a group.
        chooses: True if members choose the difficulty of their questions.
        version_of: Peer id → version of swarmnode that the peer says it runs; empty if unknown.
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
        meets_rules: Callable[[RolloutGroup], bool] = lambda group: True,
        chooses: bool = False,
        version_of: Callable[[str], str] = lambda peer: "",
    ) -> None:
        self.swarm = swarm
        self.own_peer = own_peer
        self.cfg = cfg
        self.max_completion_length = max_completion_length
        self.is_greylisted = is_greylisted
        self.meets_rules = meets_rules
        self.chooses = chooses
        self.version_of = version_of
        self.policy = (b"", b"")
        """Fingerprints of this node's model and tokenizer."""
        self.tokens_per_text_byte = 1.0
        self._versions = {name: task_version(name) for name in tasks if name in TASKS}
        self._signers = Signers()
        self._seen = Frames(SEEN_FRAMES)
        self._outcomes: Counter[str] = Counter()
        self._diverged: set[str] = set()
        """Tasks with an episode that ended at another action in the replay."""
        self._last_internal_error = ""

    def set_policy(self, model: bytes, tokenizer: bytes, tokens_per_text_byte: float) -> None:
        """Set the fingerprints of model and tokenizer, and the mean number of tokens per byte of
        text. Before the first call a text counts one token per byte."""
        self.policy = (model, tokenizer)
        self.tokens_per_text_byte = tokens_per_text_byte

    def check(self, body: bytes, now: float) -> Candidate | Rejected:
        """Apply all checks that need no scorer to a fetched envelope. Cannot raise."""
        try:
            result = self._check(body, now)
        except Exception as error:  # noqa: BLE001
            # An envelope that triggers a defect of this node must cost that group, not the node.
            self._last_internal_error = f"{type(error).__name__}: {error}"[:200]
            return self.refuse("internal")
        if isinstance(result, str):
            return self.refuse(result)
        if isinstance(result, tuple):
            return self.refuse(*result)
        self._outcomes["candidate"] += 1
        return result

    def has_seen(self, content: bytes) -> bool:
        """Return True if the envelope with this content id passed the signature check before."""
        return content in self._seen

    def check_scored(self, candidate: Candidate, scored: Scored) -> ExternalGroup | Rejected:
        """Check a candidate against the result of this node's scorer. Cannot raise.

        Args:
            candidate: The group that passed `check`.
            scored: The regenerated question with (G,) rewards and, of an episode task, the replays.
        """
        group, rewards = candidate.group, scored.rewards
        if len(rewards) != len(group.completions) or not all(
            math.isfinite(r) and 0.0 <= r <= 1.0 for r in rewards
        ):
            return self.refuse("scorer", candidate.peer)
        if group.completions[0].turns:
            if len(scored.episodes) != len(group.completions):
                return self.refuse("scorer", candidate.peer)
            replays = zip(group.completions, scored.episodes, strict=True)
            if not all(_ends_alike(completion, episode) for completion, episode in replays):
                self._log_divergence(candidate)
                return self.refuse("trajectory", candidate.peer)
        if not is_useful(rewards):
            return self.refuse("zero_advantage", candidate.peer)
        return ExternalGroup(
            candidate.content,
            candidate.peer,
            group,
            scored.prompt,
            list(rewards),
            staleness=0,
            components=scored.components,
            observations=[list(episode.observations) for episode in scored.episodes],
        )

    def refuse(self, reason: str, peer: str | None = None) -> Rejected:
        """Count a refusal and return it. The first refusal for each reason is logged.

        The steps after admission (scoring queue, scorer, pool) also report their refusals here.

        Args:
            reason: A key of REASONS.
            peer: The author, if the signature is valid. For a listed group, the holder.
        """
        verdict = REASONS[reason]
        if not self._outcomes[reason]:
            level = log.warning if verdict is Verdict.REJECT else log.info
            level("first group refused for this reason: reason=%s peer=%s", reason, peer)
        self._outcomes[reason] += 1
        return Rejected(verdict, reason, peer)

    def _log_divergence(self, candidate: Candidate) -> None:
        """Log the first group of each task whose episodes end at another action in the replay, with
        the versions that may explain the difference."""
        task = candidate.group.task
        if task.id in self._diverged:
            return
        self._diverged.add(task.id)
        log.warning(
            "replay of a peer's episode ended differently; its library may have another version:"
            " task=%s task_version=%s peer=%s its_version=%s own_version=%s",
            task.id,
            task.version,
            candidate.peer,
            self.version_of(candidate.peer) or "unknown",
            __version__,
        )

    def note_admitted(self) -> None:
        """Count a group that reached the pool."""
        self._outcomes["admitted"] += 1

    def statistics(self) -> AdmissionStatistics:
        """Return the counts of groups."""
        by_verdict = lambda verdict: {
            reason: self._outcomes[reason] for reason, each in REASONS.items() if each is verdict
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
        """Return the candidate, or the reason of the refusal, with the author if the signature is
        valid."""
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
                # Checked before the signature, so that a flood costs one hash per envelope. The
                # token is taken after it, so that forged envelopes cannot use up an allowance.
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
        """Return the reason for refusing the payload, or None."""
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
        most_turns = TASKS[task.id].turns
        if not all(has_turns(completion, most_turns) for completion in group.completions):
            return "turns"
        if not self.meets_rules(group):
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
        """Return the length of a completion, or of the longest action of an episode, in this node's
        tokens: exact if the author has the same tokenizer, else estimated from its bytes."""
        parts = completion.turns or [Turn(len(completion.text.encode()), completion.tokens)]
        if tokenizer == self.policy[1]:
            return max(part.tokens for part in parts)
        return max(part.text_bytes for part in parts) * self.tokens_per_text_byte


def clock_reason(created_at: int, now: float) -> str | None:
    """Return `stale` or `future` if a group is outside the clock window, else None.

    Args:
        created_at: Time at which the group was made, Unix milliseconds.
        now: Unix seconds.
    """
    age = now - created_at / 1000
    if age > limits.GROUP_AGE_SECONDS:
        return "stale"
    return "future" if age < -limits.CLOCK_SKEW_SECONDS else None


def _ends_alike(completion: Completion, replay: Episode) -> bool:
    """Return True if an episode ends in the replay with its last action, and not before.

    An action that was cut off is not given to the environment, so the replay is not done then.
    """
    return len(replay.observations) == len(played_actions(completion)) and replay.done == (
        completion.finish == "eos"
    )


def _adds_up(completion: Completion) -> bool:
    """Return True if text, token count and log-probabilities are consistent. The sum may differ by
    0.05 nats + 1 %, for rounding."""
    parts = completion.turns or [Turn(len(completion.text.encode()), completion.tokens)]
    if any(part.text_bytes > BYTES_PER_TOKEN * part.tokens for part in parts):
        return False
    if not completion.logprobs:
        return True
    total = float(tensors.unpack_logprobs(completion.logprobs).sum(dtype="float64"))
    return abs(total - completion.logprob) <= 0.05 + 0.01 * abs(total)

"""Admission: the checks that a peer's group must pass before a node trains on it, cheapest first.
The checks do no I/O, their memory is bounded, and no group can make them raise. `ScoringQueue`
passes the candidates to the scorer.

    envelope ─ size ─ seen before? ─ decode ─ own? greylisted? ─ rate ─ signature ─ payload
             ─ clock ─ sequence ─ policy version ─ seed ─ task and its version ─ turns
             ─ manifest ─ tokens, length, charset, token ids ─▶ Candidate
    Candidate ─ [scorer: prompt, rewards, replays of episodes] ─ rewards in range ─ replays end
              where the author's episodes end ─ rewards not all equal ─▶ ExternalGroup

An author chooses neither the question nor its answer nor the reward. The question follows from the
swarm, the author's peer id, its counter and the task; answer, observations and
reward are recomputed here. A peer cannot re-sign copied completions: its own seed gives another
question. Pool, draw and the judge's weight of at most 1 per completion bound the influence of
each author.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec
import trio

from swarmnode.config import SharingConfig
from swarmnode.errors import BadMessage
from swarmnode.latest import Latest
from swarmnode.rollouts.groups import (
    Candidate,
    ExternalGroup,
    answers,
    has_turns,
    has_unwanted_characters,
    is_useful,
    memory_bytes,
    played_actions,
)
from swarmnode.rollouts.reasons import REASONS, Verdict
from swarmnode.tasks.frames import (
    CompletionText,
    Episode,
    Scored,
    ScoreError,
    ScorerFailed,
    TaskUnknown,
)
from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.seeds import check_seed, evaluation_seed
from swarmnode.wire import codec, envelope, ids, limits, tensors
from swarmnode.wire.messages import Completion, Envelope, RolloutGroup, TaskRef, Turn

log = logging.getLogger(__name__)

SEEN_FRAMES = 16_384
"""Number of stored content ids of envelopes that did not become candidates. A repeated envelope
then costs one hash."""
BYTES_PER_TOKEN = 256
"""Most UTF-8 bytes of text per token. No tokenizer in use has a longer token."""
LOGPROB_SUM_NATS, LOGPROB_SUM_SHARE = 0.05, 0.01
"""A completion's log-probability may differ from the sum over its tokens by these nats, plus this
share of the sum, for rounding."""
OUTDATED_VERSIONS = 8
"""Policy versions of an author behind its newest one, beyond which its groups are refused."""
LONGEST_FACTOR = 4
"""Longest completion that is trained on, in units of this node's own limit."""


class Refusal(msgspec.Struct, frozen=True):
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
    ) -> None:
        self.swarm = swarm
        self.own_peer = own_peer
        self.cfg = cfg
        self.max_completion_length = max_completion_length
        self.is_greylisted = is_greylisted
        self.meets_rules = meets_rules
        self.policy = (b"", b"")
        """Fingerprints of this node's model and tokenizer."""
        self.tokens_per_text_byte = 1.0
        self._versions = {name: task_version(name) for name in tasks if name in TASKS}
        self._signers = Signers()
        self._seen = SeenEnvelopes(SEEN_FRAMES)
        self._outcomes: Counter[str] = Counter()
        self._diverged: set[str] = set()
        """Tasks with an episode that ended at another action in the replay."""
        self._last_internal_error = ""

    def set_policy(self, model: bytes, tokenizer: bytes, tokens_per_text_byte: float) -> None:
        """Set the fingerprints of model and tokenizer, and the mean number of tokens per byte of
        text. Before the first call a text counts one token per byte."""
        self.policy = (model, tokenizer)
        self.tokens_per_text_byte = tokens_per_text_byte

    def check(self, body: bytes, now: float) -> Candidate | Refusal:
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

    def check_scored(self, candidate: Candidate, scored: Scored) -> ExternalGroup | Refusal:
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

    def refuse(self, reason: str, peer: str | None = None) -> Refusal:
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
        return Refusal(verdict, reason, peer)

    def _log_divergence(self, candidate: Candidate) -> None:
        """Log the first group of each task whose episodes end at another action in the replay."""
        task = candidate.group.task
        if task.id in self._diverged:
            return
        self._diverged.add(task.id)
        log.warning(
            "replay of a peer's episode ended differently; its library may have another version:"
            " task=%s task_version=%s peer=%s",
            task.id,
            task.version,
            candidate.peer,
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
        self._signers.mark_candidate(signed.key, signer)
        self._seen.mark_candidate(content, now)
        return Candidate(content, peer, group, body)

    def _group_reason(self, group: RolloutGroup, signer: Signer, now: float) -> str | None:
        """Return the reason for refusing the payload, or None."""
        if signer.is_outdated(group.model, group.policy_version, OUTDATED_VERSIONS, now):
            return "outdated"
        task = group.task
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
            self._own_tokens(c, group.tokenizer) > LONGEST_FACTOR * self.max_completion_length
            for c in group.completions
        ):
            return "too_long"
        if any(has_unwanted_characters(c.text) for c in group.completions):
            return "charset"
        is_own_policy = (group.model, group.tokenizer) == self.policy
        if is_own_policy and not all(c.token_ids and c.logprobs for c in group.completions):
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
    """Return True if text, token count and log-probabilities are consistent."""
    parts = completion.turns or [Turn(len(completion.text.encode()), completion.tokens)]
    if any(part.text_bytes > BYTES_PER_TOKEN * part.tokens for part in parts):
        return False
    if not completion.logprobs:
        return True
    total = float(tensors.unpack_logprobs(completion.logprobs).sum(dtype="float64"))
    return abs(total - completion.logprob) <= LOGPROB_SUM_NATS + LOGPROB_SUM_SHARE * abs(total)


# ---- scoring -------------------------------------------------------------------------------------


SCORER_GROUPS = 32
"""Maximum number of groups in a batch."""
SCORER_ACTIONS = 1024
"""Maximum number of actions of episodes in a batch of several groups, so that a batch of honest
episodes stays within the CPU time and the response of one scorer call."""
SCORER_TASKS = 2
"""Batches under way at a time: one is scored while the next is decoded."""
QUEUE_GROUPS = 512
"""Maximum number of candidates that wait for the scorer."""
QUEUE_BYTES = 32 * 2**20
"""Maximum memory of the waiting candidates."""
QUEUE_PEER_GROUPS = 64
"""Maximum number of waiting candidates of one author."""
STRIKES = 3
"""Failures within STRIKE_SECONDS after which an author is excluded."""
STRIKE_SECONDS = 600.0
"""Window of the failures, and length of the exclusion."""
STRIKE_PEERS = 1024
"""Authors whose failures are remembered."""


class Scorer(Protocol):
    """The part of `tasks.client.AsyncScorer` that the queue uses."""

    async def score_many(
        self, items: Sequence[tuple[TaskRef, Sequence[CompletionText]]]
    ) -> list[Scored | ScoreError]: ...


class ScoringQueue:
    """The queue of candidates, the tasks that score them in batches, and the exclusion of authors
    whose groups repeatedly fail the scorer.

        put ─ author excluded? room? ─▶ queue ─▶ scorer ─▶ on_scored
                                                  └ failed ─▶ on_failed, and a strike for the
                                                    author if the scorer works otherwise

    Args:
        scorer: Computes rewards.
        on_scored: Called with each scored candidate.
        on_failed: Called with reason and author of each candidate that could not be scored.
        clock: Returns Unix seconds.
    """

    def __init__(
        self,
        scorer: Scorer,
        on_scored: Callable[[Candidate, Scored], None],
        on_failed: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._scorer = scorer
        self._on_scored = on_scored
        self._on_failed = on_failed
        self._clock = clock
        self._queue = CandidateQueue()
        self._strikes = Strikes()
        self._news = trio.Event()

    def __len__(self) -> int:
        """Return the number of waiting candidates."""
        return len(self._queue)

    def put(self, candidate: Candidate) -> str | None:
        """Queue a candidate.

        Returns:
            None, or the reason of the refusal: `scorer` (its author is excluded) or `busy` (the
            queue is full).
        """
        if self._strikes.is_out(candidate.peer, self._clock()):
            return "scorer"
        if not self._queue.put(candidate):
            return "busy"
        self._news.set()
        return None

    def start(self, nursery: trio.Nursery) -> None:
        """Start the scoring tasks."""
        for _ in range(SCORER_TASKS):
            nursery.start_soon(self._work)

    async def _work(self) -> None:
        """Score batches until cancelled. An author gets a strike only if the scorer succeeds for
        another group of the batch, or for a question that this node chooses; otherwise the scorer
        itself may be broken."""
        while True:
            while not (batch := self._queue.take(SCORER_GROUPS)):
                self._news = trio.Event() if self._news.is_set() else self._news
                await self._news.wait()
            questions = [(c.group.task, answers(c.group)) for c in batch]
            try:
                results = await self._scorer.score_many(questions)
            except ScorerFailed as failed:  # the scorer process cannot be started
                results = [failed] * len(batch)
            works = any(isinstance(scored, Scored) for scored in results)
            lost = [c for c, scored in zip(batch, results, strict=True) if _failed(scored)]
            if lost and not works:
                works = await self._works(lost[0].group.task)
            for candidate, scored in zip(batch, results, strict=True):
                if isinstance(scored, Scored):
                    self._on_scored(candidate, scored)
                    continue
                if works and _failed(scored):
                    self._strikes.add(candidate.peer, self._clock())
                self._on_failed(
                    "unregenerable" if isinstance(scored, TaskUnknown) else "scorer", candidate.peer
                )

    async def _works(self, task: TaskRef) -> bool:
        """Return True if the scorer generates a question that this node chooses. All groups of a
        batch may be of one author."""
        own = TaskRef(task.id, task.version, evaluation_seed(task.id), 0)
        try:
            (scored,) = await self._scorer.score_many([(own, [])])
        except ScorerFailed:
            return False
        return isinstance(scored, Scored)


def _failed(scored: Scored | ScoreError) -> bool:
    return isinstance(scored, ScorerFailed)


class CandidateQueue:
    """First-in, first-out queue bounded by groups, bytes and groups of one author."""

    def __init__(
        self,
        groups: int = QUEUE_GROUPS,
        size: int = QUEUE_BYTES,
        peer_groups: int = QUEUE_PEER_GROUPS,
    ) -> None:
        self.groups = groups
        self.size = size
        self.peer_groups = peer_groups
        self._items: deque[tuple[Candidate, int]] = deque()
        self._bytes = 0
        self._of_peer: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, candidate: Candidate) -> bool:
        """Append a candidate. Return False if the queue is full."""
        size = memory_bytes(candidate.group) + len(candidate.envelope)
        if (
            len(self._items) >= self.groups
            or self._bytes + size > self.size
            or self._of_peer[candidate.peer] >= self.peer_groups
        ):
            return False
        self._items.append((candidate, size))
        self._bytes += size
        self._of_peer[candidate.peer] += 1
        return True

    def take(self, most: int, most_actions: int = SCORER_ACTIONS) -> list[Candidate]:
        """Remove and return up to `most` of the oldest candidates; fewer where more would have
        above `most_actions` actions of episodes together."""
        taken: list[Candidate] = []
        actions = 0
        while self._items and len(taken) < most:
            actions += sum(len(c.turns) for c in self._items[0][0].group.completions)
            if taken and actions > most_actions:
                break
            candidate, size = self._items.popleft()
            self._bytes -= size
            self._of_peer[candidate.peer] -= 1
            if not self._of_peer[candidate.peer]:
                del self._of_peer[candidate.peer]
            taken.append(candidate)
        return taken


class Strikes:
    """Failures of the scorer by author. STRIKES failures within STRIKE_SECONDS exclude the author
    for STRIKE_SECONDS.

    A failure may be a defect of this node, so it costs no reputation. But each failure can block
    the scorer for seconds.
    """

    def __init__(self) -> None:
        self._of = Latest[str, tuple[int, float]](STRIKE_PEERS)

    def add(self, peer: str, now: float) -> None:
        """Count a failure."""
        count, since = self._of.get(peer, (0, now))
        self._of[peer] = (
            (1, now)
            if now - since > STRIKE_SECONDS
            else (count + 1, since if count + 1 < STRIKES else now)
        )

    def is_out(self, peer: str, now: float) -> bool:
        """Return True while groups of `peer` are not scored."""
        count, since = self._of.get(peer, (0, now))
        return count >= STRIKES and now - since <= STRIKE_SECONDS


# ---- authors and repeated envelopes --------------------------------------------------------------


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
    that did not.

    Identities are free, so memory must not grow with their number. The least recently active author
    is forgotten first. It then starts again with a full token bucket, an empty replay window and no
    known version. Ignored envelopes cost their sender nothing. Their authors are therefore stored
    separately, so that they cannot displace the authors of candidates.
    """

    def __init__(self) -> None:
        self._proven = Latest[bytes, Signer](MOST_SIGNERS)
        self._others = Latest[bytes, Signer](MOST_SIGNERS)

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
        self._others[key] = signer

    def mark_candidate(self, key: bytes, signer: Signer) -> None:
        """Record that a group of this author became a candidate."""
        self._others.pop(key, None)
        self._proven[key] = signer


class SeenEnvelopes:
    """Content ids of the envelopes seen: candidates while they could be admitted again, and the
    last `most` other envelopes.

    If more than MOST_CANDIDATES arrive in that time, the oldest are forgotten, and `is_forgotten`
    returns True for groups of that age.
    """

    def __init__(self, most: int) -> None:
        self._others = Latest[bytes, None](most)
        self._candidates: OrderedDict[bytes, float] = OrderedDict()
        self._forgotten_at = -math.inf

    def __len__(self) -> int:
        return len(self._others) + len(self._candidates)

    def __contains__(self, content: bytes) -> bool:
        return content in self._candidates or content in self._others

    def add(self, content: bytes) -> None:
        """Record an envelope."""
        self._others[content] = None

    def mark_candidate(self, content: bytes, now: float) -> None:
        """Record that an envelope became a candidate."""
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

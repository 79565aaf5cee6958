"""N nodes in one process: the parts of a real node (policy, scorer, pool, split, corrections,
update) without sockets.

One round of every node: generate I groups → score → share → draw external groups → judge → one
optimizer step, all nodes at once or in several turns. Groups reach the other pools in the same
turn. `Share` decides how: in memory here; benchmarks.adversaries sends signed frames through
admission.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
import transformers
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.marks import MARKS, share
from swarmnode.averaging.averaged import AveragedTensors
from swarmnode.averaging.gate import AveragingGate, GateDecision, Losses, norm
from swarmnode.averaging.outer import OuterState, Tensors, prepare
from swarmnode.averaging.probe import LossProbe
from swarmnode.config import TaskConfig, TrainingConfig
from swarmnode.policy.generate import GroupSample, Sampling, generate
from swarmnode.policy.load import Policy, trainable
from swarmnode.policy.logprobs import score
from swarmnode.policy.micro import MicroBatcher
from swarmnode.rl.split import AdaptiveSplit
from swarmnode.rollouts.groups import ExternalGroup, is_useful
from swarmnode.rollouts.pool import Pool
from swarmnode.rollouts.sampling import most_per_peer
from swarmnode.rollouts.trust import PeerTrust
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.frames import Scored
from swarmnode.tasks.registry import task_version
from swarmnode.tasks.seeds import choose_task, evaluation_seed, task_seed
from swarmnode.trainer.batch import TrainingGroup, assemble, own_group
from swarmnode.trainer.judge import ExternalChecks, judge, judge_until_full, reserve
from swarmnode.trainer.loop import best_rows
from swarmnode.trainer.needed import Rescore
from swarmnode.trainer.quota import TokenQuota
from swarmnode.trainer.replay import USES, ReplayBuffer, missing_groups
from swarmnode.trainer.update import Updater
from swarmnode.weights.rule import make_rule
from swarmnode.wire.envelope import peer_id, seal
from swarmnode.wire.ids import DOMAIN_ROLLOUT
from swarmnode.wire.manifest import swarm_id
from swarmnode.wire.messages import Completion, RolloutGroup, SamplingParams, TaskRef
from swarmnode.wire.tensors import pack_ids, pack_logprobs, unpack_logprobs

PARTS = 2
"""Fragments, where bytes are counted."""
ROUND_SECONDS = 2.0
"""Simulated time between rounds: ages, rates and reputations need a clock."""
START_TIME = 1_700_000_000.0


@dataclass(frozen=True)
class Sharing:
    """How external groups are treated; as the product does, unless told otherwise."""

    checks: ExternalChecks = field(default_factory=ExternalChecks)
    corrected: bool = True
    """Weighed by how far the sender's policy is from ours."""
    truncated: float | None = None
    """Learnt as F-TIS does (`truncated`), with this divergence as its threshold."""
    uniform: bool = False
    """Drawn uniformly from what was made in this round."""
    quota: bool = True
    """Tokens of strangers' answers are learnt about as often as own ones have them."""
    needed_only: bool = True
    """Tokens at both ends of an answer that its reward does not need are not learnt."""
    by_connection: bool = True
    """A source's share is counted by the connection its groups come by, else by author."""
    useful_only: bool = True
    """Groups whose rewards are all equal are not sent."""


UNCHECKED = ExternalChecks(
    spot_check_tolerance=1e9,
    surprise_tolerance=1e9,
    burst_slack=1e9,
    temperature_factor=1e9,
    least_probability=0,
)
PAPER = Sharing(UNCHECKED, corrected=False, uniform=True)
"""The paper's treatment: drawn uniformly, used as if sampled here."""


LAGGED = Sharing(UNCHECKED)
"""As the product does, but nothing is refused: with a lag a peer's policy is far from ours, and
honest."""


class FixedSplit:
    """The paper's fixed split: J = `external`, I = B − J (SAPO, arXiv 2509.08721 §3, Algorithm 1).

    Raises:
        ValueError: J is not in 0..batch − 1.
    """

    def __init__(self, batch: int, external: int) -> None:
        if not 0 <= external < batch:
            raise ValueError(f"external must be 0 to {batch - 1}, not {external}")
        self.batch = batch
        self.external = external

    def observe(self, used: int) -> None:
        """Do nothing: the split is fixed."""

    @property
    def external_room(self) -> int:
        return self.external

    @property
    def own_groups(self) -> int:
        return self.batch - self.external_room


class RoundPool:
    """The paper's: the groups of one round, drawn uniformly."""

    def __init__(self) -> None:
        self._groups: list[ExternalGroup] = []

    def add(
        self,
        group: ExternalGroup,
        now: float,
        policy_version: int,
        source: str = "",
        *,
        is_direct: bool = True,
    ) -> bool:
        self._groups.append(group)
        return True

    def draw(
        self,
        count: int,
        policy_version: int,
        now: float,
        rng: random.Random,
        trust: Callable[[str], float],
        belief: Callable[[str], float],
        per_peer: int,
    ) -> list[ExternalGroup]:
        chosen = rng.sample(self._groups, min(count, len(self._groups)))
        self._groups = []
        return chosen


@dataclass(frozen=True)
class Arm:
    """One way to run a swarm."""

    name: str
    external: int | None = 0
    """J of a fixed split; None is the adaptive one."""
    sharing: Sharing = PAPER
    filter_own: bool = False
    """Leave own groups without a signal out of the batch (and so out of the loss's normaliser)."""
    oversample: int = 0
    """A lone node's most groups per step: it generates until the batch is full of useful groups."""
    keep_pool: bool = False
    """External groups stay drawable for later rounds, as in a real node; else only in the round
    they were made, as in the paper."""
    average: int = 0
    """Rounds between two outer steps: all nodes in random pairs, NoLoCo with the product's gate,
    int8 on the wire; 0 is never."""
    solo: bool = False
    """Outer steps are taken without a partner, by the rule with the own weights for the mean."""
    as_much_as: str = ""
    """Another arm, whose received bytes this one may receive too: what sharing leaves of them goes
    to outer steps, a fragment at a time."""
    share_one_of: int = 1
    """Of a node's useful groups, one of so many is published."""
    neighbours: int = 0
    """Others that a node is connected with and pulls from; 0: every group reaches everybody."""
    replay: bool = False
    """A batch that lacks useful groups is filled with those of the last steps, as in a real
    node."""
    lag: int = 0
    """Updates between the policy that samples and the one that learns."""
    correction: str = ""
    """`training.options`, space between, for what was sampled with a lag. Or `uncorrected`, as if
    the present policy had sampled it, or `clipped`, where the objective's ratio is against the
    sampler."""


@dataclass
class Point:
    """Held-out reward and where it was measured, cumulative counts per node."""

    round: int
    tokens: float
    samples: float
    reward: float
    payload: float = 0.0
    length: float = 0.0
    marked: dict[str, dict[str, float]] = field(default_factory=dict)
    """Share of the answers with a mark, by kind and task (`benchmarks.marks`)."""


@dataclass
class Trace:
    """What one arm did, averaged over the counted nodes; lists have one entry per round."""

    arm: str
    reward_own: list[float] = field(default_factory=list)
    """Mean reward of the groups a node generated itself: local only."""
    useful_own: list[float] = field(default_factory=list)
    """Share of own groups with a signal."""
    generated_groups: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    """Tokens sampled for training, per node, in this round."""
    evaluation_tokens: float = 0.0
    """Tokens sampled in all held-out evaluations, per node: the benchmark's own instrument, the
    same for every arm at the same rounds."""
    received: list[float] = field(default_factory=list)
    """Bytes of others' signed groups, listings and weights that reached a node in this round, each
    once; what requests and streams add is not in it."""
    samples: list[float] = field(default_factory=list)
    """Groups in the optimizer's batch."""
    useful_samples: list[float] = field(default_factory=list)
    agreement: list[float | None] = field(default_factory=list)
    effective_own: list[float | None] = field(default_factory=list)
    """Effective share of the own tokens' weights."""
    held_out: list[Point] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    """Judgements of drawn external groups."""
    extra: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class OwnSample:
    ref: TaskRef
    sequence: int
    prompt: str
    sample: GroupSample
    rewards: list[float]


class Averaging:
    """A node's slow weights, gate, probe and codec: `trainer.weights.Replica` without files and
    threads."""

    def __init__(
        self, policy: Policy, parts: int, batcher: MicroBatcher, temperature: float
    ) -> None:
        self.tensors = AveragedTensors(trainable(policy.model), parts, threading.Lock())
        self.probe = LossProbe(policy, batcher, temperature, self.tensors)
        self.outer = OuterState(self.tensors.parameters, make_rule("noloco"))
        self.gate = AveragingGate()

    def copy(self, fragment: int) -> tuple[Tensors, bytes]:
        """Weights, and the payload that a partner gets of them."""
        snapshot = self.tensors.copy(fragment)
        learnt = norm(snapshot, minus=self.outer.phi)
        return snapshot, self.tensors.encode(fragment, snapshot, learnt)

    def solo_step(self, fragment: int) -> None:
        """Take an outer step as if a partner had the same weights. The product only records its
        weights then."""
        snapshot = self.tensors.copy(fragment)
        slow = self.outer.slow(list(snapshot))
        assert self.outer.take(prepare(self.outer.rule, slow, snapshot))
        self.outer.commit(self.tensors.parameters, snapshot)

    def step(self, peer: str, fragment: int, snapshot: Tensors, payload: bytes) -> str:
        """What the gate made of the partner's payload; the outer step is taken either way."""
        theirs = self.tensors.decode(fragment, payload, snapshot)
        slow = self.outer.slow(list(snapshot))
        moved = norm(snapshot, minus=slow.phi)
        found = self.gate.examine(peer, snapshot, theirs, moved=moved)
        losses: list[Losses | None] = []
        if found.mean is not None and not self.probe.measure(snapshot, found.mean, losses.append):
            judged = GateDecision("local")
        else:
            judged = self.gate.conclude(found, *losses)
        assert self.outer.take(prepare(self.outer.rule, slow, judged.mean or {}, snapshot))
        self.outer.commit(self.tensors.parameters, snapshot)
        return judged.outcome


UNNAMED = ("uncorrected", "clipped")
"""Of `Arm.correction`: what the product does not offer."""


class Past:
    """A policy as it was `lag` updates ago, or at first."""

    def __init__(self, policy: Policy, lag: int) -> None:
        self._now, self._then = policy, policy.clone()
        self._states = deque([self._state()], maxlen=lag + 1)

    def learnt(self) -> None:
        self._states.append(self._state())

    def policy(self) -> Policy:
        with torch.no_grad():
            for parameter, value in zip(
                self._then.trainable_parameters(), self._states[0], strict=True
            ):
                parameter.copy_(value)
        return self._then

    def _state(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self._now.trainable_parameters()]


class Node:
    """One simulated node: identity, policy, optimizer, pool."""

    def __init__(
        self,
        index: int,
        policy: Policy,
        arm: Arm,
        training: TrainingConfig,
        swarm: bytes,
        seed: int,
    ) -> None:
        if arm.correction not in ("", *UNNAMED):
            training = training.model_copy(update={"options": arm.correction.split()})
        self.index, self.policy, self.arm, self.training, self.swarm = (
            index,
            policy,
            arm,
            training,
            swarm,
        )
        self.past = Past(policy, arm.lag) if arm.lag else None
        stream = f"{seed}/{index}"
        self.key = Ed25519PrivateKey.from_private_bytes(
            hashlib.blake2b(f"benchmark/{stream}".encode(), digest_size=32).digest()
        )
        self.peer = peer_id(self.key.public_key().public_bytes_raw())
        self.rng = random.Random(f"draw/{stream}")
        self.generator = policy.random_generator(seed * 1009 + index)
        self.batcher = MicroBatcher(training.per_device_train_tokens)
        self.updater = Updater(policy, training, self.batcher)
        self.pool = self._new_pool()
        batch = training.groups_per_step
        self.split: AdaptiveSplit | FixedSplit = (
            AdaptiveSplit(batch) if arm.external is None else FixedSplit(batch, arm.external)
        )
        self.replay = ReplayBuffer(USES if arm.replay else 0)
        self.sequence = self.version = self.step = 0
        self._backlog: list[ExternalGroup] = []
        self.asked = 0
        """Groups that its last draw asked for."""
        self.used: Counter[str] = Counter()
        """Groups of a peer that were trained on."""
        self.trusted = PeerTrust()
        self.outcomes: Counter[str] = Counter()
        self.quota = TokenQuota() if arm.sharing.quota else None
        self.rescore: Rescore | None = None
        self.judged: list[tuple[ExternalGroup, str]] = []
        """What became of every drawn group, the latest last."""
        self.replica = (
            Averaging(policy, PARTS if arm.as_much_as else 1, self.batcher, training.temperature)
            if arm.average or arm.as_much_as
            else None
        )
        self.trust: Callable[[str], float] = lambda peer: 1.0
        self.on_judged: Callable[[str, str], None] = lambda peer, outcome: None

    def ask(self, count: int, names: Sequence[str]) -> list[tuple[TaskRef, int]]:
        """The addresses of the next `count` questions of this node's own stream."""
        asked = []
        for _ in range(count):
            name = choose_task(names, self.swarm, self.peer, self.sequence)
            seed, index = task_seed(self.swarm, self.peer, self.sequence, name)
            asked.append((TaskRef(name, task_version(name), seed, index), self.sequence))
            self.sequence += 1
        return asked

    def sample(self, prompts: Sequence[str]) -> list[GroupSample]:
        t = self.training
        sampling = Sampling(t.num_generations, t.max_completion_length, t.temperature, t.top_p)
        return self.batcher.generate(
            self.past.policy() if self.past else self.policy, prompts, sampling, self.generator
        )

    def rollout(self, own: OwnSample, now: float) -> RolloutGroup:
        """What this node publishes of an own group."""
        t = self.training
        done = [
            Completion(
                c.text,
                len(c.ids),
                sum(c.logprobs),
                c.finish,
                pack_ids(c.ids),
                pack_logprobs(c.logprobs),
            )
            for c in own.sample.completions
        ]
        sampling = SamplingParams(t.temperature, t.top_p, t.max_completion_length)
        return RolloutGroup(
            own.ref,
            self.policy.fingerprint,
            self.policy.tokenizer_hash,
            self.version,
            int(now * 1000),
            own.sequence,
            sampling,
            done,
        )

    def receive(self, group: ExternalGroup, now: float, source: str) -> None:
        """An admitted external group, which came from the peer `source`."""
        if not self.arm.sharing.by_connection:
            source = group.peer
        self.pool.add(group, now, self.version, source, is_direct=source == group.peer)

    def draw(self, now: float) -> list[TrainingGroup]:
        """External groups for this round, judged: what `trainer.external` does."""
        room, uniform = self.split.external_room, self.arm.sharing.uniform
        count = self.asked = max(0, room if uniform else room + reserve(room) - len(self._backlog))
        more = lambda count: self.pool.draw(
            count, self.version, now, self.rng, self.trust, self.trusted.belief, most_per_peer(room)
        )
        drawn = more(count)
        scored = partial(self.batcher.score_with_entropy, self.policy)
        checks, temperature = self.arm.sharing.checks, self.training.temperature
        judging = lambda some: judge(
            some, self.policy, scored, temperature, checks, self.quota, self.rescore
        )
        judged, left = (
            (judging(drawn), [])
            if uniform
            else judge_until_full(self._backlog + drawn, room, judging, more)
        )
        self._backlog = left if self.arm.keep_pool else []
        for group, outcome in judged.outcomes:
            self.outcomes[outcome] += 1
            self.judged.append((group, outcome))
            self.used[group.peer] += outcome == "used"
            self.trusted.judged(group.peer, outcome)
            self.on_judged(group.peer, outcome)
        if not self.arm.keep_pool:
            self.pool = self._new_pool()
        if (most := self.arm.sharing.truncated) is not None:
            used = [group for group, outcome in judged.outcomes if outcome == "used"]
            return [
                truncated(group, accepted, most)
                for group, accepted in zip(used, judged.accepted, strict=True)
            ]
        if not self.arm.sharing.corrected:
            return [
                replace(group, weights=[float(w > 0) for w in group.weights])
                for group in judged.accepted
            ]
        return judged.accepted

    def _new_pool(self) -> Pool | RoundPool:
        return RoundPool() if self.arm.sharing.uniform else Pool()

    def learn(
        self, own: list[OwnSample], external: list[TrainingGroup], trace: dict[str, float]
    ) -> None:
        """Take one optimizer step, and update the split."""
        mine = [self._without_correction(own_group(o.sample, o.rewards)) for o in own]
        if self.quota is not None:
            for o in own:
                for completion, reward in zip(o.sample.completions, o.rewards, strict=True):
                    if reward > fmean(o.rewards):
                        self.quota.own(o.ref.id, completion.ids)
        if self.replica is not None:
            rewarded = [row for group in mine for row in best_rows(group)]
            self.replica.probe.remember(rewarded, [row for group in mine for row in group.rows])
        self.replay.observe(mine)
        if self.arm.filter_own or self.arm.oversample:
            mine = [g for g in mine if is_useful(g.rewards)]
        if self.arm.oversample:
            mine = mine[: self.training.groups_per_step]
        fresh = mine + external
        batch = fresh + self.replay.take(missing_groups(self.training.groups_per_step, fresh))
        agreement = None
        if batch:
            done = self.updater.update(assemble(batch, self.training.advantage))
            self.version += done.stepped
            agreement = done.agreement
            if done.effective_own is not None:
                trace["effective_own"] = done.effective_own
            if self.past:
                self.past.learnt()
        self.step += 1
        self.replay.store(fresh, self.step)
        if isinstance(self.split, AdaptiveSplit):
            self.split.replayable = self.replay.spared_groups
        self.split.observe(sum(is_useful(group.rewards) for group in external))
        reward = fmean(fmean(o.rewards) for o in own)
        trace |= {
            "reward_own": reward,
            "useful_own": fmean(is_useful(o.rewards) for o in own),
            "generated_groups": len(own),
            "tokens": sum(len(c.ids) for o in own for c in o.sample.completions),
            "samples": len(batch),
            "useful_samples": sum(is_useful(g.rewards) for g in batch),
        }
        if agreement is not None:
            trace["agreement"] = agreement

    def _without_correction(self, group: TrainingGroup) -> TrainingGroup:
        """As the arm wants it: against the present policy, against the sampler, or as the product
        corrects it."""
        if self.arm.correction not in UNNAMED:
            return group
        old = (
            group.old_logprobs
            if self.arm.correction == "clipped"
            else score(self.policy, group.rows, self.training.temperature)
        )
        return replace(group, old_logprobs=old, sampler_logprobs=[])


def truncated(group: ExternalGroup, accepted: TrainingGroup, most: float) -> TrainingGroup:
    """Return a peer's group as F-TIS learns from it.

    Each token weighs min(own probability ÷ its sender's, 2), as own tokens do. A completion that
    earned less than its group's mean is dropped where the sender's policy is too far from ours.
    Needs the sender's tokenizer.

    Source: F-TIS (arXiv 2605.22537).

    Args:
        most: Largest KL divergence of such a completion, nats per token, estimated from its tokens
            (r − 1 − log r of r = own probability ÷ the sender's).
    """
    sent = [unpack_logprobs(c.logprobs).tolist() for c in group.group.completions]
    mean = fmean(group.rewards)
    divergences = [
        fmean(math.exp(min(ours - theirs, 20.0)) - 1 - (ours - theirs) for ours, theirs in pairs)
        for pairs in (
            list(zip(ours, theirs, strict=True))
            for ours, theirs in zip(accepted.old_logprobs, sent, strict=True)
        )
    ]
    weights = [
        float(reward >= mean or divergence <= most)
        for reward, divergence in zip(group.rewards, divergences, strict=True)
    ]
    return replace(accepted, weights=weights, sampler_logprobs=sent, learnt=[])


class Swarm:
    """Nodes that take their steps one after another, or in lockstep."""

    turns = 1
    """Parts of a round, in each of which as many nodes take their step; 1 is lockstep."""
    round_seconds = ROUND_SECONDS
    names: Sequence[str] = tuple(TaskConfig().names)

    def __init__(
        self,
        arm: Arm,
        policies: Sequence[Policy],
        training: TrainingConfig,
        scorer: Scorer,
        seed: int,
        eval_questions: int = 12,
        allowance: Sequence[float] = (),
    ) -> None:
        """allowance: for an arm with `as_much_as`, what that one received in each round."""
        self.arm, self.training, self.scorer, self.seed = arm, training, scorer, seed
        self.swarm = swarm_id(f"benchmark-{seed}", {n: task_version(n) for n in self.names})
        self.nodes = [
            Node(i, p, arm, self.training_of(p), self.swarm, seed) for i, p in enumerate(policies)
        ]
        if arm.sharing.needed_only:
            for node in self.nodes:
                node.rescore = scorer.score_many
        self.now = START_TIME
        self.trace = Trace(arm.name)
        self._allowance = list(itertools.accumulate(allowance))
        self._received = 0.0
        self._outer_steps = 0
        self.stepping = self.nodes
        self._exam = self._make_exam(eval_questions)

    def training_of(self, policy: Policy) -> TrainingConfig:
        """How a node with this policy trains."""
        return self.training

    @property
    def counted(self) -> list[Node]:
        """Nodes that train."""
        return self.nodes

    @property
    def reported(self) -> list[Node]:
        """Nodes whose results are averaged."""
        return self.counted

    def run(self, enough: Callable[[Trace], bool], eval_every: int) -> Trace:
        """Rounds until `enough`, with a held-out evaluation every `eval_every` rounds, first and
        last."""
        self.evaluate()
        while not enough(self.trace):
            self.round()
            if len(self.trace.tokens) % eval_every == 0 or enough(self.trace):
                self.evaluate()
        for node in self.reported:
            for outcome, count in node.outcomes.items():
                self.trace.outcomes[outcome] = self.trace.outcomes.get(outcome, 0) + count
        return self.trace

    def round(self) -> None:
        rows: list[dict[str, float]] = []
        for turn in range(self.turns):
            self.now += self.round_seconds / self.turns
            self.stepping = self.counted[turn :: self.turns]
            own = self.generate()
            self.share(own)
            for node in self.stepping:
                row: dict[str, float] = {}
                node.learn(own[node.index], self.draw(node), row)
                if node in self.reported:
                    rows.append(row)
        for name in (
            "reward_own",
            "useful_own",
            "generated_groups",
            "tokens",
            "samples",
            "useful_samples",
        ):
            getattr(self.trace, name).append(fmean(r[name] for r in rows))
        rounds = len(self.trace.tokens)
        if self.arm.average and rounds % self.arm.average == 0:
            self.average()
        while self._allowance and self._affordable(
            self._allowance[min(rounds, len(self._allowance)) - 1]
        ):
            self.average()
        self.trace.received.append(self._received / len(self.counted) - sum(self.trace.received))
        agreements = [r["agreement"] for r in rows if "agreement" in r]
        self.trace.agreement.append(fmean(agreements) if agreements else None)
        effective = [r["effective_own"] for r in rows if "effective_own" in r]
        self.trace.effective_own.append(fmean(effective) if effective else None)

    def _affordable(self, most: float) -> bool:
        """Whether one more exchange keeps what a node received below `most`."""
        replica = self.counted[0].replica
        assert replica is not None
        payload = replica.copy(self._outer_steps % PARTS)[1]
        return self._received / len(self.counted) + len(payload) <= most

    def average(self) -> None:
        """One outer step of everybody, in random pairs or without a partner."""
        if self.arm.solo:
            for node in self.counted:
                assert node.replica is not None
                node.replica.solo_step(0)
            return
        order = list(self.counted)
        random.Random(f"pairs/{self.seed}/{len(self.trace.tokens)}").shuffle(order)
        fragment = self._outer_steps % PARTS if self.arm.as_much_as else 0
        self._outer_steps += 1
        extra = self.trace.extra
        for one, other in zip(order[::2], order[1::2], strict=False):
            assert one.replica is not None
            assert other.replica is not None
            (mine, sent), (theirs, received) = (
                one.replica.copy(fragment),
                other.replica.copy(fragment),
            )
            for node, snapshot, payload, peer in (
                (one, mine, received, other.peer),
                (other, theirs, sent, one.peer),
            ):
                assert node.replica is not None
                outcome = node.replica.step(peer, fragment, snapshot, payload)
                node.version += 1
                self._received += len(payload)
                extra["payload_bytes"] = len(payload)
                extra[f"exchange {outcome}"] = extra.get(f"exchange {outcome}", 0) + 1

    def draw(self, node: Node) -> list[TrainingGroup]:
        return node.draw(self.now)

    def generate(self) -> dict[int, list[OwnSample]]:
        """Own groups of every node that takes its step now, scored: all nodes' questions in one
        request."""
        own: dict[int, list[OwnSample]] = {n.index: [] for n in self.stepping}
        batch = self.training.groups_per_step
        while True:
            asked = []
            for node in self.stepping:
                done = own[node.index]
                if self.arm.oversample:
                    short = sum(is_useful(o.rewards) for o in done) < batch
                    more = min(batch, self.arm.oversample - len(done)) if short else 0
                else:
                    more = 0 if done else node.split.own_groups
                asked += [(node, ref, sequence) for ref, sequence in node.ask(more, self.names)]
            if not asked:
                return own
            prompts = [s.prompt for s in self.score([(ref, []) for _, ref, _ in asked])]
            samples: list[GroupSample] = []
            for node in self.stepping:
                samples += node.sample(
                    [p for p, (n, _, _) in zip(prompts, asked, strict=True) if n is node]
                )
            scored = self.score(
                [
                    (ref, [c.text for c in s.completions])
                    for (_, ref, _), s in zip(asked, samples, strict=True)
                ]
            )
            for (node, ref, sequence), sample, result in zip(asked, samples, scored, strict=True):
                own[node.index].append(
                    OwnSample(ref, sequence, result.prompt, sample, result.rewards)
                )

    def share(self, own: dict[int, list[OwnSample]]) -> None:
        """Everybody's groups to everybody else's pool, in memory."""
        if self.arm.external == 0:
            return
        for sender in self.stepping:
            useful = [
                one
                for one in own[sender.index]
                if is_useful(one.rewards) or not self.arm.sharing.useful_only
            ]
            for one in useful:
                if one.sequence % self.arm.share_one_of:
                    continue
                content = hashlib.blake2b(
                    f"{sender.peer}/{one.sequence}".encode(), digest_size=32
                ).digest()
                rollout = sender.rollout(one, self.now)
                size = len(seal(rollout, sender.key, DOMAIN_ROLLOUT, self.swarm))
                group = ExternalGroup(
                    content, sender.peer, rollout, one.prompt, one.rewards, staleness=0
                )
                for receiver in self.nodes:
                    if receiver is not sender:
                        receiver.receive(group, self.now, sender.peer)
                        self._received += size

    def score(self, items: Sequence[tuple[TaskRef, Sequence[str]]]) -> list[Scored]:
        """Through the real sandboxed scorer. Raises its error: with honest addresses there is
        none."""
        results = []
        for result in self.scorer.score_many(items):
            if isinstance(result, Exception):
                raise result
            results.append(result)
        return results

    def _make_exam(self, per_task: int) -> list[list[tuple[TaskRef, str]]]:
        """Held-out questions of every node, other ones for each: from the evaluation range, which
        training never draws from."""
        refs = [
            [
                TaskRef(n, task_version(n), evaluation_seed(n, block=node.index), i)
                for n in self.names
                for i in range(per_task)
            ]
            for node in self.nodes
        ]
        prompts = self.score([(ref, []) for mine in refs for ref in mine])
        texts = iter(p.prompt for p in prompts)
        return [[(ref, next(texts)) for ref in mine] for mine in refs]

    def evaluate(self) -> None:
        """Held-out reward at temperature 1, one completion per question, the same random numbers
        each time."""
        t, texts, items = self.training, [], []
        for node in self.reported:
            exam = self._exam[node.index]
            prompts = [p for _, p in exam]
            once = Sampling(1, t.max_completion_length, t.temperature)
            for sample in generate(
                node.policy, prompts, once, node.policy.random_generator(node.index)
            ):
                texts.append(sample.completions[0])
            items += [ref for ref, _ in exam]
        self.trace.evaluation_tokens += sum(len(c.ids) for c in texts) / len(self.reported)
        scored = self.score([(ref, [c.text]) for ref, c in zip(items, texts, strict=True)])
        self.trace.held_out.append(
            Point(
                round=len(self.trace.tokens),
                tokens=sum(self.trace.tokens),
                samples=sum(self.trace.samples),
                reward=fmean(s.rewards[0] for s in scored),
                payload=fmean(PAYLOAD in c.text for c in texts),
                length=fmean(len(c.ids) for c in texts),
                marked={
                    kind: share(
                        mark, [(ref.id, c.text) for ref, c in zip(items, texts, strict=True)]
                    )
                    for kind, mark in MARKS.items()
                },
            )
        )


PAYLOAD = "#"
"""What the poisoning adversary wants in everybody's answers: a character that no answer has."""


def at(points: Sequence[Point], axis: str, budget: float) -> float | None:
    """Held-out reward when `axis` (round, tokens, samples) reached `budget`, linear between
    evaluations; None if it never did."""
    for before, after in itertools.pairwise(points):
        a, b = getattr(before, axis), getattr(after, axis)
        if a <= budget <= b:
            return before.reward + (after.reward - before.reward) * (
                (budget - a) / (b - a) if b > a else 1.0
            )
    return None


def mean_until(points: Sequence[Point], axis: str, budget: float) -> float | None:
    """Mean held-out reward while `axis` went from 0 to `budget`: the area under the learning curve.
    None if it never got there."""
    end = at(points, axis, budget)
    if end is None:
        return None
    known = [(getattr(p, axis), p.reward) for p in points if getattr(p, axis) < budget] + [
        (budget, end)
    ]
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(known))
    return area / budget


def count_until(axis: Sequence[float], budget: float, wanted: Sequence[float]) -> float:
    """Sum of the per-round numbers `wanted` until the per-round numbers `axis` summed up to
    `budget`."""
    total = done = 0.0
    for step, value in zip(axis, wanted, strict=True):
        if total + step > budget and step > 0:
            return done + value * (budget - total) / step
        total += step
        done += value
    return done


def single_thread() -> None:
    """One thread for each of two processes, sums in one order, and no word about hostile texts
    being long."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()

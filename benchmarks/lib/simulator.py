"""Nodes of a swarm in one process, without sockets: the product's policy, sampling, scorer, pool,
split, judgement and update.

In a round every node generates its own groups, scores and shares them, draws and judges peers'
groups, and takes one optimizer step. Groups reach all other pools within the round. `Swarm.share`
does this in memory; `benchmarks.lib.adversaries` sends signed frames through admission.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import torch
import transformers
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.lib import marks
from swarmnode.config import TaskConfig, TrainingConfig
from swarmnode.policy.generate import GroupSample, Sampling, generate
from swarmnode.policy.load import Policy, trainable
from swarmnode.policy.micro import MicroBatcher
from swarmnode.rl.split import AdaptiveSplit
from swarmnode.rollouts.groups import ExternalGroup, is_useful
from swarmnode.rollouts.network.authors import AuthorTrust
from swarmnode.rollouts.network.pool import Pool
from swarmnode.rollouts.sampling import most_per_peer
from swarmnode.rollouts.trainer.batch import TrainingGroup, assemble, own_group
from swarmnode.rollouts.trainer.judge import ExternalChecks, judge, judge_until_full, reserve
from swarmnode.rollouts.trainer.quota import TokenQuota
from swarmnode.rollouts.trainer.rescore import Rescore
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.frames import Scored
from swarmnode.tasks.registry import task_version
from swarmnode.tasks.seeds import choose_task, evaluation_seed, task_seed
from swarmnode.trainer.loop import best_rows
from swarmnode.trainer.update import Updater
from swarmnode.weights.trainer.averaged import AveragedTensors
from swarmnode.weights.trainer.gate import Losses, LossProbe, examine, norm, passes_probe
from swarmnode.weights.trainer.outer import OuterState, Tensors, host_copy, prepare
from swarmnode.wire.envelope import peer_id
from swarmnode.wire.manifest import swarm_id
from swarmnode.wire.messages import Completion, RolloutGroup, SamplingParams, TaskRef
from swarmnode.wire.tensors import pack_ids, pack_logprobs

ROUND_SECONDS = 2.0
"""Simulated time between rounds: ages, rates and reputations need a clock."""
START_TIME = 1_700_000_000.0
PAYLOAD = "#"
"""Character that poisoning adversaries want in honest nodes' answers. No honest answer has it."""


@dataclass(frozen=True)
class Sharing:
    """Treatment of external groups. The defaults are the product's."""

    checks: ExternalChecks = field(default_factory=ExternalChecks)
    uniform: bool = False
    """Draw uniformly from the groups of this round."""
    quota: bool = True
    """Limit how often a token of peers' answers is learned by how often own answers have it."""
    needed_only: bool = True
    """Exclude the end of an answer if its reward does not need it."""
    by_connection: bool = True
    """Count a source's share by the connection its groups come by; False counts by author."""
    useful_only: bool = True
    """Do not send groups whose rewards are all equal."""


UNCHECKED = ExternalChecks(
    spot_check_tolerance=1e9,
    surprise_tolerance=1e9,
    burst_slack=1e9,
    temperature_factor=1e9,
    least_probability=0,
)
PAPER = Sharing(UNCHECKED, uniform=True)
"""SAPO's treatment: groups are drawn uniformly and used as if they were sampled here."""


class FixedSplit:
    """The fixed split of SAPO (arXiv 2509.08721 §3, Algorithm 1): J = `external`, I = B − J.

    Raises:
        ValueError: J is not in 0..batch − 1.
    """

    def __init__(self, batch: int, external: int) -> None:
        if not 0 <= external < batch:
            raise ValueError(f"external must be 0 to {batch - 1}, not {external}")
        self.external_room = external
        self.own_groups = batch - external

    def observe(self, used: int) -> None:
        """Do nothing: the split is fixed."""


class RoundPool:
    """SAPO's pool: the groups of one round, drawn uniformly."""

    def __init__(self) -> None:
        self._groups: list[ExternalGroup] = []

    def add(self, group: ExternalGroup, *args: Any, **kwargs: Any) -> bool:
        self._groups.append(group)
        return True

    def draw(
        self, count: int, policy_version: int, now: float, rng: random.Random, *args: Any
    ) -> list[ExternalGroup]:
        chosen = rng.sample(self._groups, min(count, len(self._groups)))
        self._groups = []
        return chosen


@dataclass(frozen=True)
class Arm:
    """Configuration of a swarm."""

    name: str
    external: int | None = 0
    """J of a fixed split; None is the adaptive split."""
    sharing: Sharing = PAPER
    oversample: int = 0
    """Maximum number of groups per step of a lone node that generates until its batch is full of
    useful groups; 0 generates once."""
    keep_pool: bool = False
    """Keep external groups for later rounds, as a real node does. SAPO draws them only in the round
    in which they were made."""
    average: int = 0
    """Rounds between two outer steps of all nodes in random pairs: NoLoCo with the product's gate
    and int8 payloads. 0 takes none."""


PRODUCT = Arm("swarmnode", None, Sharing(), keep_pool=True)


@dataclass
class Point:
    """A held-out evaluation, with the counts per node so far."""

    round: int
    tokens: float
    reward: float
    payload: float = 0.0
    length: float = 0.0
    marked: dict[str, dict[str, float]] = field(default_factory=dict)
    """Share of the answers with a mark, by kind and task (`benchmarks.lib.marks`)."""


@dataclass
class Trace:
    """Record of one arm, averaged over the reported nodes. Lists have one entry per round."""

    arm: str
    reward_own: list[float] = field(default_factory=list)
    """Mean reward of the node's own groups."""
    useful_own: list[float] = field(default_factory=list)
    """Share of own groups whose rewards differ."""
    generated_groups: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    """Tokens that a node sampled for training."""
    samples: list[float] = field(default_factory=list)
    """Groups in the optimizer's batch."""
    useful_samples: list[float] = field(default_factory=list)
    held_out: list[Point] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    """Judgements of drawn external groups."""
    exchanges: dict[str, int] = field(default_factory=dict)
    """Outcomes of weight exchanges."""

    def curve(self, axis: str) -> list[tuple[float, float]]:
        """Return (axis, held-out reward) of each evaluation. axis: round or tokens."""
        return [(getattr(point, axis), point.reward) for point in self.held_out]

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
    """A node's slow weights, probe and codec: `weights.trainer.replica.Replica` without files and
    threads."""

    def __init__(self, policy: Policy, batcher: MicroBatcher, temperature: float) -> None:
        self.tensors = AveragedTensors(trainable(policy.model), 1, threading.Lock())
        self._is_adapter = policy.base is not policy.model
        self.probe = LossProbe(policy, batcher, temperature, self.tensors)
        self.outer = OuterState(self.tensors.parameters)

    def copy(self) -> tuple[Tensors, bytes]:
        """Return the weights, and their payload for a partner."""
        snapshot = host_copy(self.tensors.parameters)
        return snapshot, self.tensors.encode(0, snapshot, norm(snapshot, minus=self.outer.phi))

    def step(self, snapshot: Tensors, payload: bytes) -> str:
        """Take an outer step with a partner's payload; return the gate's outcome."""
        theirs = self.tensors.decode(0, payload, snapshot)
        slow = self.outer.slow(list(snapshot))
        found = examine(snapshot, theirs, adapter=self._is_adapter)
        outcome, mean, losses = found.refusal, found.mean, list[Losses | None]()
        if mean is not None:
            if not self.probe.measure(snapshot, mean, losses.append):
                outcome = "local"
            else:
                outcome = "accepted" if losses[0] and passes_probe(losses[0]) else "probe"
        averaged = mean if mean is not None and outcome == "accepted" else {}
        assert self.outer.take(prepare(self.outer.rule, slow, averaged, snapshot))
        self.outer.merge_parameters(self.tensors.parameters, snapshot)
        return outcome


def make_key(text: str) -> Ed25519PrivateKey:
    """Return the private key that follows from `text`."""
    secret = hashlib.blake2b(text.encode(), digest_size=32).digest()
    return Ed25519PrivateKey.from_private_bytes(secret)


class Node:
    """A simulated node: identity, policy, optimizer, pool."""

    def __init__(
        self,
        index: int,
        policy: Policy,
        arm: Arm,
        training: TrainingConfig,
        swarm: bytes,
        seed: int,
    ) -> None:
        self.index, self.policy, self.arm = index, policy, arm
        self.training, self.swarm = training, swarm
        self.key = make_key(f"benchmark/{seed}/{index}")
        self.peer = peer_id(self.key.public_key().public_bytes_raw())
        self.rng = random.Random(f"draw/{seed}/{index}")
        self.generator = policy.random_generator(seed * 1009 + index)
        self.batcher = MicroBatcher(training.per_device_train_tokens)
        self.updater = Updater(policy, training, self.batcher)
        self.pool = self._new_pool()
        batch = training.groups_per_step
        self.split: AdaptiveSplit | FixedSplit = (
            AdaptiveSplit(batch) if arm.external is None else FixedSplit(batch, arm.external)
        )
        self.sequence = self.version = self.step = 0
        self._backlog: list[ExternalGroup] = []
        self.used: Counter[str] = Counter()
        """Groups trained on, by peer."""
        self.trusted = AuthorTrust()
        self.outcomes: Counter[str] = Counter()
        self.quota = TokenQuota() if arm.sharing.quota else None
        self.rescore: Rescore | None = None
        self.replica = (
            Averaging(policy, self.batcher, training.temperature) if arm.average else None
        )
        self.trust: Callable[[str], float] = lambda peer: 1.0
        self.on_judged: Callable[[str, str], None] = lambda peer, outcome: None

    def next_questions(self, count: int, names: Sequence[str]) -> list[tuple[TaskRef, int]]:
        """Return the next `count` questions of this node's stream, and their numbers."""
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
        return self.batcher.generate(self.policy, prompts, sampling, self.generator)

    def rollout(self, own: OwnSample, now: float) -> RolloutGroup:
        """Return the message that publishes an own group."""
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
        """Put an admitted external group, which came from the peer `source`, into the pool."""
        if not self.arm.sharing.by_connection:
            source = group.peer
        self.pool.add(group, now, self.version, source, is_direct=source == group.peer)

    def draw(self, now: float) -> list[TrainingGroup]:
        """Return judged external groups for this round, as `trainer.external` does."""
        room, sharing = self.split.external_room, self.arm.sharing
        count = room if sharing.uniform else room + reserve(room) - len(self._backlog)
        more = lambda count: self.pool.draw(
            count,
            self.version,
            now,
            self.rng,
            self.trust,
            self.trusted.participation,
            most_per_peer(room),
        )
        drawn = more(max(0, count))
        scored = partial(self.batcher.score_with_entropy, self.policy)
        judging = lambda some: judge(
            some,
            self.policy,
            scored,
            self.training.temperature,
            sharing.checks,
            self.quota,
            self.rescore,
        )
        judged, left = (
            (judging(drawn), [])
            if sharing.uniform
            else judge_until_full(self._backlog + drawn, room, judging, more)
        )
        self._backlog = left if self.arm.keep_pool else []
        for group, outcome in judged.outcomes:
            self.outcomes[outcome] += 1
            self.used[group.peer] += outcome == "used"
            self.trusted.judged(group.peer, outcome)
            self.on_judged(group.peer, outcome)
        if not self.arm.keep_pool:
            self.pool = self._new_pool()
        return judged.accepted

    def _new_pool(self) -> Pool | RoundPool:
        return RoundPool() if self.arm.sharing.uniform else Pool()

    def learn(self, own: list[OwnSample], external: list[TrainingGroup]) -> dict[str, float]:
        """Take one optimizer step and update the split. Return this round's entries of `Trace`."""
        mine = [own_group(o.sample, o.rewards) for o in own]
        if self.quota is not None:
            for o in own:
                for completion, reward in zip(o.sample.completions, o.rewards, strict=True):
                    self.quota.own(o.ref.id, completion.ids, reward > fmean(o.rewards))
        if self.replica is not None:
            rewarded = [row for group in mine for row in best_rows(group)]
            self.replica.probe.remember(rewarded, [row for group in mine for row in group.rows])
        if self.arm.oversample:
            useful = [group for group in mine if is_useful(group.rewards)]
            mine = useful[: self.training.groups_per_step]
        if batch := mine + external:
            done = self.updater.update(assemble(batch, self.training.advantage))
            self.version += done.stepped
        self.step += 1
        self.split.observe(sum(is_useful(group.rewards) for group in external))
        return {
            "reward_own": fmean(fmean(o.rewards) for o in own),
            "useful_own": fmean(is_useful(o.rewards) for o in own),
            "generated_groups": len(own),
            "tokens": sum(len(c.ids) for o in own for c in o.sample.completions),
            "samples": len(batch),
            "useful_samples": sum(is_useful(g.rewards) for g in batch),
        }


class Swarm:
    """Nodes that take their steps in lockstep."""

    names: Sequence[str] = tuple(TaskConfig().names)

    def __init__(
        self,
        arm: Arm,
        policies: Sequence[Policy],
        training: TrainingConfig,
        scorer: Scorer,
        seed: int,
        eval_questions: int = 12,
    ) -> None:
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
        self._exam = self._make_exam(eval_questions)

    def training_of(self, policy: Policy) -> TrainingConfig:
        """Return the training settings of a node with this policy."""
        return self.training

    @property
    def counted(self) -> list[Node]:
        """Nodes that train, and whose results are averaged."""
        return self.nodes

    def run(self, enough: Callable[[Trace], bool], eval_every: int) -> Trace:
        """Run rounds until `enough`. Evaluate before the first, after every `eval_every`, and after
        the last."""
        self.evaluate()
        while not enough(self.trace):
            self.round()
            if len(self.trace.tokens) % eval_every == 0 or enough(self.trace):
                self.evaluate()
        self.trace.outcomes = dict(sum((node.outcomes for node in self.counted), Counter()))
        return self.trace

    def round(self) -> None:
        self.now += ROUND_SECONDS
        own = self.generate()
        self.share(own)
        rows = [node.learn(own[node.index], self.draw(node)) for node in self.counted]
        for name in rows[0]:
            getattr(self.trace, name).append(fmean(row[name] for row in rows))
        if self.arm.average and len(self.trace.tokens) % self.arm.average == 0:
            self.average()

    def average(self) -> None:
        """Take one outer step of all nodes in random pairs."""
        order = list(self.counted)
        random.Random(f"pairs/{self.seed}/{len(self.trace.tokens)}").shuffle(order)
        for one, other in zip(order[::2], order[1::2], strict=False):
            assert one.replica is not None
            assert other.replica is not None
            (mine, sent), (theirs, received) = one.replica.copy(), other.replica.copy()
            for node, snapshot, payload in ((one, mine, received), (other, theirs, sent)):
                assert node.replica is not None
                outcome = node.replica.step(snapshot, payload)
                node.version += 1
                self.trace.exchanges[outcome] = self.trace.exchanges.get(outcome, 0) + 1

    def draw(self, node: Node) -> list[TrainingGroup]:
        return node.draw(self.now)

    def generate(self) -> dict[int, list[OwnSample]]:
        """Return the scored own groups of every node. All nodes' questions go into one request."""
        own: dict[int, list[OwnSample]] = {n.index: [] for n in self.counted}
        batch = self.training.groups_per_step
        while True:
            asked = []
            for node in self.counted:
                done = own[node.index]
                if self.arm.oversample:
                    short = sum(is_useful(o.rewards) for o in done) < batch
                    more = min(batch, self.arm.oversample - len(done)) if short else 0
                else:
                    more = 0 if done else node.split.own_groups
                asked += [
                    (node, ref, sequence) for ref, sequence in node.next_questions(more, self.names)
                ]
            if not asked:
                return own
            prompts = [s.prompt for s in self.score([(ref, []) for _, ref, _ in asked])]
            samples: list[GroupSample] = []
            for node in self.counted:
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
        """Put every node's groups into all other pools, in memory."""
        if self.arm.external == 0:
            return
        for sender in self.counted:
            for one in own[sender.index]:
                if self.arm.sharing.useful_only and not is_useful(one.rewards):
                    continue
                number = f"{sender.peer}/{one.sequence}".encode()
                group = ExternalGroup(
                    hashlib.blake2b(number, digest_size=32).digest(),
                    sender.peer,
                    sender.rollout(one, self.now),
                    one.prompt,
                    one.rewards,
                    staleness=0,
                )
                for receiver in self.nodes:
                    if receiver is not sender:
                        receiver.receive(group, self.now, sender.peer)

    def score(self, items: Sequence[tuple[TaskRef, Sequence[str]]]) -> list[Scored]:
        """Score through the sandboxed scorer. Raises its first error: honest questions have
        none."""
        results = []
        for result in self.scorer.score_many(items):
            if isinstance(result, Exception):
                raise result
            results.append(result)
        return results

    def _make_exam(self, per_task: int) -> list[list[tuple[TaskRef, str]]]:
        """Return each node's held-out questions, from the range that training never draws from."""
        refs = [
            [
                TaskRef(n, task_version(n), evaluation_seed(n, block=node.index), i)
                for n in self.names
                for i in range(per_task)
            ]
            for node in self.nodes
        ]
        texts = iter([s.prompt for s in self.score([(ref, []) for mine in refs for ref in mine])])
        return [[(ref, next(texts)) for ref in mine] for mine in refs]

    def evaluate(self) -> None:
        """Measure the held-out reward at temperature 1, one completion per question, with the same
        random numbers each time."""
        t, answers, refs = self.training, [], []
        for node in self.counted:
            exam = self._exam[node.index]
            once = Sampling(1, t.max_completion_length, t.temperature)
            for sample in generate(
                node.policy,
                [prompt for _, prompt in exam],
                once,
                node.policy.random_generator(node.index),
            ):
                answers.append(sample.completions[0])
            refs += [ref for ref, _ in exam]
        scored = self.score([(ref, [a.text]) for ref, a in zip(refs, answers, strict=True)])
        texts = [(ref.id, a.text) for ref, a in zip(refs, answers, strict=True)]
        self.trace.held_out.append(
            Point(
                round=len(self.trace.tokens),
                tokens=sum(self.trace.tokens),
                reward=fmean(s.rewards[0] for s in scored),
                payload=fmean(PAYLOAD in text for _, text in texts),
                length=fmean(len(a.ids) for a in answers),
                marked={kind: marks.share(mark, texts) for kind, mark in marks.MARKS.items()},
            )
        )


def single_thread() -> None:
    """Use one thread, so that sums have one order, and silence warnings about long hostile
    texts."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()

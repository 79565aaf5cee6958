"""Nodes that take turns in one process: the product's training loop with everything that it uses,
and queues in memory in place of the sockets.

A turn is one step of one node: it samples, publishes, draws, judges and trains. A published group
is a signed envelope. Every other node admits it, regenerates the question, scores it and puts it
into its pool. A node therefore draws groups that are up to one step older than its own, as in a
swarm whose nodes are equally fast.

All nodes with an adapter share one frozen base (`on_one_base`).
"""

from __future__ import annotations

import copy
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.simulator import Averaging, make_key
from swarmnode.config import Config
from swarmnode.link.client import LinkStatistics
from swarmnode.link.messages import Report, Welcome
from swarmnode.policy.load import Policy, trainable
from swarmnode.policy.logprobs import Row
from swarmnode.process import Progress
from swarmnode.rl.split import AdaptiveSplit
from swarmnode.rollouts.groups import ExternalGroup, Judged, OwnGroup, is_useful
from swarmnode.rollouts.network.admission import Admission, Refusal
from swarmnode.rollouts.network.authors import AuthorTrust
from swarmnode.rollouts.network.pool import Pool
from swarmnode.rollouts.trainer.batch import Rows
from swarmnode.rollouts.trainer.judge import RowScores
from swarmnode.tasks.client import Scored, Scorer
from swarmnode.trainer.engine import WholePolicy, make_updater
from swarmnode.trainer.loop import Loop
from swarmnode.trainer.state import Counters
from swarmnode.trainer.update import UpdateStatistics
from swarmnode.weights.trainer.lora import freeze_a
from swarmnode.wire.envelope import peer_id, seal
from swarmnode.wire.ids import DOMAIN_ROLLOUT
from swarmnode.wire.messages import RolloutGroup, TaskRef


def on_one_base(policy: Policy) -> Policy:
    """Return a policy with the same frozen weights and its own copy of the trained ones.

    The copy has the same A, as in a swarm, where every node derives it from one seed.
    """
    frozen = {id(p): p for p in policy.model.parameters() if not p.requires_grad}
    return replace(policy, model=copy.deepcopy(policy.model, frozen))


def share_a(policy: Policy) -> Policy:
    """Freeze A of the policy's adapter at the values that all nodes of a swarm derive."""
    freeze_a(trainable(policy.model))
    return policy


class FixedSplit(AdaptiveSplit):
    """A split that does not adapt: `own` groups of each batch are sampled by the node."""

    def __init__(self, batch: int, own: int) -> None:
        super().__init__(batch)
        self._own = own

    @property
    def own_groups(self) -> int:
        return self._own


class MeasuredPolicy(WholePolicy):
    """A policy that adds up the CPU seconds of its updates and of its passes over peers' rows."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seconds: Counter[str] = Counter()

    def score(self, rows: Sequence[Row], temperature: float) -> list[RowScores]:
        started = time.process_time()
        try:
            return super().score(rows, temperature)
        finally:
            self.seconds["judging"] += time.process_time() - started

    def update(self, rows: Rows) -> UpdateStatistics:
        started = time.process_time()
        try:
            return super().update(rows)
        finally:
            self.seconds["update"] += time.process_time() - started


class MemoryLink:
    """A trainer's link to its network process, which is part of the `TurnNode`."""

    def __init__(self, node: TurnNode) -> None:
        self._node = node
        self._drawn: list[ExternalGroup] = []

    def welcome(self, seconds: float) -> Welcome:
        return Welcome(self._node.peer, self._node.swarm.id)

    def send(self, message: object) -> None:
        match message:
            case OwnGroup():
                self._node.swarm.publish(self._node, message)
            case Judged():
                self._node.judged[message.outcome] += 1
                self._node.trust.judged(message.peer, message.outcome)
            case Report():
                self._node.report = message

    def request_external(self, count: int, policy_version: int, per_peer: int) -> None:
        node = self._node
        self._drawn += node.pool.draw(
            count,
            policy_version,
            time.time(),
            node.rng,
            lambda peer: node.trust.of(peer, 1.0),
            node.trust.participation,
            per_peer,
        )

    def take_external(self, seconds: float) -> list[ExternalGroup]:
        groups, self._drawn = self._drawn, []
        return groups

    def flush(self, seconds: float) -> bool:
        return True

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(True, 1, 0)


class TurnNode:
    """One node.

    Args:
        config: Configuration of the node; `training.seed` seeds its sampling.
        swarm: Gives the node its name, and delivers its groups.
        averages: Take outer steps with other nodes (`TurnSwarm.average`).
        own_groups: Groups that the node samples itself in each step; None is the adaptive split.
    """

    def __init__(
        self,
        index: int,
        policy: Policy,
        config: Config,
        scorer: Scorer,
        swarm: TurnSwarm,
        averages: bool = False,
        own_groups: int | None = None,
    ) -> None:
        self.policy, self.swarm = policy, swarm
        self.key = make_key(f"{swarm.name}/{index}")
        self.peer = peer_id(self.key.public_key().public_bytes_raw())
        self.rng = random.Random(f"{swarm.name}/draw/{index}")
        self.report = Report(phase="loading")
        self.judged: Counter[str] = Counter()
        self.trust = AuthorTrust()
        self.pool = Pool()
        self.admission = Admission(
            swarm.id,
            self.peer,
            config.task.names,
            config.sharing,
            max_completion_length=config.training.max_completion_length,
        )
        self.admission.set_policy(
            policy.fingerprint, policy.tokenizer_hash, policy.tokens_per_text_byte
        )
        memory, updater = make_updater(config, policy, lambda: None)
        self.replica = (
            Averaging(policy, memory.external, config.training.temperature) if averages else None
        )
        self.engine = MeasuredPolicy(
            policy,
            updater,
            memory,
            None,
            self.replica.probe if self.replica is not None else None,
            "",
            config.training.options,
        )
        self.counters = Counters(peer=self.peer, swarm=swarm.id.hex())
        self.loop = Loop(
            config,
            self.engine,
            MemoryLink(self),  # type: ignore[arg-type]
            scorer,
            self.counters,
            config.node.data_dir / "trainer",
            Progress(),
            threading.Event(),
        )
        if own_groups is not None:
            split = FixedSplit(config.training.groups_per_step, own_groups)
            self.loop._split = self.loop._external._split = split
        self.elsewhere = 0.0
        """CPU seconds within this node's turn that other nodes spent on its groups."""

    def turn(self) -> dict[str, float]:
        """Take one step, and return its measurements: groups by origin, tokens sampled, reward of
        own groups, CPU seconds by part."""
        before, self.elsewhere = self.counters.tokens_total, 0.0
        admitting = self.engine.seconds.pop("admitting", 0.0)
        self.engine.seconds.clear()
        started = time.process_time()
        self.loop.step()
        spent = time.process_time() - started - self.elsewhere
        parts, report = self.engine.seconds, self.report
        return {
            "own": report.own_groups,
            "external": report.external_groups,
            "tokens": self.counters.tokens_total - before,
            "reward": report.reward_own or 0.0,
            "silent": report.zero_advantage_share or 0.0,
            "sampling": spent - parts["update"] - parts["judging"],
            "judging": parts["judging"] + admitting,
            "update": parts["update"],
        }

    def receive(self, frame: bytes, scored: Scored | None, now: float) -> Scored | None:
        """Admit a group into the pool.

        Args:
            scored: The scorer's answer for this group, if another node asked before.

        Returns:
            The scorer's answer; None if the group was refused before it was scored.
        """
        candidate = self.admission.check(frame, now)
        if isinstance(candidate, Refusal):
            self.judged[candidate.reason] += 1
            return scored
        if scored is None:
            group = candidate.group
            answer = self.swarm.scorer.score_many(
                [(group.task, [completion.text for completion in group.completions])]
            )[0]
            if isinstance(answer, Exception):
                raise answer
            scored = answer
        group = self.admission.check_scored(candidate, scored)
        if isinstance(group, Refusal):
            self.judged[group.reason] += 1
        else:
            self.pool.add(group, now, self.counters.policy_version)
        return scored


class TurnSwarm:
    """Nodes that take turns.

    Args:
        name: Name of the swarm: nodes' keys and questions follow from it.
        id: Swarm id, 32 bytes.
    """

    def __init__(self, name: str, id: bytes, scorer: Scorer) -> None:
        self.name, self.id, self.scorer = name, id, scorer
        self.nodes: list[TurnNode] = []
        self.exchanges: Counter[str] = Counter()

    def add(
        self,
        policy: Policy,
        config: Config,
        averages: bool = False,
        own_groups: int | None = None,
    ) -> None:
        node = TurnNode(len(self.nodes), policy, config, self.scorer, self, averages, own_groups)
        self.nodes.append(node)

    def publish(self, sender: TurnNode, own: OwnGroup) -> None:
        """Sign a group and deliver it to all other nodes, unless all of its rewards are equal."""
        if not is_useful(own.rewards):
            return
        started = time.process_time()
        now, text = time.time(), sender.policy
        group = RolloutGroup(
            own.task,
            text.fingerprint,
            text.tokenizer_hash,
            own.policy_version,
            int(now * 1000),
            own.sequence,
            own.sampling,
            own.completions,
        )
        frame = seal(group, sender.key, DOMAIN_ROLLOUT, self.id)
        scored: Scored | None = None
        for node in self.nodes:
            if node is not sender:
                received = time.process_time()
                scored = node.receive(frame, scored, now)
                node.engine.seconds["admitting"] += time.process_time() - received
        sender.elsewhere += time.process_time() - started

    def average(self, step: int) -> None:
        """Take one outer step of all nodes in random pairs."""
        order = list(self.nodes)
        random.Random(f"{self.name}/pairs/{step}").shuffle(order)
        for one, other in zip(order[::2], order[1::2], strict=False):
            assert one.replica is not None
            assert other.replica is not None
            (mine, sent), (theirs, received) = one.replica.copy(), other.replica.copy()
            self._outer_step(one, mine, received)
            self._outer_step(other, theirs, sent)

    def _outer_step(self, node: TurnNode, snapshot: Any, payload: bytes) -> None:
        assert node.replica is not None
        self.exchanges[node.replica.step(snapshot, payload)] += 1
        node.counters.policy_version += 1


def ask(scorer: Scorer, refs: Sequence[TaskRef]) -> list[str]:
    """Return the prompts of questions."""
    found = scorer.score_many([(ref, []) for ref in refs])
    return [one.prompt for one in checked(found)]


def checked(results: Sequence[Scored | Exception]) -> list[Scored]:
    """Return the scorer's results. Raises its first error: honest questions have none."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return list(results)  # type: ignore[arg-type]


def directory_of(root: Path, index: int) -> Path:
    """Return the data directory of a node, which exists."""
    directory = root / str(index)
    directory.mkdir(parents=True)
    return directory

"""Peers' groups of a step: requested and received after sampling, so that they are recent, and
judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from swarmnode.config import SharingConfig
from swarmnode.drops import DropTally, TrainerDrops
from swarmnode.link.client import Link
from swarmnode.rl.split import AdaptiveSplit
from swarmnode.rollouts.groups import ExternalGroup, Judged, Outcome, OwnGroup, is_useful
from swarmnode.rollouts.sampling import most_per_peer
from swarmnode.rollouts.trainer.batch import TrainingGroup
from swarmnode.rollouts.trainer.judge import Judgement, judge, judge_until_full, reserve
from swarmnode.rollouts.trainer.quota import TokenQuota
from swarmnode.rollouts.trainer.rescore import Rescore, ScoringBudget
from swarmnode.trainer.engine import Engine
from swarmnode.wire.tensors import unpack_ids

ANSWER_SECONDS = 0.2
"""Largest wait of a step for groups from the network process, once or twice. It responds in
milliseconds unless it is busy; later groups are used in the next step."""


class ExternalGroups:
    """The trainer's side of sharing. Groups that a step has no room for wait for the next one."""

    def __init__(
        self,
        link: Link,
        engine: Engine,
        split: AdaptiveSplit,
        sharing: SharingConfig,
        temperature: float,
        drops: DropTally | None = None,
        rescore: Rescore | None = None,
    ) -> None:
        self._link = link
        self._engine = engine
        self._split = split
        self._sharing = sharing
        self._temperature = temperature
        self._rescore = rescore
        self._backlog: list[ExternalGroup] = []
        self._drops = drops or TrainerDrops().external
        self._budget = ScoringBudget()
        self.quota = TokenQuota()

    def publish(self, own: Sequence[OwnGroup]) -> None:
        """Send the step's own groups to the network process, if groups are shared."""
        for message in own:
            mean = fmean(message.rewards)
            for completion, reward in zip(message.completions, message.rewards, strict=True):
                ids = unpack_ids(completion.token_ids).tolist()
                self.quota.own(message.task.id, ids, rewarded=reward > mean)
            if self._sharing.enabled:
                self._link.send(message)

    def pull(self, policy_version: int) -> Judgement:
        """Request peers' groups and judge them until the step's room is full. Call `learnt`
        afterwards."""
        room = self._split.external_room

        def request(count: int) -> list[ExternalGroup]:
            if count > 0:
                self._link.request_external(count, policy_version, most_per_peer(room))
            return self._link.take_external(ANSWER_SECONDS) if room else []

        # A reserve replaces groups that will be refused; waiting groups are subtracted.
        arrived = request(room + reserve(room) - len(self._backlog))
        judgement, left = judge_until_full(self._backlog + arrived, room, self._judge, request)
        self._backlog = left[: self._split.batch]
        return judgement

    def _judge(self, groups: Sequence[ExternalGroup]) -> Judgement:
        return judge(
            groups,
            self._engine.text,
            self._engine.score,
            self._temperature,
            quota=self.quota,
            rescore=self._rescore,
            budget=self._budget,
        )

    def learnt(self, judgement: Judgement, refused: Mapping[int, Outcome]) -> list[TrainingGroup]:
        """Send each group's outcome to the network process, and adapt the split to the groups that
        a step was trained on.

        Args:
            refused: Reasons of accepted groups that the update excluded, by their number.

        Returns:
            The groups that were trained on.
        """
        accepted = iter(range(len(judgement.accepted)))
        details = dict(judgement.details)  # each is of the first group with this outcome
        for group, judged in judgement.outcomes:
            outcome = refused.get(next(accepted), judged) if judged == "used" else judged
            self._link.send(Judged(group.peer, outcome))
            if outcome == "used":
                self._drops.keep()
                continue
            self._drops.drop(
                outcome,
                peer=group.peer,
                task=group.group.task.id,
                detail=details.pop(outcome, ""),
            )
        trained = [
            group for number, group in enumerate(judgement.accepted) if number not in refused
        ]
        self._split.observe(sum(is_useful(group.rewards) for group in trained))
        return trained

"""Publishes this node's own groups: checks them against the bounds that peers apply, signs them and
puts them on the shelf."""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.drops import DropCounts, DropTally
from swarmnode.errors import BadMessage
from swarmnode.rollouts.groups import (
    GroupRules,
    OwnGroup,
    PolicyFacts,
    has_turns,
    is_useful,
    without_token_ids,
)
from swarmnode.rollouts.pull_gossip import PullGossip
from swarmnode.rollouts.signers import Signer
from swarmnode.tasks.registry import TASKS
from swarmnode.wire import codec, envelope, ids, limits
from swarmnode.wire.envelope import Credentials
from swarmnode.wire.messages import RolloutGroup

PUBLISHED = "published"
"""Outcome of `Publisher.publish` for a group that was put on the shelf."""
REASONS = ("zero_advantage", "budget", "rate", "oversize", "invalid", "no_policy")
"""Outcomes of `Publisher.publish` for a group that was not put on the shelf."""
EXPECTED = ("zero_advantage", "budget", "disabled")
"""Outcomes of normal operation, logged at level info."""


class Publisher:
    """Publishes own groups.

    Args:
        own_peer: This node's peer id.
        credentials: The node's key and its swarm.
        rules: The groups that the swarm's manifest allows.
        rate: Most own groups per second.
        allows: allows("publish") returns True while budget and pauses permit serving groups.
        gossip: Puts groups on the shelf.
        clock: Returns Unix seconds.
    """

    def __init__(
        self,
        own_peer: str,
        credentials: Credentials,
        rules: GroupRules,
        rate: float,
        allows: Callable[[str], bool],
        gossip: PullGossip,
        clock: Callable[[], float],
    ) -> None:
        self._own_peer = own_peer
        self._credentials = credentials
        self._keeps_rules = rules.keeps_rules
        self._rate = rate
        self._pace = Signer(own_peer, rate, clock())
        self._allows = allows
        self._gossip = gossip
        self._clock = clock
        self._tally = DropTally("own group not published", quiet=EXPECTED, reasons=REASONS)

    def statistics(self) -> DropCounts:
        """Return the number of published groups, and of unpublished ones by outcome."""
        return self._tally.statistics()

    def publish(self, own: OwnGroup, policy: PolicyFacts | None) -> str:
        """Sign a group that `policy` sampled and put it on the shelf.

        A group whose rewards are all equal is not published, because peers would drop it. Never
        raises for a group that cannot be shared.

        Returns:
            The outcome, which is also counted.
        """
        try:
            outcome = self._publish(own, policy)
        except BadMessage as bad:
            return self.note("invalid", str(bad))
        return self.note(outcome)

    def note(self, outcome: str, error: str = "") -> str:
        """Count the outcome of an own group and return it."""
        if outcome == PUBLISHED:
            self._tally.keep()
        else:
            self._tally.drop(outcome, error=error)
        return outcome

    def _publish(self, own: OwnGroup, policy: PolicyFacts | None) -> str:
        if policy is None:
            return "no_policy"
        if not is_useful(own.rewards):
            return "zero_advantage"
        if not self._allows("publish"):
            return "budget"
        now = self._clock()
        if not self._pace.has_token(self._rate, now):
            return "rate"  # peers ignore groups above this rate
        group = RolloutGroup(
            task=own.task,
            model=policy.model,
            tokenizer=policy.tokenizer,
            policy_version=own.policy_version,
            created_at=int(now * 1000),
            sequence=own.sequence,
            sampling=own.sampling,
            completions=own.completions,
        )
        codec.check_group(group)
        spec = TASKS.get(own.task.id)
        if spec is None or not all(has_turns(c, spec.turns) for c in group.completions):
            return "invalid"
        if not self._keeps_rules(group):  # sampled before the manifest changed
            return "invalid"
        if len(codec.encode(group)) > limits.GROUP_BYTES:
            group = without_token_ids(group)
            if len(codec.encode(group)) > limits.GROUP_BYTES:
                return "oversize"
        frame = envelope.seal(
            group, self._credentials.key, ids.DOMAIN_ROLLOUT, self._credentials.swarm
        )
        self._pace.take_token()
        self._gossip.put(group, self._own_peer, frame, own.rewards)
        return PUBLISHED

"""Offers this node's own groups to peers: checked against a stranger's bounds, and signed."""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.drops import DropCounts, DropTally
from swarmnode.errors import BadMessage
from swarmnode.p2p.api import Network
from swarmnode.rollouts.groups import (
    GroupRules,
    OwnGroup,
    PolicyFacts,
    is_useful,
    without_token_ids,
)
from swarmnode.rollouts.serving import Serving
from swarmnode.rollouts.signers import Signer
from swarmnode.wire import codec, envelope, ids, limits
from swarmnode.wire.envelope import Credentials
from swarmnode.wire.messages import RolloutGroup

PUBLISHED = ("published",)
"""Outcomes of `Publisher.publish` where the group went out."""
EXPECTED = ("zero_advantage", "budget", "disabled")
"""Outcomes that are no fault."""


class Publisher:
    """rate: own groups per second, at most. allows("publish"): whether there is budget for it.
    clock: Unix seconds.

    serving: from where peers get it.
    """

    def __init__(
        self,
        network: Network,
        credentials: Credentials,
        rules: GroupRules,
        rate: float,
        allows: Callable[[str], bool],
        serving: Serving,
        clock: Callable[[], float],
    ) -> None:
        self._network = network
        self._credentials = credentials
        self._keeps_rules = rules.keeps_rules
        self._rate = rate
        self._pace = Signer(network.peer_id, rate, clock())
        self._allows = allows
        self._serving = serving
        self._clock = clock
        self._tally = DropTally("own group not published", quiet=EXPECTED)

    def statistics(self) -> DropCounts:
        """Groups that went out, and those that stayed here by outcome."""
        return self._tally.statistics()

    async def publish(self, own: OwnGroup, policy: PolicyFacts | None) -> str:
        """Sign a group that `policy` sampled and offer it; returns its outcome. Never raises for
        a group that cannot be sent."""
        try:
            outcome = await self._publish(own, policy)
        except BadMessage as bad:
            return self.note("invalid", str(bad))
        return self.note(outcome)

    def note(self, outcome: str, error: str = "") -> str:
        """Count the outcome of an own group."""
        if outcome in PUBLISHED:
            self._tally.keep()
        else:
            self._tally.drop(outcome, error=error)
        return outcome

    async def _publish(self, own: OwnGroup, policy: PolicyFacts | None) -> str:
        if policy is None:
            return "no_policy"
        if not is_useful(own.rewards):
            return "zero_advantage"
        if not self._allows("publish"):
            return "budget"
        now = self._clock()
        if not self._pace.has_token(self._rate, now):
            return "rate"  # peers take no more from us than we from them
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
        if not self._keeps_rules(group):  # sampled before the manifest changed
            return "invalid"
        if len(codec.encode(group)) > limits.GROUP_BYTES:
            group = without_token_ids(group)
            if len(codec.encode(group)) > limits.GROUP_BYTES:
                return "oversize"
        frame = envelope.seal(
            group, self._credentials.key, ids.DOMAIN_ROLLOUT, self._credentials.swarm
        )
        self._serving.put(group, self._network.peer_id, frame, own.rewards)
        self._pace.take_token()
        return "published"

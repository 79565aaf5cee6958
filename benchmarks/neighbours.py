"""Learning by pull: the nodes of benchmarks.simulator, each connected with few others, of whose
listings it asks for what it draws.

Who is whose neighbour never changes here, which is the worst that a swarm can be to what it has to
learn: groups travel on from neighbour to neighbour as these ask for them, or not at all. Nodes take
their steps in turns, and ask at the moments at which the product does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.pullers import Puller
from benchmarks.simulator import Node, OwnSample, Swarm
from swarmnode.rollouts.groups import ExternalGroup, is_useful
from swarmnode.rollouts.pool import Pool
from swarmnode.rollouts.sampling import spread
from swarmnode.trainer.batch import TrainingGroup
from swarmnode.wire import codec
from swarmnode.wire.envelope import content_id, peer_id, seal
from swarmnode.wire.ids import DOMAIN_ROLLOUT
from swarmnode.wire.listings import Listed

STEP_SECONDS = 30.0
"""Of a round: a peer is asked for a listing every few seconds at most, and a step takes longer."""


def rings(count: int, neighbours: int, rng: random.Random) -> list[set[int]]:
    """A connected graph: `neighbours` / 2 rings through all of `count`, each in another order.
    Index → whom it is connected with."""
    linked: list[set[int]] = [set() for _ in range(count)]
    for _ in range(max(1, neighbours // 2)):
        order = list(range(count))
        rng.shuffle(order)
        for one, other in zip(order, order[1:] + order[:1], strict=True):
            if one != other:
                linked[one].add(other)
                linked[other].add(one)
    return linked


class PullSwarm(Swarm):
    """As Swarm; `arm.neighbours` of each node."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.round_seconds = STEP_SECONDS
        self._groups: dict[bytes, ExternalGroup] = {}
        self.asked_for = 0
        """Listings, of all nodes."""
        linked = rings(
            len(self.nodes), self.arm.neighbours, random.Random(f"neighbours/{self.seed}")
        )
        near = lambda node: [self.nodes[index].peer for index in sorted(linked[node.index])]
        self._members = {node.peer: _Member(node, self.swarm, near(node)) for node in self.nodes}

    def round(self) -> None:
        super().round()
        self.trace.extra["authors_met"] = sum(len(m.met) for m in self._members.values()) / len(
            self._members
        )

    def draw(self, node: Node) -> list[TrainingGroup]:
        """The last to draw in a turn starts the asking of all whose moment has come."""
        drawn = super().draw(node)
        assert isinstance(node.pool, Pool)
        self._members[node.peer].puller.want(
            node.asked, node.pool.waiting(node.trusted.belief), self.now
        )
        if node is self.stepping[-1]:
            # all ask before anything travels on
            came = {peer: self._pull(member) for peer, member in self._members.items()}
            for peer, groups in came.items():
                for listed, frame in groups:
                    self._members[peer].puller.catalogue.put(frame, listed)
        return drawn

    def share(self, own: dict[int, list[OwnSample]]) -> None:
        """Everybody's groups on its own shelf."""
        for node in self.stepping:
            for one in own[node.index]:
                if is_useful(one.rewards):
                    rollout = node.rollout(one, self.now)
                    frame = seal(rollout, node.key, DOMAIN_ROLLOUT, self.swarm)
                    content = content_id(frame)
                    self._groups[content] = ExternalGroup(
                        content, node.peer, rollout, one.prompt, one.rewards, staleness=0
                    )
                    key = node.key.public_key().public_bytes_raw()
                    listed = Listed(
                        content,
                        key,
                        one.ref.id,
                        rollout.created_at,
                        len(frame),
                        spread(one.rewards),
                    )
                    self._members[node.peer].puller.catalogue.put(frame, listed)

    def _pull(self, member: _Member) -> list[tuple[Listed, bytes]]:
        puller = member.puller
        while requests := puller.to_list(member.neighbours, self.now):
            for peer, request in requests:
                answer = self._members[peer].puller.catalogue.listing(request, self.now)
                puller.listed(peer, answer, self.now)
                self.asked_for += 1
                self._received += len(codec.encode(answer))
        came = []
        for pull in puller.to_pull(self.now, member.node.trust, member.seen.__contains__):
            came += puller.pulled(
                pull, self._members[pull.holder].puller.give(pull, self.now), self.now
            )
        for listed, frame in came:
            member.seen.add(listed.content)
            group = self._groups[listed.content]
            member.node.receive(group, self.now)
            member.met.add(group.peer)
            puller.scored(listed.content, as_listed=True)
            self._received += len(frame)
        return came


class _Member:
    def __init__(self, node: Node, swarm: bytes, neighbours: Sequence[str]) -> None:
        self.node = node
        self.neighbours = neighbours
        self.puller = Puller(
            node.key.public_key().public_bytes_raw(),
            swarm,
            peer_id,
            random.Random(f"pull/{node.peer}"),
        )
        self.seen: set[bytes] = set()
        self.met: set[str] = set()

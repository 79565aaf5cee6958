"""Learning by pull gossip: the nodes of benchmarks.simulator, each with few neighbours that it
polls and from which it fetches.

Neighbours never change, which is the worst case for spreading: groups travel from neighbour to
neighbour only when these fetch them. Nodes take their steps in turns. A poll is answered at once,
since what a long poll would wait for arrives in the next turn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.lib.scale_events import rings
from benchmarks.simulator import Node, OwnSample, Swarm
from swarmnode.rollouts.groups import ExternalGroup, is_useful
from swarmnode.rollouts.pool import Pool
from swarmnode.rollouts.puller import Puller
from swarmnode.rollouts.sampling import spread
from swarmnode.rollouts.shelf import Shelf
from swarmnode.trainer.batch import TrainingGroup
from swarmnode.wire import codec
from swarmnode.wire.envelope import content_id, peer_id, seal
from swarmnode.wire.ids import DOMAIN_ROLLOUT
from swarmnode.wire.listings import GroupsRequest, ListedGroup, ListingRequest

STEP_SECONDS = 30.0
"""Length of a round."""


class PullSwarm(Swarm):
    """A swarm in which each node has `arm.neighbours` neighbours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.round_seconds = STEP_SECONDS
        self._groups: dict[bytes, ExternalGroup] = {}
        self.asked_for = 0
        """Polls of all nodes."""
        linked = rings(
            len(self.nodes), self.arm.neighbours, random.Random(f"neighbours/{self.seed}")
        )
        near = lambda node: [self.nodes[index].peer for index in sorted(linked[node.index])]
        self._members = {
            node.peer: _Member(node, self.swarm, near(node), self.now) for node in self.nodes
        }

    def round(self) -> None:
        super().round()
        self.trace.extra["authors_met"] = sum(len(m.met) for m in self._members.values()) / len(
            self._members
        )

    def draw(self, node: Node) -> list[TrainingGroup]:
        """Draw; after the last draw of a turn every node polls and fetches."""
        drawn = super().draw(node)
        assert isinstance(node.pool, Pool)
        waiting = node.pool.waiting(node.trusted.belief)
        self._members[node.peer].puller.drew(node.asked, waiting, node.step, self.now)
        if node is self.stepping[-1]:
            self._exchange()
        return drawn

    def _exchange(self) -> None:
        """Poll and fetch for every node before anything is forwarded."""
        came = {peer: self._pull(member) for peer, member in self._members.items()}
        for peer, groups in came.items():
            for listed, frame, holder in groups:
                self._members[peer].shelf.put(frame, listed, self._members[holder].key)

    def share(self, own: dict[int, list[OwnSample]]) -> None:
        """Put every node's groups on its shelf."""
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
                    listed = ListedGroup(
                        content,
                        key,
                        one.ref.id,
                        rollout.created_at,
                        len(frame),
                        spread(one.rewards),
                    )
                    self._members[node.peer].shelf.put(frame, listed)

        if not self.trace.tokens:
            self._exchange()  # before the first draw

    def _pull(self, member: _Member) -> list[tuple[ListedGroup, bytes, str]]:
        puller, now = member.puller, self.now
        while peers := puller.polls_due(member.neighbours, now, member.seen.__contains__):
            for peer in peers:
                request = ListingRequest(self.swarm, *puller.offers.cursor(peer), 0)
                answer = self._members[peer].shelf.listing(request, now, member.key)
                puller.polled(peer, answer, now, now)
                self.asked_for += 1
                self._received += len(codec.encode(answer))
        came = []
        for pull in puller.fetches_due(now, now, member.node.trust, member.seen.__contains__):
            request = GroupsRequest([listed.content for listed in pull.groups])
            answers = self._members[pull.holder].shelf.give(request, now).groups
            puller.fetched(pull, [answer.status for answer in answers], now)
            came += [
                (listed, answer.body, pull.holder)
                for listed, answer in zip(pull.groups, answers, strict=True)
                if answer.status == "ok"
            ]
        for listed, frame, holder in came:
            member.seen.add(listed.content)
            group = self._groups[listed.content]
            member.node.receive(group, now, holder)
            member.met.add(group.peer)
            puller.scored(listed.content, group.rewards, now)
            self._received += len(frame)
        return came


class _Member:
    def __init__(self, node: Node, swarm: bytes, neighbours: Sequence[str], now: float) -> None:
        self.node = node
        self.neighbours = neighbours
        self.key = node.key.public_key().public_bytes_raw()
        rng = random.Random(f"pull/{node.peer}")
        self.shelf = Shelf(self.key, swarm, rng.randbytes(8))
        self.puller = Puller(self.key, peer_id, rng, now)
        self.seen: set[bytes] = set()
        self.met: set[str] = set()

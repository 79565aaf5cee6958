"""Measure how many honest nodes end with hostile neighbours only.

The product's peer tables and turnover run without a network. All nodes join through one honest
bootstrap node. Hostile identities share few networks, report only each other, dial honest
nodes in every round, and never leave. An honest node asks the peers that it has just dialled, and
seven peers that it dialled every two minutes; it replaces one connection every ten minutes.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict, dataclass, field

from benchmarks.lib.report import columns, heading, make_parser, seeds_of, write_json
from swarmnode.p2p import turnover
from swarmnode.p2p.peers import DropReason, PeerTable
from swarmnode.p2p.turnover import PeerLink

TARGET = 16
ROUND_SECONDS = 120.0
QUERIES, SHARED = 7, 32
"""Peers that a node queries in a round, and addresses in an answer."""
ROUNDS_PER_EXCHANGE = 5
CHURN = 0.002
"""Share of the honest nodes that restart as new ones in a round."""
HOSTILE_DIALS = 4
"""Honest nodes that a hostile identity dials in a round."""


@dataclass(frozen=True)
class Attack:
    """A simulated attack. All nodes arrive at once.

    Attributes:
        share: Share of hostile identities.
        networks: /24 prefixes of the hostile identities; None gives each its own.
        places: Maximum number of connections of a node.
    """

    nodes: int = 2000
    share: float = 0.25
    networks: int | None = 50
    minutes: int = 180
    places: int = 200
    turnover: bool = True
    seed: int = 0


@dataclass
class Node:
    table: PeerTable
    links: dict[int, PeerLink] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Shares over honest nodes.

    Attributes:
        hostile_links: Share of links that lead to hostile nodes.
        hostile_dialled: The same of the links that honest nodes dialled.
        surrounded: Share of honest nodes without any honest link.
        met: Mean number of distinct honest peers of a node.
    """

    hostile_links: float
    hostile_dialled: float
    surrounded: float
    met: float


class Swarm:
    """Nodes below `honest` are honest; node 0 is the bootstrap node."""

    def __init__(self, attack: Attack) -> None:
        self.attack = attack
        self.rng = random.Random(attack.seed)
        self.honest = round(attack.nodes * (1 - attack.share))
        self.names = [f"p{number}" for number in range(attack.nodes)]
        self.number_of = {name: number for number, name in enumerate(self.names)}
        self.nodes = {number: self._new(number) for number in range(self.honest)}
        self.met: dict[int, set[int]] = {number: set() for number in self.nodes}
        self.now = 0.0

    def run(self) -> Outcome:
        for number in range(int(60 * self.attack.minutes / ROUND_SECONDS)):
            self._round(number)
        return self._outcome()

    def prefix(self, number: int) -> str:
        """Return the /24 of a node; each honest node has its own."""
        networks = self.attack.networks
        place = (
            number if number < self.honest or networks is None else self.honest + number % networks
        )
        return f"{20 + place // 65536}.{place // 256 % 256}.{place % 256}"

    def address(self, number: int) -> str:
        return f"/ip4/{self.prefix(number)}.{1 + number % 250}/tcp/4001"

    def _new(self, number: int) -> Node:
        table = PeerTable(self.names[number], TARGET, random.Random(f"{self.attack.seed} {number}"))
        if number:
            table.add(self.names[0], self.address(0), "bootstrap", 0.0)
        return Node(table)

    def _round(self, count: int) -> None:
        order = list(self.nodes)
        self.rng.shuffle(order)
        for number in order:
            if number and self.rng.random() < CHURN:
                self._restart(number)
        for _ in range(2):
            for number in order:
                self._dial(number)
        for hostile in range(self.honest, self.attack.nodes):
            for number in self.rng.sample(range(self.honest), HOSTILE_DIALS):
                self._connect(hostile, number)
        for number in order:
            self._make_room(number)
            candidates = [
                other
                for other in self.nodes[number].links
                if self.nodes[number].table.accepts_reports(self.names[other])
            ]
            for other in self.rng.sample(candidates, min(QUERIES, len(candidates))):
                self._query(number, other)
            if self.attack.turnover and count % ROUNDS_PER_EXCHANGE == number % ROUNDS_PER_EXCHANGE:
                self._exchange(number)
        self.now += ROUND_SECONDS

    def _dial(self, number: int) -> None:
        table = self.nodes[number].table
        for dial in table.to_dial(self.now, 8):
            other = self.number_of[dial.peer]
            if other in self.nodes[number].links or not self._connect(number, other):
                table.record_failed(dial.peer, self.now)
            else:
                table.record_dialled(dial.peer, dial.addresses[0], self.now)
                self._query(number, other)

    def _connect(self, dialling: int, dialled: int) -> bool:
        """Connect two nodes; return False if `dialled` has no place."""
        if (there := self.nodes.get(dialled)) is not None:
            alike = sum(1 for each in there.links.values() if each.group == self.prefix(dialling))
            if (
                dialling in there.links
                or len(there.links) >= self.attack.places
                or alike >= self.attack.places // 4
            ):
                return False
            self._link(dialled, dialling, inbound=True)
            there.table.add_self_reported(self.names[dialling], self.address(dialling), self.now)
        if dialling in self.nodes:
            self._link(dialling, dialled, inbound=False)
        return True

    def _link(self, here: int, other: int, *, inbound: bool) -> None:
        node = self.nodes[here]
        node.links[other] = PeerLink(
            self.names[other], inbound, self.now, self.prefix(other), spare=other != 0
        )
        node.table.record_connected(self.names[other], inbound=inbound, now=self.now)
        if other < self.honest:
            self.met[here].add(other)

    def _cut(self, one: int, other: int) -> None:
        for here, there in ((one, other), (other, one)):
            if here in self.nodes and there in self.nodes[here].links:
                del self.nodes[here].links[there]
                self.nodes[here].table.record_disconnected(self.names[there], self.now)

    def _query(self, number: int, other: int) -> None:
        if other < self.honest:
            shared = [
                (peer, where[0])
                for peer, where in self.nodes[other].table.peers_to_share(
                    SHARED, exclude=self.names[number], scope=2
                )
            ]
        else:
            shared = [
                (self.names[each], self.address(each))
                for each in self.rng.choices(range(self.honest, self.attack.nodes), k=SHARED)
            ]
        for peer, where in shared:
            self.nodes[number].table.add(peer, where, "exchange", self.now)

    def _make_room(self, number: int) -> None:
        for peer in turnover.peers_to_drop(
            self.nodes[number].links.values(), self.attack.places, self.now
        ):
            self._drop(number, peer, "full")

    def _exchange(self, number: int) -> None:
        node = self.nodes[number]
        peer = turnover.peer_to_replace(node.links.values(), TARGET, self.now, self.rng)
        if peer is not None and node.table.has_fresh_peers(self.now):
            self._drop(number, peer, "exchanged")

    def _drop(self, number: int, peer: str, why: DropReason) -> None:
        self.nodes[number].table.cool_down(peer, self.now, why)
        self._cut(number, self.number_of[peer])

    def _restart(self, number: int) -> None:
        for other in list(self.nodes[number].links):
            self._cut(number, other)
        self.nodes[number] = self._new(number)

    def _outcome(self) -> Outcome:
        links = [[other >= self.honest for other in node.links] for node in self.nodes.values()]
        dialled = [
            other >= self.honest
            for node in self.nodes.values()
            for other, link in node.links.items()
            if not link.inbound
        ]
        hostile = [each for node in links for each in node]
        return Outcome(
            hostile_links=statistics.fmean(hostile),
            hostile_dialled=statistics.fmean(dialled),
            surrounded=statistics.fmean(all(node) for node in links),
            met=statistics.fmean(len(each) for each in self.met.values()),
        )


def main() -> None:
    parser = make_parser("eclipse", __doc__, quick="200 nodes for an hour, 25 %% hostile", seeds=1)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--minutes", type=int, default=180)
    parser.add_argument("--places", type=int, default=Attack.places, help="connections of a node")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5])
    args = parser.parse_args()
    networks: tuple[int | None, ...] = (max(4, args.nodes // 40), None)
    if args.quick:
        args.nodes, args.minutes, args.shares, networks = 200, 60, [0.25], (5,)
    found: list[tuple[Attack, Outcome]] = []
    for attack in (
        Attack(args.nodes, share, count, args.minutes, args.places, turns, seed)
        for share in args.shares
        for count in networks
        for turns in (True, False)
        for seed in seeds_of(args)
    ):
        found.append((attack, Swarm(attack).run()))
        print(*found[-1], flush=True)
        write_json(args.json, [asdict(each) | asdict(outcome) for each, outcome in found])
    print(heading("eclipse: honest nodes among hostile ones"))
    print(
        columns(
            found,
            {
                "nodes": lambda each: each[0].nodes,
                "hostile": lambda each: f"{each[0].share:.0%}",
                "their /24s": lambda each: each[0].networks or "one each",
                "turnover": lambda each: "yes" if each[0].turnover else "no",
                "seed": lambda each: each[0].seed,
                "hostile links": lambda each: f"{each[1].hostile_links:.1%}",
                "of dialled links": lambda each: f"{each[1].hostile_dialled:.1%}",
                "surrounded": lambda each: f"{each[1].surrounded:.2%}",
                "peers met": lambda each: f"{each[1].met:.0f}",
            },
        )
    )


if __name__ == "__main__":
    main()

"""A real control behind the plane is told of records that are none: what they cost whoever sends them, and what costs nobody anything."""

from itertools import pairwise

import msgspec
import pytest
import trio

from protocol.generate import crew_vectors as v
from protocol.generate.frames import pack
from swarmnode.config import StagesConfig
from swarmnode.crew import events as ev
from swarmnode.crew import messages
from swarmnode.crew.plane import MEMORY, StagePlane
from swarmnode.crew.roster import Acceptor
from swarmnode.wire.envelope import signed_by

ME = 5
"""Of the vectors' members: it holds stage 2 under `NOW`, roster 2."""
NOW = v.after()
NEXT = v.after(NOW)
BEYOND = v.after(NEXT)


class Network:
    peer_id = v.PEERS[ME]

    def __init__(self):
        self.requests = self.streams = self
        self.blamed, self.handlers, self.reply = [], {}, pack({"type": "noted"})

    def serve(self, protocol, handler, **limits):
        self.handlers[protocol] = handler

    def connected(self):
        return []

    async def changed(self):
        await trio.sleep_forever()

    def hold(self, peers):
        pass

    def rejected(self, peer, reason, cost=0.0):
        self.blamed.append((peer, reason))

    async def request(self, peer, protocol, data, **limits):
        await trio.lowlevel.checkpoint()
        return self.reply

    async def say(self, message, peer="liar"):
        return await self.handlers["/swarmnode/crews/1"](peer, pack(message))


@pytest.fixture
async def node(tmp_path):
    """(plane, network) of a member that remembers its crew."""
    acceptor = Acceptor(messages.Voter(v.PEERS[ME], v.INCARNATIONS[ME]), v.KEYS[ME].sign, signed_by)
    chain = messages.decode_request(pack(adopt(v.certificate(v.FOUNDING, range(5)), v.certificate(NOW, (0, 1, 3)))))
    acceptor.learn(chain.certificates)
    (tmp_path / MEMORY).write_bytes(acceptor.memory())
    (tmp_path / "run").mkdir()
    network = Network()
    plane = StagePlane(network, v.KEYS[ME], StagesConfig(mode="always"), tmp_path, lambda message: True)
    async with trio.open_nursery() as nursery:
        await nursery.start(plane.run)
        await trio.testing.wait_all_tasks_blocked()
        yield plane, network
        nursery.cancel_scope.cancel()


def adopt(*certificates):
    return {"type": "adopt", "certificates": list(certificates)}


def epoch(plane):
    return plane.statistics().control.roster_epoch


def forged(record, voters):
    """One of the signatures is of another ballot."""
    good, bad = v.certificate(record, voters), v.certificate(record, voters, ballot=32)
    return {**good, "votes": [*good["votes"][:-1], bad["votes"][-1]]}


SIGNATURE, BOUNDS = "stages_signature", "stages_bounds"
FALSE = {
    "a false signature": (SIGNATURE, adopt(forged(NEXT, (0, 1, 3)))),
    "too few votes": (SIGNATURE, adopt(v.certificate(NEXT, (0, 1)))),
    "signed by a stranger": (SIGNATURE, adopt(v.certificate(NEXT, (0, 1, 2)))),
    "a false signature behind a true one": (SIGNATURE, adopt(v.certificate(NEXT, (0, 1, 3)), forged(BEYOND, (0, 1, 3)))),
    "a false signature ahead of what is known": (SIGNATURE, adopt(forged(BEYOND, (0, 1, 3)))),
    "a chain that goes back in time": (
        BOUNDS, adopt(v.certificate(NEXT, (0, 1, 3)), v.certificate(v.after(NEXT, step=7), (0, 1, 3))),
    ),
    "a chain of two crews": (
        BOUNDS, adopt(v.certificate(NEXT, (0, 1, 3)), v.certificate({**BEYOND, "previous": b"p" * 32}, (0, 1, 3))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FALSE)
async def test_a_chain_that_no_honest_node_can_send_costs_standing_once_for_each_message(node, name):
    plane, network = node
    reason, message = FALSE[name]
    for times in (1, 2):
        await network.say(message)
        assert network.blamed == [("liar", reason)] * times
        assert epoch(plane) == 2


async def test_a_false_chain_costs_as_much_as_an_answer(node):
    plane, network = node
    network.reply = pack(adopt(forged(NEXT, (0, 1, 3))))
    await plane._ask(ev.Drain("test"))  # whatever is said to the members
    await trio.testing.wait_all_tasks_blocked()
    assert (v.PEERS[0], SIGNATURE) in network.blamed
    assert epoch(plane) == 2


async def test_who_is_behind_or_was_deceived_loses_nothing(node):
    plane, network = node
    strangers = [[v.PEERS[4], v.INCARNATIONS[4]], [v.PEERS[2], v.INCARNATIONS[2]]]
    other = {**NEXT, "voters": strangers, "seats": [[*strangers[1], 2], *NEXT["seats"][1:]], "witnesses": []}
    for message in (
        adopt(v.certificate(v.FOUNDING, range(5))),
        adopt(v.certificate(NOW, (0, 1, 3))),
        adopt(v.certificate(v.FOUNDING, range(5)), v.certificate(NOW, (0, 1, 4))),
        adopt(v.certificate(other, (2, 4))),  # well signed, by voters that are not ours: a spare of theirs would pass it on
        adopt(v.certificate({**NEXT, "previous": b"p" * 32}, (0, 1, 3))),
    ):
        await network.say(message, "honest")
        assert epoch(plane) == 2
    assert network.blamed == []
    await network.say(adopt(v.certificate(NEXT, (0, 1, 3))), "honest")
    assert epoch(plane) == 3
    late = adopt(v.certificate(v.after(v.after(v.after(NEXT))), (0, 1, 3)))
    await network.say(late, "a stranger")  # anybody can make one
    assert epoch(plane) == 3
    await network.say(late, v.PEERS[0])  # a member: we missed too much
    assert (epoch(plane), network.blamed) == (0, [])


async def test_a_vote_that_is_not_signed_costs_standing_and_counts_for_nothing(node):
    plane, network = node
    record = messages.decode_request(pack(v.PROPOSE)).record
    vote = Acceptor(messages.Voter(v.PEERS[0], v.INCARNATIONS[0]), v.KEYS[0].sign, signed_by)._vote(record, 17)
    heard = []
    plane._tell_control = heard.append
    signed_by_another = msgspec.structs.replace(vote, signature=v.KEYS[1].sign(b"vote"))
    for said, blamed in ((vote, []), (signed_by_another, [(v.PEERS[0], SIGNATURE)])):
        network.reply = messages.encode_message(said)
        await plane._send(v.PEERS[0], messages.Propose(record, 17))
        assert network.blamed == blamed
    assert [event.answer for event in heard] == [vote, None]


def test_the_chain_that_is_sent_is_never_one_that_is_blamed():
    """As `newer_than` sends it: any part of what was taken over."""
    chain = messages.decode_request(pack(adopt(*(v.certificate(r, (0, 1, 3)) for r in (NOW, NEXT, BEYOND))))).certificates
    for first in range(3):
        messages.check_chain(chain[first:], signed_by)
    assert all(after.record.previous == messages.record_hash(before.record) for before, after in pairwise(chain))

"""A witness is free: it founds another crew, or takes a seat in one, and no crew takes another's witness for a witness."""

import msgspec
import pytest

from swarmnode.crew import events as ev
from swarmnode.crew import messages as m
from swarmnode.errors import BadMessage
from tests.support.crew_history import History, Violation
from tests.support.crew_story import Story, reset


def crews(world):
    """Members of each crew, by stage, as its head sees it; the name in the last place is its witness, if it has one."""
    found = {}
    for node in world.nodes.values():
        if node.control is not None and node.control.stage == 0 and node.control.running:
            found[node.name] = [voter.peer for voter in m.voters_of(node.control.roster)]
    return found


def epochs(world):
    return {name: node.control.roster.epoch for name, node in world.nodes.items() if node.control.stage == 0}


def lone(world):
    return [node.name for node in world.nodes.values() if node.control is not None and node.control.stage is None]


def test_of_four_nodes_come_two_crews_of_two_and_the_first_is_not_stopped_for_it():
    world = Story(2, 2, crews=2, seed=2).running()
    assert sorted(name for members in crews(world).values() for name in members[:2]) == ["n0", "n1", "n2", "n3"]
    assert world.history.counts["founded"] == 2
    assert world.history.counts["moved"] == 1
    world.wait(120.0)
    assert set(epochs(world).values()) == {1}  # nobody is left to be a witness
    assert "paused" not in world.history.counts


def test_the_crew_that_lost_its_witness_goes_on_when_its_trainers_are_killed():
    world = Story(2, 2, crews=2).running()
    first = next(members for members in crews(world).values() if len(members) == 3)
    for name in first[:2]:
        world.kill_trainer(name, 1.0)
    world.wait(1.0)
    world.until(world.everybody_runs)
    assert first[2] not in crews(world)[first[0]]  # with the next record it is not named any more


def test_without_its_witness_a_crew_of_two_ends_when_one_is_lost_and_with_a_new_one_it_goes_on():
    world = Story(2, 2, crews=2).running()
    first = next(members for members in crews(world).values() if len(members) == 3)
    reset(world, first[1])
    assert world.until(lambda: world.nodes[first[0]].control.roster is None, 80.0) < world.settings.wait_seconds + 15.0

    world = Story(2, 3, crews=2, later={"n4": 30.0}).running()
    world.until(lambda: any("n4" in members for members in crews(world).values()))
    first = next(members for members in crews(world).values() if "n4" in members)
    reset(world, first[1])
    world.wait(1.0)
    world.until(world.everybody_runs)
    assert crews(world)[first[0]][:2] == [first[0], "n4"]


def test_a_free_node_is_the_witness_of_one_crew_and_the_other_asks_it_once():
    world = Story(2, 3, crews=2, later={"n4": 30.0}).running()
    world.wait(60.0)
    assert lone(world) == ["n4"]
    mine, before = world.nodes["n4"].control.roster, epochs(world)
    assert [members[2:] for members in crews(world).values()] == [["n4"], ["n4"]]  # one of them was told that it is taken
    assert set(before.values()) == {2}
    world.wait(200.0)
    assert epochs(world) == before
    assert world.nodes["n4"].control.roster == mine


def test_a_witness_that_comes_and_goes_costs_a_crew_ever_fewer_pauses():
    world = Story(2, 1).running()
    (first,) = crews(world).values()
    head, waited = world.nodes[first[0]].control, []
    for _ in range(4):
        reset(world, first[2], back=0.5, remembers=False)
        epoch = head.roster.epoch
        waited.append(world.until(lambda epoch=epoch: head.roster.epoch > epoch, 120.0))
        world.until(world.everybody_runs)
    for number, seconds in enumerate(waited[1:], 1):
        assert 0.9 < seconds / (world.settings.witness_seconds * 2**number) < 1.5
    assert head.roster.witnesses == (world.nodes[first[2]].control.acceptor.me,)


def test_a_witness_takes_a_vacant_seat_of_another_crew():
    world = Story(2, 3, crews=2, later={"n4": 30.0}).running()
    world.until(lambda: lone(world) == ["n4"] and world.nodes["n4"].control.roster is not None)
    mine = world.nodes["n4"].control.roster.seats[0].peer
    other = next(members for head, members in crews(world).items() if head != mine)
    world.event(other[1], world.nodes[other[1]].life, ev.Drain("asked to"))
    world.wait(1.0)
    world.until(lambda: "n4" in crews(world).get(other[0], []) and world.everybody_runs())
    assert crews(world)[other[0]][1] == "n4"
    assert "n4" not in [v.peer for v in m.voters_of(world.nodes[mine].control.roster)[:2]]


def test_a_witness_does_not_go_while_its_crew_may_need_its_vote():
    world = Story(2, 2, crews=1, later={"n3": 12.0})
    world.until(world.everybody_runs)
    (first,) = crews(world).values()
    witness = world.nodes[first[2]]
    world.until(lambda: world.now >= 11.5)
    reset(world, first[1])
    world.until(lambda: world.nodes["n3"].control is not None)
    world.until(lambda: not witness.control.is_free, 5.0)
    world.until(world.everybody_runs)
    assert crews(world)[first[0]][1] in (first[2], "n3")
    assert "moved" not in world.history.counts


def test_trouble_for_ever_keeps_no_witness():
    world = Story(2, 1).running()
    (first,) = crews(world).values()
    witness = world.nodes[first[2]].control
    view = witness._view
    absent = msgspec.structs.replace(view.statuses[first[1]], phase="absent", version=2**60)
    now = witness._now
    witness.handle(ev.Received(first[1], m.Heartbeat(view.crew, view.record.epoch, 2**40, absent)), now)
    for after, free in ((0.5, False), (world.settings.wait_seconds + 1.0, True)):
        witness._heard_crew = now + after
        witness.handle(ev.Tick(), now + after)
        assert witness.is_free == free


def test_who_holds_a_seat_is_not_free_and_a_witness_signs_for_no_place_as_one():
    world = Story(2, 1).running()
    (first,) = crews(world).values()
    head, witness = (world.nodes[first[i]].control for i in (0, 2))
    stranger = m.Voter("z", b"z" * 8)

    def answer(control, seats, witnesses=()):
        record = m.Record(
            m.NO_CREW, 1, m.NO_HASH, control.roster.model, (1, 1), tuple(m.Seat(v.peer, v.incarnation, 1) for v in seats), witnesses, (), 0,
            30, bytes(8),
        )  # fmt: skip
        record = msgspec.structs.replace(record, voters=m.voters_of(record))
        actions = control.handle(ev.Received("z", m.Propose(record, 0)), control._now)
        return next(action.message for action in actions if isinstance(action, ev.Answer))

    other = m.Voter("y", b"y" * 8)
    assert answer(head, (stranger, head.acceptor.me)) == m.Refuse("record")
    assert answer(witness, (stranger, other), (witness.acceptor.me,)) == m.Refuse("record")
    assert isinstance(answer(witness, (stranger, witness.acceptor.me)), m.Vote)
    assert witness.acceptor.crew == head.acceptor.crew  # a signature is not a crew yet


def test_a_voter_that_went_elsewhere_has_no_say_in_the_first_crew():
    world = Story(2, 2, crews=2).running()
    first = next(members for members in crews(world).values() if len(members) == 3)
    head, gone = world.nodes[first[0]].control, world.nodes[first[2]].control
    assert m.Voter(first[2], gone.acceptor.me.incarnation) in m.voters_of(head.roster)  # the same voter, as the first crew's record says
    prepare = m.Prepare(head.acceptor.crew, 2, m.record_hash(head.roster), 16)
    actions = gone.handle(ev.Received(first[0], prepare), gone._now)
    assert [a.message for a in actions if isinstance(a, ev.Answer)] == [m.Refuse("unknown")]
    for back in (m.Adopt(head.acceptor.chain), m.Heartbeat(head.acceptor.crew, 1, 1, m.Status())):
        actions = gone.handle(ev.Received(first[0], back), gone._now)
        assert [type(a.message) for a in actions if isinstance(a, ev.Answer)] == [m.Leave]
    with pytest.raises(BadMessage):
        gone.acceptor.check_chain(head.acceptor.chain)


def test_the_checker_sees_votes_in_a_crew_that_was_left_and_who_goes_for_nothing():
    history, voter = History(), m.Voter("a", bytes(8))
    history.moved(voter, b"c", 0)
    history.spoke(b"d", voter)
    with pytest.raises(Violation, match="a say in a crew"):
        history.spoke(b"c", voter)
    with pytest.raises(Violation, match="a seat in none"):
        history.moved(voter, b"d", None)


def test_a_forged_seat_elsewhere_costs_a_crew_no_witness():
    world = Story(2, 1).running()
    (first,) = crews(world).values()
    witness = world.nodes[first[2]].control
    me, theirs = witness.acceptor.me, (m.Voter("y", b"y" * 8), m.Voter("z", b"z" * 8))
    seats = (m.Seat(me.peer, me.incarnation, 2), m.Seat("z", b"z" * 8, 1))
    record = m.Record(b"c" * 32, 5, b"p" * 32, witness.roster.model, (1, 1), seats, (), theirs, 7, 30, bytes(8))
    votes = tuple(m.Signed(v.peer, v.incarnation, bytes(64)) for v in theirs)
    actions = witness.handle(ev.Received(first[0], m.Adopt((m.Certificate(record, 16, votes),))), witness._now)
    assert [a.message for a in actions if isinstance(a, ev.Answer)] == [m.Noted()]
    assert witness.roster == world.nodes[first[0]].control.roster

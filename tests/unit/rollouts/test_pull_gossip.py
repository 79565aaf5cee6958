"""Pull gossip on an in-memory network, in virtual time: answers, fetches, and peers that lie, stay
silent or take too much."""

import contextlib
from collections import Counter

import msgspec
import pytest
import trio

from swarmnode.demo.liar.author import Author
from swarmnode.errors import PeerError
from swarmnode.rollouts.network.exchange import ANSWER_SECONDS
from swarmnode.rollouts.network.puller import FAILED_SECONDS
from swarmnode.rollouts.network.shelf import POLLS_SERVED
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.listings import ListingRequest, ListingResponse
from tests.support.pulling import EPOCH, LIFE, SWARM, Holder, PullSwarm, Reader, clock

PATIENCE = limits.PATIENCE_SECONDS


@pytest.fixture
async def lone(nursery):
    """One node that serves and fetches."""
    return await PullSwarm(1).start(nursery)


@pytest.fixture
async def pair(nursery):
    return await PullSwarm(2).start(nursery)


# -- polls: when they are answered, and with what


async def test_publication_answers_a_held_poll_within_a_second(lone, nursery, autojump_clock):
    reader = Reader(lone.medium)

    async def publish():
        await trio.sleep(3.0)
        for sequence in range(3):  # a step's groups are published together
            await lone.publish(0, sequence)
            await trio.sleep(0.02)

    nursery.start_soon(publish)
    began = trio.current_time()
    answer = await reader.poll(lone.peers[0], PATIENCE)
    assert 3.0 < trio.current_time() - began < 4.0
    assert [listed.task for listed in answer.groups] == [
        lone.authors[0].task(sequence).id for sequence in range(3)
    ]
    assert lone.serving(0).waiting == 0


async def test_empty_poll_is_answered_after_its_patience(lone, autojump_clock):
    reader = Reader(lone.medium)
    for patience in (0, 1, 7, PATIENCE):
        began = trio.current_time()
        assert (await reader.poll(lone.peers[0], patience)).groups == []
        assert trio.current_time() - began == pytest.approx(patience)


async def test_two_polls_of_one_reader_are_not_answered_together(lone, nursery, autojump_clock):
    reader, answered = Reader(lone.medium), []
    await lone.publish(0, 0)
    await reader.poll(lone.peers[0])
    request = codec.encode(ListingRequest(SWARM, reader.life, reader.position, PATIENCE))

    async def poll():
        await reader.ask(lone.peers[0], ids.LISTING_PROTOCOL, request)
        answered.append(trio.current_time())

    for _ in range(2):
        nursery.start_soon(poll)
    await trio.sleep(1)
    await lone.publish(0, 1)
    await trio.sleep(4)
    assert len(answered) == 2
    assert answered[1] - answered[0] >= 1.0 - 1e-9


async def test_another_swarm_and_malformed_polls_are_refused_and_counted(lone, autojump_clock):
    reader = Reader(lone.medium)
    await lone.publish(0, 0)
    other = codec.encode(ListingRequest(b"o" * 32, b"", 0, PATIENCE))
    answer = await reader.ask(lone.peers[0], ids.LISTING_PROTOCOL, other)
    answer = codec.decode(answer, ListingResponse, limits.LISTING_RESPONSE_BYTES)
    assert (answer.status, answer.groups) == ("unknown", [])
    whole = codec.encode(ListingRequest(SWARM, b"", 0, PATIENCE))
    impatient = msgspec.msgpack.encode(
        {"swarm": SWARM, "life": b"", "position": 0, "patience": PATIENCE + 1}
    )
    for data in (b"", b"\xff", whole[:-1], whole + b"\0", impatient):
        with pytest.raises(PeerError):
            await reader.ask(lone.peers[0], ids.LISTING_PROTOCOL, data)
    assert lone.serving(0).served["malformed"] == 5
    assert len((await reader.poll(lone.peers[0])).groups) == 1


# -- polls and fetches: how many


async def flood(reader, holder, count, nursery, refused):
    """Open `count` polls that would wait, without an end."""
    request = codec.encode(ListingRequest(SWARM, b"", 0, PATIENCE))

    async def poll():
        try:
            await reader.ask(holder, ids.LISTING_PROTOCOL, request)
        except PeerError:
            refused[reader.peer] += 1

    for _ in range(count):
        nursery.start_soon(poll)


async def test_held_polls_are_bounded_for_a_peer_and_in_all(lone, nursery, autojump_clock):
    refused = Counter()
    await flood(Reader(lone.medium), lone.peers[0], 5, nursery, refused)
    await trio.sleep(1)
    assert (lone.serving(0).waiting, refused.total()) == (2, 3)
    for number in range(POLLS_SERVED // 2 + 40):
        await flood(Reader(lone.medium, seed=300 + number), lone.peers[0], 2, nursery, refused)
    await trio.sleep(1)
    assert lone.serving(0).waiting == POLLS_SERVED == 512
    assert refused.total() == 3 + 2 + 80


async def test_a_peer_has_its_allowance_and_others_are_served(pair, autojump_clock):
    await pair.publish(0, *range(8), long=True)
    taker, other = Reader(pair.medium), Reader(pair.medium, seed=67)
    contents = [listed.content for listed in (await taker.poll(pair.peers[0])).groups]
    statuses = []
    for _ in range(20):
        statuses += await taker.fetch(pair.peers[0], *contents[:4])
    assert 0 < statuses.count("ok") < 20
    assert statuses.count("busy") == 80 - statuses.count("ok")
    position = taker.position
    assert (await taker.poll(pair.peers[0])).status == "busy"
    assert taker.position == position
    assert "ok" in await other.fetch(pair.peers[0], contents[0])
    await trio.sleep(30)
    assert pair.admitted_of(1, 0) == 8
    assert "ok" in await taker.fetch(pair.peers[0], contents[0]), "half a minute later"
    assert pair.serving(0).served["busy"] >= statuses.count("busy") + 1


# -- demand


async def test_groups_arrive_before_the_trainer_has_ever_drawn(pair, autojump_clock):
    await pair.publish(0, *range(6))
    await trio.sleep(5)
    assert pair.admitted_of(1, 0) == 6
    assert len(pair.draw(1, 8, per_peer=8)) == 6


async def test_short_trainer_gets_new_groups_within_a_second(pair, autojump_clock):
    for step in range(5):
        pair.draw(1, 6, version=step)
        await trio.sleep(7)
        await pair.publish(0, step)
        await trio.sleep(1.5)
        assert pair.admitted_of(1, 0) == step + 1


async def test_groups_cross_a_node_that_does_not_train(nursery, autojump_clock):
    swarm = await PullSwarm(5).start(nursery)
    swarm.line()
    for sequence in range(400):  # the middle has long had what its first steps want
        await swarm.publish(0, sequence)
        if sequence % 6 == 0:
            swarm.draw(4, 6, version=sequence)
        await trio.sleep(5)
    assert all(swarm.admitted_of(number, 0) >= 150 for number in (1, 2, 3))
    came = swarm.admitted_of(4, 0)
    assert came >= 100
    newest = max(group.group.sequence for group in swarm.draw(4, 64, 400, 64))
    assert newest > 380, "and they are new when they arrive"


# -- what can go wrong with a listing or a fetch


@pytest.mark.parametrize(
    ("claims", "lie", "costs"),
    [
        ({"spread": 0.0}, "spread", False),
        ({"size": 2000}, "size", True),
        ({"author": b"\x07" * 32}, "author", True),
        ({"task": "builtin/none"}, "task", True),
        ({"created_at": int(EPOCH * 1000) - 5}, "age", True),
    ],
)
async def test_false_listing_costs_its_holder_only(lone, autojump_clock, claims, lie, costs):
    liar, honest = Holder(lone.medium), Holder(lone.medium, seed=78)
    for sequence in range(4):
        await liar.add(sequence, **claims)
        await honest.add(sequence)
    await trio.sleep((1 + 2 + 4) * FAILED_SECONDS + 30)
    assert lone.pulling(0).claims.faults == {lie: 4}
    assert lone.pulling(0).claims.confirmed == 4
    assert lone.admitted_of(0, honest.author) == lone.admitted_of(0, liar.author) == 4
    assert (lone.networks[0].score(liar.peer) < -25) is costs
    assert lone.networks[0].score(honest.peer) >= 0


@pytest.mark.parametrize(
    ("answer", "outcome", "costs"),
    [
        (ListingResponse("unknown", LIFE, 0, []), "other_swarm", False),
        (ListingResponse("busy", LIFE, 0, []), "busy", False),
        (b"\xc1" * 20, "malformed", True),
        (bytes(limits.LISTING_RESPONSE_BYTES + 1), "malformed", True),
        (PeerError("no"), "failed", False),
        (None, "timeout", False),
    ],
    ids=["other swarm", "busy", "garbage", "too long", "reset", "silent"],
)
async def test_every_poll_outcome_is_counted(nursery, autojump_clock, answer, outcome, costs):
    swarm = await PullSwarm(2).start(nursery)
    holder = Holder(swarm.medium)

    async def respond(peer, data):
        if answer is None:
            await trio.sleep_forever()
        if isinstance(answer, PeerError):
            raise answer
        return answer if isinstance(answer, bytes) else codec.encode(answer)

    holder.serve_listing(respond)
    await swarm.publish(0, *range(4))
    await trio.sleep(PATIENCE + ANSWER_SECONDS + 1)
    assert swarm.pulling(1).listings.keys() - {"unsupported"} == {"ok", outcome}
    assert swarm.admitted_of(1, 0) == 4
    assert (swarm.networks[1].score(holder.peer) < 0) is costs


async def test_forged_group_costs_author_and_holder(lone, autojump_clock):
    forger, holder = Author(SWARM, seed=76), Holder(lone.medium)
    group = forger.group(0, clock())
    forged = msgspec.structs.replace(group, task=msgspec.structs.replace(group.task, seed=9 << 20))
    await holder.add_frame(forger.frame(forged))
    await trio.sleep(5)
    assert lone.outcomes(0) == {"seed": 1}
    assert lone.networks[0].score(forger.peer) < 0
    assert lone.networks[0].score(holder.peer) < 0
    assert lone.pulling(0).claims.faults == {"content": 1}


async def test_a_group_that_is_stale_here_costs_nobody(nursery, autojump_clock):
    """It has aged while it was fetched, or its holder's clock differs."""
    swarm, author = PullSwarm(1), Author(SWARM, seed=76)
    holder = Holder(swarm.medium)
    await holder.add_frame(author.frame(author.group(0, EPOCH - limits.GROUP_AGE_SECONDS + 1)))

    async def later(peer, data):
        await trio.sleep(1.5)
        return await holder.give(peer, data)

    holder.serve_groups(later)
    await swarm.start(nursery)
    await trio.sleep(5)
    assert swarm.outcomes(0) == {"stale": 1}
    assert swarm.pulling(0).pulled == {"refused": 1}
    assert swarm.networks[0].score(holder.peer) == swarm.networks[0].score(author.peer) == 0


async def test_cancelling_leaves_nothing_behind(autojump_clock):
    with contextlib.suppress(trio.Cancelled):
        async with trio.open_nursery() as nursery:
            swarm = await PullSwarm(2, latency=50.0).start(nursery)
            await swarm.publish(0, 0)
            await trio.sleep(1)
            assert swarm.pulling(1).polled == 1
            nursery.cancel_scope.cancel()
    assert swarm.serving(0).waiting == 0


@pytest.fixture
async def line(nursery):
    """Three nodes, 0 and 2 connected through 1 only."""
    swarm = PullSwarm(3)
    swarm.line()
    return await swarm.start(nursery)


async def share(line, number, sequence, long=False):
    await line.publish(number, sequence, long=long)
    await trio.sleep(90)


def admitted(line):
    return [line.outcomes(number).get("admitted", 0) for number in range(3)]


async def test_with_budget_everything_travels_through_it(line, autojump_clock):
    await share(line, 0, 0)
    await share(line, 0, 1, long=True)
    assert admitted(line) == [0, 2, 2]


async def test_node_without_upload_budget_fetches_groups(line, autojump_clock):
    line.refused[1] = {"publish"}
    await share(line, 0, 0)
    assert admitted(line) == [0, 1, 0]
    assert line.exchanges[1].publish(line.authors[1].own_group(0)) == "budget"
    assert "busy" in line.serving(1).served
    assert "group" not in line.serving(1).served


async def test_node_without_download_budget_serves_own_groups(line, autojump_clock):
    line.refused[1] = {"fetch"}
    await trio.sleep(15)  # the poll that was under way
    await share(line, 0, 0)
    await share(line, 1, 0)
    assert admitted(line) == [1, 0, 1]


async def test_paused_node_resumes_after_the_pause(line, autojump_clock):
    line.refused[1] = {"publish", "fetch"}
    await trio.sleep(15)
    await share(line, 0, 0)
    assert admitted(line) == [0, 0, 0]
    line.refused[1] = set()
    await trio.sleep(90)
    assert admitted(line) == [0, 1, 1], "what was made during the pause is listed still"
    await share(line, 0, 1)
    assert admitted(line) == [0, 2, 2]


@pytest.mark.parametrize(
    ("offset", "ours_to_it", "its_to_us"),
    [
        (limits.CLOCK_SKEW_SECONDS - 5, "admitted", "admitted"),
        (limits.CLOCK_SKEW_SECONDS + 5, "admitted", "future"),
        (limits.GROUP_AGE_SECONDS + 5, "stale", "future"),
        (-limits.CLOCK_SKEW_SECONDS - 5, "future", "admitted"),
        (-limits.GROUP_AGE_SECONDS - 5, "future", "stale"),
        (86_400.0, "stale", "future"),
    ],
)
async def test_wrong_clock_costs_groups_but_no_reputation(
    nursery, autojump_clock, offset, ours_to_it, its_to_us
):
    swarm = await PullSwarm(2, skews=(0.0, offset)).start(nursery)
    for number in range(2):
        await swarm.publish(number, 0)
    await trio.sleep(10)
    assert (outcome(swarm, 1), outcome(swarm, 0)) == (ours_to_it, its_to_us)
    for number, expected in ((1, ours_to_it), (0, its_to_us)):
        assert len(swarm.draw(number, 4)) == (expected == "admitted")
        assert swarm.networks[number].score(swarm.peers[1 - number]) >= 0.0


def outcome(swarm, number):
    """Return the outcome of the one group on offer at node `number`."""
    outcomes = swarm.outcomes(number)
    (found,) = (reason for reason in ("admitted", "stale", "future") if outcomes.get(reason))
    return found

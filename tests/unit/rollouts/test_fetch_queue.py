import random

import pytest

from swarmnode.rollouts.fetch_queue import PAUSES, PENDING, PENDING_PEER, WORKERS, FetchQueue
from swarmnode.rollouts.groups import Announced

DEADLINE = 14.0
"""Seconds that a group of 1 MiB is waited for."""
HALF = PENDING // 2


class World:
    """A queue, its workers, and a clock that is set by hand. known: peers of whom a group was
    admitted."""

    def __init__(self, *known):
        self.known = set(known)
        self.connected = set()
        self.now, self.made, self.held = 0.0, 0, []
        self.queue = FetchQueue(self.known.__contains__, lambda: self.connected, random.Random(1))

    def announce(self, author, forwarder=""):
        """Returns whose group found no room. forwarder: where we are not connected with the
        author."""
        self.made += 1
        self.connected.add(forwarder or author)
        out = self.queue.put(
            Announced(self.made.to_bytes(32), 2**20, author, self.made, 0), forwarder or author
        )
        return out.peer if out else None

    def take(self):
        """Give all workers something to do. Returns whom they ask."""
        while len(self.held) < WORKERS and (wanted := self.queue.take(self.now)) is not None:
            self.held.append((self.now + DEADLINE, wanted))
        return [wanted.source for _, wanted in self.held]

    def answer(self, outcome, *sources):
        """Of these, or of all that are asked. Returns how many answers were final."""
        answered = [each for each in self.held if not sources or each[1].source in sources]
        self.held = [each for each in self.held if each not in answered]
        return sum(self.queue.answered(wanted, outcome, self.now) for _, wanted in answered)

    def run(self, seconds, hostile, honest):
        """hostile(n), honest(n): announce in half second n. Those never answer, these at once.
        Returns who gave something."""
        gave = []
        for number in range(int(seconds * 2)):
            hostile(number)
            honest(number)
            while answering := [source for source in self.take() if source.startswith("honest")]:
                gave += answering
                self.answer("ok", *answering)
            for until, wanted in list(self.held):
                if until <= self.now:
                    self.held.remove((until, wanted))
                    self.queue.answered(wanted, "fetch_timeout", self.now)
            self.now += 0.5
        return gave


def test_strangers_have_half_of_the_list_and_of_the_workers():
    world = World("known")
    for number in range(1000):
        world.announce(f"stranger {number}")
    assert len(world.queue) == HALF
    for _ in range(PENDING_PEER):
        assert world.announce("known") is None
    assert world.announce("known") == "known", "eight of one author"
    assert world.announce("stranger") is not None
    asked = world.take()
    assert sorted(asked)[0] == "known"
    assert len(asked) == WORKERS // 2
    assert len(world.queue) == HALF + PENDING_PEER


def test_who_is_known_takes_what_strangers_leave_and_no_more_than_their_half_in_need():
    world = World(*(f"known {n}" for n in range(20)))
    for number in range(20 * PENDING_PEER):
        world.announce(f"known {number % 20}")
    assert len(world.queue) == PENDING
    assert len(set(world.take())) == WORKERS
    outs = [world.announce(f"stranger {number}") or "" for number in range(HALF)]
    assert [out.startswith("known") for out in outs] == [
        number >= WORKERS for number in range(HALF)
    ]
    world.answer("ok")
    assert sum(source.startswith("stranger") for source in world.take()) == WORKERS // 2 - 1


@pytest.mark.parametrize("forwarders", [0, 4])
def test_keys_without_end_that_never_give_keep_nobody_out_for_good(forwarders):
    """Two a second, each connected for itself, or all brought by four neighbours of ours."""
    world = World("honest known")
    hostile = lambda n: world.announce(
        f"key {n}", f"neighbour {n % forwarders}" if forwarders else ""
    )
    honest = lambda n: (
        n % 60 or [world.announce(author) for author in ("honest known", "honest new")]
    )
    gave = world.run(600, hostile, honest)
    assert gave.count("honest known") == 20
    assert gave.count("honest new") >= (19 if forwarders else 1)


def test_keys_that_have_failed_hold_up_nobody():
    world = World()
    hostile = lambda n: world.announce(f"key {n % 16}")
    world.run(120, hostile, lambda n: None)
    gave = world.run(210, hostile, lambda n: n % 60 or world.announce("honest"))
    assert len(gave) == 7


def test_who_failed_has_one_group_pending_and_one_worker_with_all_others_that_did():
    world = World()
    for peer in "abc":
        world.announce(peer)
    world.take()
    world.answer("fetch_timeout")
    assert [world.announce(peer) for peer in "abcabc"] == [None, None, None, "a", "b", "c"]
    world.announce("d")
    assert len(world.take()) == 2
    assert "d" in world.take()
    world.answer("ok")
    (good,) = world.take()
    world.answer("ok")
    assert [world.announce(good) for _ in range(2)] == [None, None], "forgiven"


def test_who_is_known_and_failed_once_is_a_stranger():
    world = World("known")
    for outcome in ("fetch_timeout", "ok", "fetch_timeout", "fetch_timeout"):
        world.announce("known")
        world.take()
        world.answer(outcome)
    assert [world.announce("known") for _ in range(2)] == [None, "known"]


def test_failures_are_of_whom_was_asked():
    world = World()
    world.announce("author", "forwarder")
    assert world.take() == ["forwarder"]
    world.answer("fetch_timeout")
    assert [world.announce("author") for _ in range(2)] == [None, None]
    assert [world.announce(author, "forwarder") for author in "xy"] == [None, "y"]


def test_one_line_is_asked_for_one_at_a_time_and_the_longest_gives_way():
    world = World()
    for number in range(HALF):
        world.announce(f"key {number}", "neighbour")
    assert world.take() == ["neighbour"]
    for number in range(HALF):
        out = world.announce(f"new {number % 8}")
        assert out is None or out.startswith("key") or number > HALF // 2
    assert set(world.take()) > {"neighbour"}


def test_who_gives_no_more_for_now_rests_and_holds_no_worker():
    world = World()
    for _ in range(2):
        world.announce("author")
    for pause in PAUSES["fetch_busy"]:
        assert world.take() == ["author"]
        assert world.answer("fetch_busy") == 0
        assert world.take() == []
        assert world.queue.wait(world.now) == pause
        world.announce("other")
        assert world.take() == ["other"]
        world.answer("ok")
        world.now += pause
    world.take()
    assert world.answer("fetch_busy") == 1
    assert world.take() == ["author"], "the other group"


def test_missing_groups_are_retried_at_forwarders_but_not_at_authors():
    world = World()
    world.announce("author")
    world.announce("far", "forwarder")
    world.take()
    assert world.answer("fetch_unknown") == 1
    for pause in PAUSES["fetch_unknown"]:
        assert world.take() == []
        world.now += pause
        assert world.take() == ["forwarder"]
        assert world.answer("fetch_unknown") == (pause == PAUSES["fetch_unknown"][-1])
    assert len(world.queue) == 0
    assert [world.announce("far", "forwarder") for _ in range(2)] == [
        None,
        None,
    ], "it may never have had it"


def test_failures_are_few_and_of_few(monkeypatch):
    monkeypatch.setattr("swarmnode.rollouts.trust.MAX_PEERS", 16)
    world = World()
    for number in range(100):
        world.announce(f"key {number % 20}")
        world.take()
        world.answer("fetch_timeout")
    assert [world.announce("key 19") for _ in range(2)] == [None, "key 19"]
    assert [world.announce("key 0") for _ in range(2)] == [None, None], "forgotten"

"""The trio client: many callers, cancelled callers, lost children."""

import os
import signal
import threading

import psutil
import pytest
import trio

from swarmnode.tasks import child as child_module
from swarmnode.tasks.client import AsyncScorer, Scorer, ScorerFailed, ScorerLimits, TaskUnknown
from tests.support.fakes.scorer import score_one
from tests.support.one_turn import ONE_TURN_TASKS
from tests.support.registered import ref


@pytest.fixture(scope="module")
def expected():
    """Results of the blocking client, by (task, index)."""
    keys = [(task, index) for task in ONE_TURN_TASKS for index in range(30)]
    with Scorer() as scorer:
        return dict(
            zip(
                keys,
                scorer.score_many([(ref(task, index), ["7", "10"]) for task, index in keys]),
                strict=True,
            )
        )


async def test_many_questions_at_once_and_one_unknown(expected):
    items = [(ref(task, index), ["7", "10"]) for task, index in expected]
    items[5] = (ref(version="?"), [])
    async with AsyncScorer() as scorer:
        results = await scorer.score_many(items)
    wanted = list(expected.values())
    assert isinstance(results[5], TaskUnknown)
    assert results[:5] + results[6:] == wanted[:5] + wanted[6:]


async def test_cancelled_callers_do_not_shift_answers(expected):
    found = {}

    async def ask(scorer, task, index):
        found[task, index] = await score_one(scorer, ref(task, index), ["7", "10"])

    async with AsyncScorer() as scorer:
        for _ in range(3):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    for index in range(200):
                        nursery.start_soon(score_one, scorer, ref(index=index), ["1"])
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
            async with trio.open_nursery() as nursery:
                for task, index in expected:
                    nursery.start_soon(ask, scorer, task, index)
            assert found == expected
            found.clear()
        told = scorer.statistics()
        assert (told.starts, told.waiting) == (1, 0)
        assert told.frames < 3 * len(expected) / 8, "callers share frames"


async def test_questions_wait_while_the_child_is_replaced(expected):
    async with AsyncScorer() as scorer:
        await score_one(scorer, ref())
        # it hangs with the first frame, the others queue behind it
        os.kill(scorer.statistics().pid, signal.SIGSTOP)
        found = {}

        async def ask(task, index):
            found[task, index] = await score_one(scorer, ref(task, index), ["7", "10"])

        async with trio.open_nursery() as nursery:
            for task, index in expected:
                nursery.start_soon(ask, task, index)
            await trio.testing.wait_all_tasks_blocked()
            assert scorer.statistics().waiting > 200
            os.kill(scorer.statistics().pid, signal.SIGKILL)
        assert found == expected
        assert scorer.statistics().failures == 1


async def test_a_child_that_hangs_is_replaced_after_the_deadline(expected):
    async with AsyncScorer(ScorerLimits(request=0.5)) as scorer:
        await score_one(scorer, ref())
        os.kill(scorer.statistics().pid, signal.SIGSTOP)
        assert await score_one(scorer, ref(), ["7", "10"]) == expected["builtin/sum", 0]
        assert "no answer within 0.5 s" in scorer.statistics().last_failure


async def test_failed_start_is_retried(monkeypatch):
    monkeypatch.setattr(child_module.sys, "executable", "/bin/false")
    async with AsyncScorer() as scorer:
        with pytest.raises(ScorerFailed, match="did not start"):
            await score_one(scorer, ref())
        monkeypatch.undo()
        assert (await score_one(scorer, ref())).prompt.endswith("=")


async def test_closed_scorer_fails_its_questions():
    scorer = AsyncScorer()
    outcomes = []

    async def ask(index):
        try:
            await score_one(scorer, ref(index=index), [])
        except ScorerFailed:
            outcomes.append(index)

    async with trio.open_nursery() as callers:
        async with trio.open_nursery() as home:
            await home.start(scorer.run)
            await score_one(scorer, ref())
            os.kill(scorer.statistics().pid, signal.SIGSTOP)
            for index in range(100):
                callers.start_soon(ask, index)
            await trio.testing.wait_all_tasks_blocked()
            home.cancel_scope.cancel()  # 64 questions are with the child, 36 in the queue
    assert sorted(outcomes) == list(range(100))
    with pytest.raises(ScorerFailed, match="not running"):
        await score_one(scorer, ref())


async def test_cancelling_the_body_ends_every_child():
    before = {process.pid for process in psutil.Process().children()}
    with trio.CancelScope() as scope:
        async with AsyncScorer() as scorer:
            await score_one(scorer, ref())
            os.kill(scorer.statistics().pid, signal.SIGKILL)
            await score_one(scorer, ref())
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert {process.pid for process in psutil.Process().children()} == before


async def test_the_child_outlives_trios_worker_threads(monkeypatch):
    """Linux sends the parent-death signal when the *thread* that made a process ends, and trio
    would make processes in worker threads."""
    makers = []

    class Popen(child_module.subprocess.Popen):
        def __init__(self, *args, **options):
            makers.append(threading.current_thread())
            super().__init__(*args, **options)

    monkeypatch.setattr(child_module.subprocess, "Popen", Popen)
    async with AsyncScorer() as scorer:
        await score_one(scorer, ref())
    assert makers == [threading.current_thread()]

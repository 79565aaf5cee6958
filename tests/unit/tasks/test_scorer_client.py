"""The blocking client: a failed child is replaced, and only the question that caused the failure
has no result."""

import gc
import os
import select
import signal
import subprocess
import sys
import threading

import msgspec
import psutil
import pytest

from swarmnode.tasks import child as child_module
from swarmnode.tasks.child import Child, ScorerDied
from swarmnode.tasks.client import Scored, Scorer, ScorerFailed, ScorerLimits, TaskUnknown
from tests.support.one_turn import ONE_TURN_TASKS
from tests.support.registered import ref


def children():
    return {process.pid for process in psutil.Process().children()}


@pytest.fixture
def scorer():
    before = children()
    with Scorer() as scorer:
        yield scorer
    assert children() == before  # neither running nor a zombie


def test_many_questions_come_back_in_order_over_several_frames(scorer):
    refs = [ref(task, index) for index in range(20) for task in ONE_TURN_TASKS]
    many = scorer.score_many([(r, ["7"]) for r in refs])
    assert many == [scorer.score(r, ["7"]) for r in refs]
    assert scorer.statistics().groups == 2 * len(refs)
    assert scorer.statistics().frames < 1.1 * len(refs)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"id": "rg/countdown"}, "task"),
        ({"id": "\x00"}, "task"),
        ({"version": "0" * 16}, "version"),
        ({"seed": 2**63}, "address"),
        ({"index": -1}, "address"),
    ],
)
def test_unknown_question_is_reported(scorer, changes, reason):
    with pytest.raises(TaskUnknown) as caught:
        scorer.score(msgspec.structs.replace(ref(), **changes), ["1"])
    assert caught.value.reason == reason
    assert scorer.statistics().unknown == 1


def test_too_many_completions_are_the_callers_mistake(scorer):
    with pytest.raises(ValueError, match="65 completions"):
        scorer.score(ref(), [""] * 65)


def test_a_killed_child_is_replaced_and_the_question_answered(scorer):
    expected = scorer.score(ref(), ["7"])
    before = scorer.statistics().pid
    os.kill(before, signal.SIGKILL)
    assert scorer.score(ref(), ["7"]) == expected
    statistics = scorer.statistics()
    assert statistics.pid != before
    assert (statistics.starts, statistics.failures) == (2, 1)
    assert "ended by SIGKILL" in statistics.last_failure


def test_a_question_that_always_overruns_is_given_up(monkeypatch):
    ask = Child.ask

    def stopped(self, questions):
        os.kill(self.pid, signal.SIGSTOP)
        return ask(self, questions)

    monkeypatch.setattr(Child, "ask", stopped)
    with Scorer(ScorerLimits(request=0.2)) as scorer:
        with pytest.raises(ScorerFailed, match=r"no answer within 0\.2 s; killed by its client"):
            scorer.score(ref(), ["7"])
        assert scorer.statistics().failures == 2


def test_only_the_fatal_question_has_no_result(scorer, monkeypatch):
    """No allowed scorer can be made to die, so the death is staged: the child is killed whenever it
    gets to question 3."""
    ask = Child.ask

    def deadly(self, questions):
        if any(question.index == 3 for question in questions):
            os.kill(self.pid, signal.SIGKILL)
        return ask(self, questions)

    expected = scorer.score_many([(ref(index=index), ["7"]) for index in range(6)])
    monkeypatch.setattr(Child, "ask", deadly)
    results = scorer.score_many([(ref(index=index), ["7"]) for index in range(6)])
    assert isinstance(results[3], ScorerFailed)
    assert results[:3] + results[4:] == expected[:3] + expected[4:]


def test_invalid_response_is_refused(scorer, monkeypatch):
    monkeypatch.setattr(child_module.frames, "decode_scored", lambda body: [Scored("?", [2.0])])
    with pytest.raises(ScorerFailed, match="does not fit"):
        scorer.score(ref(), ["7"])


def test_end_of_standard_error_is_kept(scorer):
    with scorer._lock:
        body = b"\xc1" * 10
        client = scorer._client
        os.write(client.child._stdin.fileno(), len(body).to_bytes(4, "big") + body)
        with pytest.raises(ScorerDied):
            child_module.converse(client._within(10, client.child._receive()))
        words = client.end()
    assert words.startswith("exit status 1: Traceback")
    assert len(words) < child_module.STDERR_BYTES + 100


def test_failed_start_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(child_module, "_ROOT", tmp_path)
    monkeypatch.setattr(child_module.sys, "executable", "/bin/false")
    before = children()
    scorer = Scorer()
    with pytest.raises(ScorerFailed, match="did not start"):
        scorer.score(ref(), [])
    assert all(
        isinstance(result, ScorerFailed)
        for result in scorer.score_many([(ref(), []), (ref(index=1), [])])
    )
    assert children() == before


def test_closed_scorer_starts_again():
    scorer = Scorer()
    scorer.close()
    prompt = scorer.score(ref(), []).prompt
    scorer.close()
    scorer.close()
    assert scorer.score(ref(), []).prompt == prompt
    scorer.close()


def test_threads_share_one_child(scorer):
    expected = {index: scorer.score(ref(index=index), ["7"]) for index in range(40)}
    found = {}

    def work(start):
        for index in range(start, 40, 4):
            found[index] = scorer.score(ref(index=index), ["7"])

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_a_fork_leaves_its_parents_child_alone():
    code = """
import os, sys
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import task_version
from swarmnode.wire.messages import TaskRef
ref = TaskRef("builtin/sum", task_version("builtin/sum"), 0, 0)
with Scorer() as scorer:
    prompt, pid = scorer.score(ref, []).prompt, scorer.statistics().pid
    if (fork := os.fork()) == 0:
        same = scorer.score(ref, []).prompt == prompt and scorer.statistics().pid != pid
        scorer.close()
        os._exit(0 if same else 3)
    assert os.waitpid(fork, 0)[1] == 0
    assert scorer.score(ref, []).prompt == prompt
    assert scorer.statistics().pid == pid and scorer.statistics().failures == 0
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="parent death is signalled by Linux only")
def test_a_child_does_not_outlive_its_killed_client():
    code = """
import time
from swarmnode.tasks.client import Scorer
scorer = Scorer().__enter__()
print(scorer.statistics().pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as client:
        descriptor = os.pidfd_open(int(client.stdout.readline()))
        client.kill()
        assert select.select([descriptor], [], [], 10)[0]  # readable when the process has ended
        os.close(descriptor)


def test_no_descriptor_is_left_behind():
    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with Scorer() as scorer:
        for _ in range(3):
            os.kill(scorer.statistics().pid, signal.SIGKILL)
            scorer.score(ref(), [])
    assert descriptors() == before

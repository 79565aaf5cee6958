from __future__ import annotations

import json
import os

import msgspec

from swarmnode.link.messages import Report
from swarmnode.observe.watch import SupervisorWatch, TrainerWatch, process_use


def written(restarts: int) -> str:
    return json.dumps({"restarts": {"trainer": restarts}, "later": 1})


def test_a_step_is_observed_once() -> None:
    watch = TrainerWatch()
    for step, phase in (
        (1, "training"),
        (1, "evaluating"),
        (2, "training"),
        (1, "loading"),
        (2, "training"),
    ):
        watch.report(Report(phase=phase, step=step, step_seconds=0.3), now=float(step))
    steps = watch.statistics(now=2.0).step_seconds
    assert steps is not None
    # the second step was lost and repeated
    assert (sum(steps.counts), round(steps.sum, 6)) == (3, 0.9)


def test_recent_means_skip_what_a_step_did_not_measure() -> None:
    watch = TrainerWatch()
    for step in range(1, 13):
        external = 0.5 if step < 12 else None
        report = Report("training", step=step, step_seconds=1.0, reward_own=float(step == 12))
        later = 3600.0 if step == 12 else 0.0  # quiet hours before the last step
        watch.report(msgspec.structs.replace(report, reward_external=external), 1.5 * step + later)
    recent = watch.statistics(0.0).recent
    assert recent == {
        "reward_own": 0.1,
        "reward_external": 0.5,
        "step_seconds": 1.0,
        "interval_seconds": 1.5,
    }
    watch.report(Report("training", step=3), now=0.0)
    assert watch.statistics(0.0).recent == {}, "an earlier state was restored"


def test_a_report_ages_and_outlives_its_connection() -> None:
    watch = TrainerWatch()
    watch.connected(pid=7)
    watch.report(Report(phase="training", step=4), now=10.0)
    watch.disconnected()
    view = watch.statistics(now=25.0)
    assert (view.connected, view.age_seconds, view.pid) == (False, 15.0, None)
    assert view.report is not None
    assert view.report.step == 4


def test_invalid_step_times_are_not_counted() -> None:
    watch = TrainerWatch()
    for step, seconds in enumerate((float("nan"), float("inf"), -1.0), start=1):
        watch.report(Report(phase="training", step=step, step_seconds=seconds), now=0.0)
    steps = watch.statistics(now=0.0).step_seconds
    assert steps is not None
    assert sum(steps.counts) == 0


def test_a_supervisor_file_is_read_again(tmp_path) -> None:
    path = tmp_path / "supervisor.json"
    watch = SupervisorWatch(path)
    assert watch.read().restarts == {}
    path.write_text(written(restarts=1))
    assert watch.read().restarts == {"trainer": 1}
    path.write_text(written(restarts=3))
    assert watch.read().restarts == {"trainer": 3}


def test_a_broken_supervisor_file_keeps_the_last_view(tmp_path) -> None:
    path = tmp_path / "supervisor.json"
    watch = SupervisorWatch(path)
    path.write_text(written(restarts=1))
    before = watch.read()
    for broken in ("", "{", '{"restarts": 3}', "[" * 5000):
        path.write_text(broken)
        assert watch.read() == before


def test_process_use_omits_ended_processes() -> None:
    use = process_use({"network": os.getpid(), "trainer": None, "scorer": 2**22 + 1})
    assert list(use) == ["network"]
    assert use["network"].memory_bytes > 2**20

from __future__ import annotations

from itertools import pairwise

import msgspec

from swarmnode.link.messages import Report
from swarmnode.observe.health import policy_loaded, ready, troubles
from swarmnode.observe.history import History
from swarmnode.observe.snapshot import Health, NodeSnapshot
from swarmnode.observe.watch import DiskStatistics, SupervisorStatistics, TrainerStatistics
from swarmnode.p2p.network import NetworkStatistics
from swarmnode.p2p.summaries import SummaryStatistics
from swarmnode.rollouts.network.admission import AdmissionStatistics
from swarmnode.rollouts.network.exchange import ExchangeStatistics
from swarmnode.stages.network.crew_service import StagesStatistics
from swarmnode.stages.network.crew_state import CrewStatistics
from swarmnode.tasks.child import ScorerStatistics
from tests.support.snapshots import STARTED_AT, example, example_at

replace = msgspec.structs.replace


def test_example_has_no_problems() -> None:
    assert ready(example()).ok
    assert troubles(example()) == []


def test_a_lone_node_is_ready() -> None:
    assert ready(NodeSnapshot(health=Health(policy_loaded=True))).ok


def test_a_draining_node_is_not_ready() -> None:
    verdict = ready(replace(example(), health=Health(policy_loaded=True, draining=True)))
    assert verdict.reasons == ["draining"]


def test_missing_peers_are_reported_after_a_minute() -> None:
    alone = NetworkStatistics()
    assert troubles(replace(example_at(30.0), network=alone)) == []
    assert troubles(replace(example_at(90.0), network=alone)) == [
        "no peers connected and none known"
    ]
    unshared = replace(example().node, sharing=False)
    assert troubles(replace(example_at(90.0), network=alone, node=unshared)) == []


def test_clock_difference_is_reported_in_both_directions() -> None:
    def at(offset: float | None) -> list[str]:
        return troubles(replace(example(), swarm=SummaryStatistics(clock_offset_seconds=offset)))

    assert at(95.0) == ["this clock is 95 s behind those of most peers"]
    assert at(-95.0) == ["this clock is 95 s ahead of those of most peers"]
    assert at(29.0) == at(None) == []


def test_clock_set_back_hides_no_problem() -> None:
    s = example()
    lonely = replace(s.network, peers=replace(s.network.peers, connected=0))
    for day in (86_400.0, -86_400.0):
        moved = replace(s, at=s.node.started_at + day, network=lonely)
        assert troubles(moved) == ["no peers connected"]


def test_full_disk_is_judged_by_share_and_bytes() -> None:
    def left(free: int, total: int) -> bool:
        return any(
            "disk" in trouble
            for trouble in troubles(replace(example(), disk=DiskStatistics(free, total)))
        )

    assert left(2**30, 100 * 2**30)
    assert not left(20 * 2**30, 4096 * 2**30)  # a small share of much
    assert not left(2**30, 10 * 2**30)  # a small disk as it was
    assert troubles(replace(example(), disk=DiskStatistics())) == []


def test_a_failed_save_is_reported_with_its_error() -> None:
    s = example()
    report = replace(s.trainer.report, state_error="No space left on device")
    assert troubles(replace(s, trainer=replace(s.trainer, report=report))) == [
        "the trainer's state is not saved: No space left on device"
    ]


def test_silent_trainer_is_reported_by_step_time() -> None:
    def after(age: float, step_seconds: float) -> list[str]:
        report = replace(example().trainer.report, phase="training", step_seconds=step_seconds)
        return troubles(
            replace(
                example(), trainer=TrainerStatistics(connected=True, report=report, age_seconds=age)
            )
        )

    assert after(100.0, 40.0) == []
    assert after(100.0, 2.0) == ["the trainer has reported nothing for 100 s"]


def test_a_long_first_step_or_evaluation_is_no_silence() -> None:
    for phase in ("evaluating", "generating"):
        report = Report(phase)
        trainer = TrainerStatistics(connected=True, report=report, age_seconds=300.0)
        assert troubles(replace(example(), trainer=trainer)) == []


def test_quiet_hours_say_until_when() -> None:
    s = example()
    budget = replace(s.budget, paused={"quiet_hours": True})
    node = replace(s.node, quiet_hours="22:00-07:00")
    assert troubles(replace(s, budget=budget, node=node)) == [
        "quiet hours until 07:00: no training and no sharing"
    ]


def test_few_rejections_are_not_reported() -> None:
    def rejecting(count: int, received: int) -> list[str]:
        admission = AdmissionStatistics(rejected={"signature": count})
        return troubles(
            replace(example(), rollouts=ExchangeStatistics(received=received, admission=admission))
        )

    assert rejecting(10, 10) == []
    assert rejecting(40, 100) == []
    assert rejecting(60, 100) == [
        "most groups from peers are rejected: their signature is not valid in this swarm"
    ]


def test_history_covers_the_whole_life_in_bounded_memory() -> None:
    history = History(capacity=100)
    for second in range(1000):
        history.add(replace(example(), at=STARTED_AT + second))
    at = history.columns()["at"]
    assert 50 <= len(at) <= 100
    assert at[0] == STARTED_AT
    assert at[-1] > STARTED_AT + 980
    gaps = {round(b - a) for a, b in pairwise(at)}
    assert gaps == {16}


def test_history_returns_the_requested_points_with_the_newest() -> None:
    history = History()
    for second in range(301):
        history.add(example_at(float(second)))
    columns = history.columns(points=50)
    assert {len(column) for column in columns.values()} == {43}
    assert columns["at"][-1] == STARTED_AT + 300


def test_history_continues_after_a_restart_with_a_gap(tmp_path) -> None:
    before, after = History(), History()
    for second in range(100):
        before.add(example_at(float(second)))
    before.save(tmp_path)
    after.load(tmp_path)
    after.add(example_at(160.0))
    columns = after.columns()
    assert [len(columns["at"]), columns["at"][0], columns["at"][-1]] == [
        102,
        STARTED_AT,
        STARTED_AT + 160,
    ]
    assert columns["reward_held_out"][99] is not None
    assert columns["reward_held_out"][100] is None
    assert columns["reward_held_out"][101] is not None
    assert columns["at"] == sorted(columns["at"])


def test_loaded_history_stays_bounded(tmp_path) -> None:
    full, after = History(capacity=50), History(capacity=50)
    for second in range(300):
        full.add(example_at(float(second)))
    full.save(tmp_path)
    after.load(tmp_path)
    assert len(after.columns()["at"]) <= 50
    text, still = (
        b'{"interval": 1.0, "columns": ["at"], "rows": [["x"]]}',
        b'{"interval": 0.0, "columns": ["at"], "rows": [[1]]}',
    )
    for broken in (b"", b"{", b"[]", text, still):
        (tmp_path / "log" / "history.json").write_bytes(broken)
        fresh = History()
        fresh.load(tmp_path)
        assert fresh.columns()["at"] == []


def test_a_stopped_crew_and_a_lost_stage_are_reported() -> None:
    stages = example().stages

    def reasons(changed: StagesStatistics) -> list[str]:
        return troubles(replace(example(), stages=changed))

    assert reasons(replace(stages, crew=replace(stages.crew, stopped_seconds=30.0))) == []
    standing = replace(stages.crew, stopped_seconds=31.0, state="preparing")
    assert reasons(replace(stages, crew=standing)) == ["the crew has taken no step for 31 s"]
    failed = replace(stages.own, phase="failed", reason="gate: KL 0.4")
    assert reasons(replace(stages, own=failed)) == [
        "this node's stage could not be restored: gate: KL 0.4"
    ]


def test_node_without_a_crew_reports_the_reason() -> None:
    stages = example().stages

    def reasons(changed: StagesStatistics) -> list[str]:
        health = Health(policy_loaded=False)
        return ready(replace(example(), health=health, stages=changed)).reasons

    assert reasons(replace(stages, crew=CrewStatistics(), own=None)) == [
        "waits for other nodes to form a crew"
    ]
    assert reasons(replace(stages, own=replace(stages.own, phase="loading"))) == [
        "its stage is not loaded yet"
    ]
    assert reasons(replace(stages, enabled=False)) == ["the policy is not loaded yet"]
    loading = SupervisorStatistics(loading={"trainer": "loading, trying the policy"})
    snapshot = replace(example(), health=Health(policy_loaded=False), supervisor=loading)
    assert ready(replace(snapshot, stages=replace(stages, enabled=False))).reasons == [
        "the policy is not loaded yet: loading, trying the policy"
    ]


def test_node_is_ready_once_stage_or_policy_is_loaded() -> None:
    stages, alone = example().stages, StagesStatistics()
    assert policy_loaded(None, stages)  # only the head reports
    assert policy_loaded(None, replace(stages, own=replace(stages.own, phase="active")))
    assert not policy_loaded(
        Report(phase="generating"), replace(stages, own=replace(stages.own, phase="loading"))
    )
    # the node was a head, and its crew has ended
    assert not policy_loaded(Report(phase="generating"), replace(stages, own=None))
    assert policy_loaded(Report(phase="generating"), alone)
    assert not policy_loaded(Report(phase="loading"), alone)
    assert not policy_loaded(None, alone)


def test_failing_reward_is_reported_with_the_last_error() -> None:
    ours = replace(
        example(),
        scorer=ScorerStatistics(
            reward_errors={"own/a": 2}, last_reward_error="own/a: ZeroDivisionError"
        ),
    )
    assert troubles(ours) == [
        "the reward failed for 2 completions, which count as 0; the last error: own/a:"
        " ZeroDivisionError"
    ]
    report = replace(
        example().trainer.report,
        reward_errors={"own/b": 1},
        last_reward_error="own/b: KeyError: 'x'",
    )
    theirs = replace(ours, trainer=replace(ours.trainer, report=report))
    assert troubles(theirs) == [
        "the reward failed for 3 completions, which count as 0; the last error: own/b:"
        " KeyError: 'x'"
    ]


def test_cut_answers_with_a_full_reward_are_reported() -> None:
    for share, expected in ((0.2, []), (0.25, ["25% of the answers are cut and earn 1"])):
        recent = {"cut_rewarded_share": share}
        s = replace(example(), trainer=replace(example().trainer, recent=recent))
        assert [trouble[:37] for trouble in troubles(s)] == expected


def test_refusals_of_the_sandbox_are_reported() -> None:
    scorer = replace(example().scorer, refusals={"own/a": 2}, last_refusal="own/a: import x")
    (trouble,) = troubles(replace(example(), scorer=scorer))
    assert "refused 2 actions" in trouble
    assert "the last: own/a: import x" in trouble


def test_answers_that_are_all_cut_are_reported() -> None:
    for share, expected in ((0.9, []), (0.95, ["95% of the answers are cut"])):
        recent = {"completion_cut_share": share}
        s = replace(example(), trainer=replace(example().trainer, recent=recent))
        assert [trouble[:26] for trouble in troubles(s)] == expected


def test_the_reason_of_a_missing_trainer_is_reported() -> None:
    s = example()
    supervisor = replace(s.supervisor, down={"trainer": "KeyError: 'x' (exit code 1)"})
    gone = replace(s, trainer=replace(s.trainer, connected=False), supervisor=supervisor)
    assert troubles(gone)[0] == "the trainer is not connected: KeyError: 'x' (exit code 1)"
    report = replace(s.trainer.report, phase="draining")
    assert troubles(replace(gone, trainer=replace(gone.trainer, report=report))) == [], "it stops"
    never = replace(gone, health=Health(), stages=replace(s.stages, enabled=False))
    assert ready(never).reasons == [
        "the policy is not loaded yet",
        "the trainer ended: KeyError: 'x' (exit code 1)",
    ]


def test_unused_server_is_reported_with_its_reason() -> None:
    well = example()
    report = well.trainer.report
    assert report is not None
    assert report.server is not None
    server = replace(report.server, state="away", reason="/health answers 500: EngineCore died")
    away = replace(well, trainer=replace(well.trainer, report=replace(report, server=server)))
    assert troubles(away) == [
        "the vLLM server at http://127.0.0.1:8000 does not sample, this node's engine does:"
        " /health answers 500: EngineCore died"
    ]

from __future__ import annotations

import json

from msgspec.structs import replace

from swarmnode import cli
from swarmnode.observe.address import NodeAddress
from swarmnode.observe.history import History
from swarmnode.observe.http import status_json
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.observe.status import print_status, render, watch_status
from swarmnode.observe.watch import SupervisorStatistics
from tests.support.answering import serving, whole
from tests.support.snapshots import PEERS, example, status_of


def drawn(snapshot: NodeSnapshot) -> str:
    return render(status_of(snapshot))


def test_shows_the_main_numbers() -> None:
    shown = drawn(example())
    for expected in ("kitchen-3090", "ready", "0.631", "250", PEERS[0][-6:], "rejected"):
        assert expected in shown


def test_renders_an_empty_node() -> None:
    shown = drawn(NodeSnapshot())
    assert "the policy is not loaded yet" in shown
    assert "0 connected" in shown


def test_shows_step_pace_and_time_left() -> None:
    s = example()
    assert "step 250 of 1\u202f000 · 2.40 s per step · 30 min left · generating" in drawn(s)
    assert "policy version 250 · restarts 1" in drawn(s)
    report = replace(s.trainer.report, activity="evaluating 64 of 256", phase="evaluating")
    report = replace(report, max_steps=0, reward_held_out_step=160)
    shown = drawn(replace(s, trainer=replace(s.trainer, report=report)))
    assert "step 250 · 2.40 s per step · evaluating 64 of 256" in shown
    assert "held-out reward 0.631 ± 0.021 at step 160, 90 steps old" in shown


def test_shows_what_a_starting_trainer_does() -> None:
    supervisor = SupervisorStatistics(loading={"trainer": "loading, trying the policy, 2 of 5"})
    shown = drawn(NodeSnapshot(supervisor=supervisor))
    assert "loading, trying the policy, 2 of 5" in shown
    assert "no trainer" not in shown
    assert "not measured" not in shown, "the saved state is not loaded yet"


def test_status_exit_code_is_the_verdict(capsys) -> None:
    for snapshot, code in ((example(), 0), (NodeSnapshot(), 1)):
        with serving(whole(status_json(snapshot, History()))) as url:
            assert print_status(NodeAddress(url), as_json=True) == code
        assert json.loads(capsys.readouterr().out)["ready"]["ok"] == (code == 0)


def test_watch_continues_while_the_node_does_not_answer(capsys, monkeypatch) -> None:
    pauses = iter((None, None, KeyboardInterrupt))

    def sleep(_: float) -> None:
        if (end := next(pauses)) is not None:
            raise end

    monkeypatch.setattr("swarmnode.observe.status.time.sleep", sleep)
    status = status_json(example(), History())
    answers = map(whole, (status, b"{}", status))
    with serving(lambda to: next(answers)(to)) as url:
        assert watch_status(NodeAddress(url)) == 0
    shown = capsys.readouterr().out
    assert shown.count("kitchen-3090: ready") == 2
    assert "is not a swarmnode" in shown


def test_reports_a_node_of_another_directory(tmp_path, capsys) -> None:
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "addresses.json"
    with serving(whole(status_json(example(), History()))) as url:
        for peer, code in ((example().node.peer, 0), ("12D3KooWAnother", 69)):
            file.write_text(json.dumps({"peer": peer, "addrs": [], "http": url}))
            assert cli.run(["status", "-d", str(tmp_path)]) == code
    shown = capsys.readouterr()
    assert "kitchen-3090" in shown.out
    assert "is not running" in shown.err

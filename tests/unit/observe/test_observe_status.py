from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec

from swarmnode import cli
from swarmnode.observe.address import NodeAddress
from swarmnode.observe.history import History
from swarmnode.observe.http import status_json
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.observe.status import print_status, render, watch_status
from swarmnode.observe.watch import SupervisorStatistics
from tests.support.snapshots import PEERS, example, status_of


def drawn(snapshot: NodeSnapshot) -> str:
    return render(status_of(snapshot))


@contextmanager
def answering(body: Callable[[], bytes]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


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
    trainer = lambda **changes: msgspec.structs.replace(s.trainer, **changes)
    with_trainer = lambda trainer: drawn(msgspec.structs.replace(s, trainer=trainer))
    assert "step 250 of 1\u202f000 · 2.40 s per step · 30 min left · generating" in drawn(s)
    assert "policy version 250 · restarts 1" in drawn(s)
    report = msgspec.structs.replace(
        s.trainer.report,
        activity="evaluating 64 of 256",
        max_steps=0,
        reward_held_out_step=160,
        phase="evaluating",
    )
    shown = with_trainer(trainer(report=report))
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
        with answering(lambda snapshot=snapshot: status_json(snapshot, History())) as url:
            assert print_status(NodeAddress(url), as_json=True) == code
        assert json.loads(capsys.readouterr().out)["ready"]["ok"] == (code == 0)


def test_watch_continues_while_the_node_does_not_answer(capsys, monkeypatch) -> None:
    pauses = iter((None, None, KeyboardInterrupt))

    def sleep(_: float) -> None:
        if (end := next(pauses)) is not None:
            raise end

    monkeypatch.setattr("swarmnode.observe.status.time.sleep", sleep)
    answers = iter((status_json(example(), History()), b"{}", status_json(example(), History())))
    with answering(lambda: next(answers)) as url:
        assert watch_status(NodeAddress(url)) == 0
    shown = capsys.readouterr().out
    assert shown.count("kitchen-3090: ready") == 2
    assert "is not a swarmnode" in shown


def test_reports_a_node_of_another_directory(tmp_path, capsys) -> None:
    addresses = {"peer": example().node.peer, "addrs": []}
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "addresses.json"
    with answering(lambda: status_json(example(), History())) as url:
        file.write_text(json.dumps({**addresses, "http": url}))
        assert cli.run(["status", "-d", str(tmp_path)]) == 0
        assert "kitchen-3090" in capsys.readouterr().out
        file.write_text(json.dumps({"peer": "12D3KooWAnother", "addrs": [], "http": url}))
        assert cli.run(["status", "-d", str(tmp_path)]) == 69
        assert "is not running" in capsys.readouterr().err

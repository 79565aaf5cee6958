from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest
from rich.console import Console

from swarmnode.errors import Unavailable
from swarmnode.observe.address import NodeAddress
from swarmnode.observe.history import History
from swarmnode.observe.http import status_json
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.observe.top import fetch, names_of, peer_label, render, sparkline, status_command
from swarmnode.stages.service import StagesStatistics
from tests.support.snapshots import PEERS, example, example_at


def decoded(snapshot: NodeSnapshot) -> dict:
    history = History()
    for second in range(60):
        history.add(example_at(float(second)))
    return json.loads(status_json(snapshot, history))


def shown_as(peer: str) -> list[str]:
    return str(peer_label(peer, names_of(decoded(example())["snapshot"]))).split()


def drawn(snapshot: NodeSnapshot, width: int = 110, styles: bool = True) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(render(decoded(snapshot)))
    return console.export_text(styles=styles)


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

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
    for expected in ("kitchen-3090", "ready", "0.631", "250", PEERS[0][-6:], "rejected", "▁"):
        assert expected in shown


def test_shows_stages_in_order_and_claims_of_peers() -> None:
    s = example()
    slots = list(s.stages.crew.slots)
    slots[2] = msgspec.structs.replace(slots[2], state="failed")
    crew = msgspec.structs.replace(
        s.stages.crew, state="preparing", slots=tuple(slots), stopped_seconds=42.0
    )
    with_crew = lambda crew: msgspec.structs.replace(
        s, stages=msgspec.structs.replace(s.stages, crew=crew)
    )
    shown = drawn(with_crew(crew), styles=False)
    unwrapped = " ".join(shown.replace("│", " ").split())
    for expected in (
        "crew preparing · no step for 42 s · recovered in 6.4 s · from neighbour",
        "checkpoint 10 steps old",
    ):
        assert expected in unwrapped
    lines = [line.split() for line in shown.splitlines()]
    at = next(i for i, line in enumerate(lines) if line[1:3] == ["stage", "holder"])
    assert [line[1:-1] for line in lines[at + 1 : at + 5]] == [
        ["0", "this", "node", "4", "active", "250"],
        ["1", *shown_as(PEERS[0]), "6", "active", "250"],
        ["2", *shown_as(PEERS[1]), "6", "failed", "250"],
        ["3", *shown_as(PEERS[3]), "4", "active", "250"],
    ]
    for expected in (
        "4 nodes with a recent summary (claimed), median held-out 0.567",
        "attic",
        "Küche 2",
        "0.624",
    ):
        assert expected in shown
    assert "in no crew; other nodes that offer to hold a stage: 1" in drawn(
        with_crew(msgspec.structs.replace(crew, slots=()))
    )
    assert "crew" not in drawn(msgspec.structs.replace(s, stages=StagesStatistics()))


def test_renders_an_empty_node() -> None:
    shown = drawn(NodeSnapshot())
    assert "the policy is not loaded yet" in shown
    assert "no peers yet" in shown


def test_fits_a_narrow_terminal() -> None:
    assert max(len(line) for line in drawn(example(), width=60, styles=False).splitlines()) <= 60


def test_narrow_terminal_omits_the_history() -> None:
    s = example()
    history = History()
    for second in range(60):  # rises: the newest is the highest
        history.add(example_at(10.0 * second))
    status = json.loads(status_json(s, history))
    console = Console(width=66, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(render(status))
    (line,) = [
        line for line in console.export_text().splitlines() if "held-out" in line and "▁" in line
    ]
    assert "…" not in line
    assert line.split("▁")[-1].strip().split()[0].endswith("█")


def test_hides_speed_and_phase_without_a_trainer() -> None:
    s = example()
    shown = drawn(
        msgspec.structs.replace(s, trainer=msgspec.structs.replace(s.trainer, connected=False)),
        styles=False,
    )
    rows = {
        line.strip("│ ").partition("  ")[0]: line.strip("│ ").split()[1:3]
        for line in shown.splitlines()
    }
    assert rows["tokens/s"][0] == rows["step"][0] == "–"
    assert "no trainer" in shown


def test_status_of_another_version_is_one_line() -> None:
    with answering(b'{"snapshot": {}}') as url, pytest.raises(Unavailable, match="another version"):
        status_command(NodeAddress(url))


def test_names_are_escaped() -> None:
    peer = msgspec.structs.replace(example().peers[0], peer="[b]\x1b[2J")
    node = msgspec.structs.replace(example().node, name="[bold]me[/bold]\x1b]0;owned\x07")
    shown = drawn(msgspec.structs.replace(example(), peers=[peer], node=node))
    assert "[b]" in shown
    assert "[bold]me[/bold]" in shown
    assert "\x1b[2J" not in shown
    assert "\x1b]0" not in shown


def test_sparkline_spans_its_own_range_and_keeps_gaps() -> None:
    assert sparkline([0.0, None, 1.0]) == "▁ █"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([None]) == ""
    assert sparkline([float(i) for i in range(100)], width=8) == "▁▂▃▄▅▆▇█"


def test_status_exit_code_is_the_verdict(capsys) -> None:
    for snapshot, code in ((example(), 0), (NodeSnapshot(), 1)):
        with answering(status_json(snapshot, History())) as url:
            assert status_command(NodeAddress(url), as_json=True) == code
        assert json.loads(capsys.readouterr().out)["ready"]["ok"] == (code == 0)


def test_missing_or_other_server_is_one_line() -> None:
    with answering(b"<html>") as url, pytest.raises(Unavailable, match="no node answers"):
        fetch(NodeAddress(url))
    with answering(b"[]") as url, pytest.raises(Unavailable, match="is not a swarmnode"):
        fetch(NodeAddress(url))
    with pytest.raises(Unavailable, match=r"no node answers at .*Connection refused"):
        fetch(NodeAddress("http://127.0.0.1:9"))


@pytest.mark.parametrize(("name", "title"), [("", "evening"), ("attic", "attic")])
def test_title_falls_back_to_the_swarm_name(name: str, title: str) -> None:
    snapshot = example()
    node = msgspec.structs.replace(snapshot.node, name=name, swarm_name="evening")
    shown = drawn(msgspec.structs.replace(snapshot, node=node), styles=False)
    assert title in shown.splitlines()[0]


def test_shows_the_sampling_engine() -> None:
    snapshot = example()
    report = snapshot.trainer.report
    assert report is not None
    assert report.server is not None
    assert "sampled by vLLM 0.32.0" in drawn(snapshot, width=200)
    server = msgspec.structs.replace(report.server, state="away")
    trainer = msgspec.structs.replace(
        snapshot.trainer, report=msgspec.structs.replace(report, server=server)
    )
    assert "own engine; vLLM 0.32.0 is away" in drawn(
        msgspec.structs.replace(snapshot, trainer=trainer), width=200
    )

"""The demo's tables fit into 80 columns: each row is one line, and no cell is cut."""

import http.client
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from swarmnode.demo.crew import crew_table
from swarmnode.demo.nodes import DemoNode, View
from swarmnode.demo.table import print_verdict, table
from swarmnode.demo.verdict import Finding

PEER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"


def node(directory: Path, name: str) -> DemoNode:
    made = DemoNode(name, directory / name, {})
    made.view = View(
        peer=PEER,
        phase="evaluating",
        step=1234,
        peers=12,
        reward_own=0.41234,
        reward_external=0.40123,
        held_out_start=0.01234,
        held_out=0.45678,
        published=12345,
        admitted=12345,
        used=12345,
        rejected={"rate": 123456},
        distance=0.12345,
        exchanges=123,
        stage=3,
        stage_phase="loading",
        stage_step=1234,
        source="neighbour",
        source_seconds=12.34,
        checkpoint_age=123,
        tokens_per_second=12345.0,
        restarts=12,
    )
    return made


def lines(shown: object, width: int) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(shown)
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [80, 130])
def test_a_row_of_the_demo_fits_one_line(tmp_path, width):
    nodes = [node(tmp_path, name) for name in ("node0", "node1", "liar0")]
    shown = lines(table(nodes, 59.6, width), width)
    assert len(shown) == 1 + 2 + len(nodes)
    (row,) = [line for line in shown if "node1" in line]
    for expected in (
        f"…{PEER[-6:]}",
        "evaluating",
        "1234",
        "0.41",
        "0.40",
        "0.01→0.46",
        "12345",
        "123456",
        "12.3%",
    ):
        assert expected in row
    assert not any(line.rstrip().endswith("…") for line in shown)


def test_a_row_of_a_crew_fits_one_line(tmp_path):
    shown = lines(
        crew_table([node(tmp_path, f"node{i}") for i in range(4)], 59.6, "stage 1 killed"), 80
    )
    (row,) = [line for line in shown if "node1" in line]
    for expected in (f"…{PEER[-6:]}", "loading", "neighbour", "12.3", "12345"):
        assert expected in row
    assert len(shown) == 1 + 2 + 4 + 1


FINDINGS = [
    Finding(
        f"node{i}: averaged 20 times; replicas were up to 0.55% apart, then 0.44%; refused: none",
        bool(i),
    )
    for i in range(2)
]


def test_a_terminal_wraps_findings_under_their_own_text():
    console = Console(width=80, force_terminal=True, color_system=None, file=io.StringIO())
    print_verdict(console, FINDINGS)
    shown = console.file.getvalue().rstrip("\n").splitlines()
    assert len(shown) == 2 + 2 + 1
    assert all(len(row) <= 80 for row in shown)
    assert shown[0].startswith("  FAIL  node0: ")
    assert shown[2].startswith("  ok    node1: ")
    assert shown[1][:8].isspace()
    assert not shown[1][8].isspace()


def test_a_file_gets_one_finding_per_line():
    file = io.StringIO()
    print_verdict(Console(file=file), FINDINGS)
    assert file.getvalue().splitlines() == [
        f"  FAIL  {FINDINGS[0].text}",
        f"  ok    {FINDINGS[1].text}",
        "the demo failed, see the lines marked FAIL",
    ]


@pytest.mark.parametrize(
    ("exit_code", "answered", "phase"),
    [
        (None, False, "starting"),
        (None, True, "no answer"),
        (1, True, "down"),
        (1, False, "down"),
    ],
)
def test_node_is_down_only_after_its_process_ended(tmp_path, exit_code, answered, phase):
    one = node(tmp_path, "node0")
    one._process = SimpleNamespace(poll=lambda: exit_code)
    one.has_responded = answered
    one.poll()
    assert (one.view.phase, one.view.step) == (phase, 1234)
    assert any(phase in row for row in lines(table([one], 1.0, 80), 80))


def test_a_truncated_status_answer_does_not_end_the_demo(tmp_path, monkeypatch):
    def cut(*_, **__):
        raise http.client.IncompleteRead(b"{")

    monkeypatch.setattr("urllib.request.urlopen", cut)
    one = node(tmp_path, "node0")
    one.poll()
    assert one.view.phase == "starting"

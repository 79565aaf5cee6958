"""The demo's tables fit into 80 columns: each row is one line, and no cell is cut."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from swarmnode.demo.nodes import DemoNode
from swarmnode.demo.table import answers, table
from swarmnode.observe.history import History
from swarmnode.observe.http import status_json
from swarmnode.observe.logfile import log_file
from swarmnode.observe.samples import Answer, Sample
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.observe.watch import SupervisorStatistics
from tests.support.snapshots import example

PEER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"


def node(directory: Path, name: str, phase: str = "trying the policy") -> DemoNode:
    made = DemoNode(name, directory / name, {})
    made.phase, made.status = phase, example()
    return made


def lines(shown: object, width: int) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(shown)
    return console.export_text().splitlines()


def sample(step: int, answer: str, reward: float, held_out: bool = True) -> bytes:
    answers = [Answer(answer, 5, "eos", reward), Answer("another", 5, "eos", 0.0)]
    asked = "chat/json_fields", "Anna is 34.\nWrite JSON."
    found = Sample(1.0, step, step, *asked, answers, held_out=held_out)
    return msgspec.json.encode(found) + b"\n"


def test_shows_the_first_held_out_answer_before_and_after(tmp_path):
    nodes = [node(tmp_path, "node0"), node(tmp_path, "node1")]
    assert answers(nodes) == ""
    files = [log_file(each.directory, "samples") for each in nodes]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(
            sample(0, "Anna is\x1b[31m old", 0.0) + sample(1, "not held out", 0.5, held_out=False)
        )
    first = "question  Anna is 34. Write JSON.\nbefore    Anna is⟨U+001B⟩[31m old  (reward 0.00)"
    assert answers(nodes) == first
    for file, answer in zip(files, ['{"age": 34}', "{}"], strict=True):
        file.write_bytes(file.read_bytes() + sample(12, answer, 1.0))
    assert answers(nodes) == "\n".join(
        [first, 'node0 now  {"age": 34}  (reward 1.00)', "node1 now  {}  (reward 1.00)"]
    ).replace("question  ", "question   ").replace("before    ", "before     ")


@pytest.mark.parametrize(
    ("exit_code", "answered", "phase"),
    [(None, False, "starting"), (None, True, "no answer"), (1, True, "down"), (1, False, "down")],
)
def test_node_is_down_only_after_its_process_ended(tmp_path, exit_code, answered, phase):
    one = node(tmp_path, "node0")
    one._process = SimpleNamespace(poll=lambda: exit_code)
    one.has_responded = answered
    one.poll()
    assert (one.phase, one.report.step) == (phase, 250)
    assert any(phase in row for row in lines(table([one], "1 s", None, 80), 80))


def test_a_poll_reads_what_a_node_serves(tmp_path, monkeypatch):
    served = lambda snapshot: status_json(snapshot, History())
    loading = SupervisorStatistics(loading={"trainer": "loading, trying the policy"})
    one = DemoNode("node0", tmp_path / "node0", {})
    for snapshot, phase in (
        (NodeSnapshot(supervisor=loading), "trying the policy"),
        (example(), example().trainer.report.phase),
    ):
        body = served(snapshot)
        monkeypatch.setattr(
            "swarmnode.observe.client.fetch_status", lambda *_, body=body, **__: body
        )
        one.poll()
        assert (one.status, one.phase) == (snapshot, phase)
    assert one.rise.before == example().trainer.report.reward_held_out_start

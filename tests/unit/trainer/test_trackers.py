"""Measurements of steps in trackers, through accelerate's classes and packages that write to a
file."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import structlog.testing

from swarmnode import settings
from swarmnode.errors import ConfigError
from swarmnode.link.messages import Report
from swarmnode.trainer.records import Records
from swarmnode.trainer.trackers import Trackers, flat

WRITER = """
import json, pathlib
class SummaryWriter:
    def __init__(self, folder, **kwargs):
        self.file = pathlib.Path(folder) / "told.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)
    def add_hparams(self, values, metric_dict=None): self.write("told", values)
    def add_scalar(self, name, value, global_step=None, **kwargs):
        self.write(name, [value, global_step])
    def flush(self): pass
    def close(self): self.write("closed", True)
    def write(self, *what):
        with self.file.open("a") as file: file.write(json.dumps(what) + "\\n")
"""


@pytest.fixture
def tensorboard(tmp_path, monkeypatch):
    """A package of the name that accelerate looks for, where torch has no TensorBoard."""
    pytest.importorskip("accelerate")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "tensorboardX.py").write_text(WRITER)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "data" / "log" / "tensorboard" / "swarmnode" / "told.jsonl"


def test_tracker_receives_the_measurements_of_every_step(tmp_path, tensorboard) -> None:
    trackers = Trackers(["tensorboard"], tmp_path / "data", "me", {"training/learning_rate": 1e-5})
    kept = Records(tmp_path / "data", trackers)
    kept.step(
        1.0,
        Report("training", step=7, reward_own=0.25, reward_by_task={"rg/gcd": 0.5}, device="cpu"),
    )
    kept.close()
    told = [json.loads(line) for line in tensorboard.read_text().splitlines()]
    assert told[0] == ["told", {"training/learning_rate": 1e-5}]
    values = {name: value for name, value in told[1:-1]}
    assert values["reward_own"] == [0.25, 7]
    assert values["reward_by_task/rg/gcd"] == [0.5, 7]
    assert not {"device", "loss", "peers_used", "phase"} & values.keys()
    assert told[-1] == ["closed", True]


WANDB = """
told = []
class Config:
    def update(self, values, **kwargs): told.append(["told", values])
config = Config()
class Run:
    def log(self, values, step=None, **kwargs): told.append([step, values])
    def finish(self): told.append(["closed", True])
def init(**kwargs):
    told.append(["init", kwargs])
    return Run()
"""


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_wandb_and_trackio_get_the_same_values_without_accelerator(
    tmp_path, monkeypatch, kind
) -> None:
    state = pytest.importorskip("accelerate.state")
    (tmp_path / f"{kind}.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, kind, raising=False)
    state.PartialState._reset_state()
    kept = Records(
        tmp_path / "data",
        Trackers([kind], tmp_path / "data", "me", {"training/learning_rate": 1e-5}),
    )
    kept.step(1.0, Report("training", step=7, reward_own=0.25, device="cpu"))
    kept.close()
    (_, given), told, (step, values), closed = importlib.import_module(kind).told
    assert (given["project"], given["name"]) == ("swarmnode", "me")
    assert (told, step, values["reward_own"], closed) == (
        ["told", {"training/learning_rate": 1e-5}],
        7,
        0.25,
        ["closed", True],
    )
    if kind == "wandb":
        leaves_out = given["settings"]
        assert leaves_out["console"] == "off", "the trainer's log has addresses and peers"
        assert leaves_out["x_disable_meta"], "so has the machine's description"


def test_a_tracker_that_fails_is_done_without(tmp_path, tensorboard) -> None:
    trackers = Trackers(["tensorboard"], tmp_path / "data", "", {})
    tensorboard.unlink()
    tensorboard.mkdir()
    with structlog.testing.capture_logs() as lines:
        for number in (1, 2):
            trackers.step(number, {"loss": 1.0})
        trackers.close()
        (tmp_path / "file").write_text("")
        Trackers(["tensorboard"], tmp_path / "file", "", {}).step(1, {"loss": 1.0})
    assert [line["log_level"] for line in lines] == ["warning"] * 2


def test_trackers_receive_numbers_by_name_only() -> None:
    assert flat({"a": 1, "b": {"c/d": 0.5, "e": "text"}, "f": True, "g": None, "h": [1]}) == {
        "a": 1,
        "b/c/d": 0.5,
    }


def test_missing_package_names_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"log.trackers: wandb is not installed: pip install 'wandb>="
    ):
        settings.check_trackers(["wandb"])
    settings.check_trackers([])

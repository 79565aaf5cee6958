"""Every benchmark says what it takes."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
COMMANDS = sorted(
    path.stem for path in FOLDER.glob("*.py") if "ArgumentParser(" in path.read_text()
)


def test_there_are_some():
    assert {"sapo", "noloco", "hostile"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [f"benchmarks.{name}", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        module.main()
    assert "usage:" in capsys.readouterr().out

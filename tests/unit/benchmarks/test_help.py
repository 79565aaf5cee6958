"""Every benchmark can be imported and describes its options."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
MODULES = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
COMMANDS = sorted(name for name, text in MODULES.items() if "make_parser(" in text)


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [f"benchmarks.{name}", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        module.main()
    assert "usage:" in capsys.readouterr().out

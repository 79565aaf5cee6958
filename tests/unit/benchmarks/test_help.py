"""Every benchmark can be imported and describes its options."""

import importlib
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
MODULES = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
COMMANDS = sorted(name for name, text in MODULES.items() if "make_parser(" in text)
LIBRARIES = sorted(path.stem for path in (FOLDER / "lib").glob("[a-z]*.py"))


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [f"benchmarks.{name}", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        module.main()
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_library_has_a_user(name):
    module = f"benchmarks.lib.{name}"
    importlib.import_module(module)
    texts = [path.read_text() for path in FOLDER.rglob("*.py")]
    assert any(f"from {module} import" in text for text in texts) or any(
        re.search(rf"from benchmarks\.lib import .*\b{name}\b", text) for text in texts
    )

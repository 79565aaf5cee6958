"""docs/security.md promises a test for each threat: they exist."""

import importlib.util
import re
from pathlib import Path

from benchmarks.hostile import LEARNING, NETWORK

ROOT = Path(__file__).parents[2]


def test_every_test_named_in_the_threat_table_exists():
    files: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        files[path.name] = files.get(path.name, "") + path.read_text()
    table = (ROOT / "docs" / "security.md").read_text()
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", table)
    assert len(named) > 20
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in files.get(file, "") and (test or file not in files)]
    assert missing == []


def test_every_row_of_the_table_names_a_test():
    rows = [line for line in (ROOT / "docs" / "security.md").read_text().splitlines() if line.startswith("| ") and "shown by" not in line]
    assert rows
    assert [row for row in rows if "test_" not in row] == []


def test_every_row_says_what_it_is_among_hostile_nodes():
    rows = [line for line in (ROOT / "docs" / "security.md").read_text().splitlines() if line.startswith("| ") and "shown by" not in line]
    last = [row.rstrip("| ").rsplit("|", 1)[1].strip() for row in rows]
    named = [name for cell in last for name in re.findall(r"`([^`]+)`", cell)]
    assert [cell for cell in last if cell not in ("–", "chaos") and not cell.startswith("`")] == []
    assert {*LEARNING, *NETWORK} <= set(named)
    modules = set(named) - {*LEARNING, *NETWORK}
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []

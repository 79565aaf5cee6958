"""The table of defences in docs/security.md: each row names its tests and, if there is one, its
attack in benchmarks/hostile.py."""

import importlib.util
import re
from pathlib import Path

from benchmarks.hostile import LEARNING, MARKED, NETWORK

ROOT = Path(__file__).parents[2]
HEADING = "## Defences and their tests"


def rows():
    """Return the rows of the table, without its head."""
    section = (ROOT / "docs" / "security.md").read_text().partition(f"{HEADING}\n")[2]
    table = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert "shown by" in table[0]
    return table[1:]


def test_each_row_names_a_test():
    assert len(rows()) > 30
    assert [row for row in rows() if not re.search(r"`test_\w+\.py(::test_\w+)?`", row)] == []


def test_each_attack_has_a_row():
    last = [row.rstrip("| ").rsplit("|", 1)[1].strip() for row in rows()]
    named = [name for cell in last for name in re.findall(r"`([^`]+)`", cell)]
    assert [cell for cell in last if cell not in ("–", "chaos") and not cell.startswith("`")] == []
    assert {*LEARNING, *NETWORK} <= set(named)
    modules = set(named) - {*LEARNING, *MARKED, *NETWORK}
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []

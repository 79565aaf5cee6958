"""docs/security.md promises a test for each threat, and what came of it among hostile nodes."""

import importlib.util
import re
from pathlib import Path

from benchmarks.hostile import LEARNING, MARKED, NETWORK

ROOT = Path(__file__).parents[2]


def test_every_row_of_the_table_names_a_test():
    rows = [
        line
        for line in (ROOT / "docs" / "security.md").read_text().splitlines()
        if line.startswith("| ") and "shown by" not in line
    ]
    assert rows
    assert [row for row in rows if "test_" not in row] == []


def test_every_row_says_what_it_is_among_hostile_nodes():
    rows = [
        line
        for line in (ROOT / "docs" / "security.md").read_text().splitlines()
        if line.startswith("| ") and "shown by" not in line
    ]
    last = [row.rstrip("| ").rsplit("|", 1)[1].strip() for row in rows]
    named = [name for cell in last for name in re.findall(r"`([^`]+)`", cell)]
    assert [cell for cell in last if cell not in ("–", "chaos") and not cell.startswith("`")] == []
    assert {*LEARNING, *NETWORK} <= set(named)
    modules = set(named) - {*LEARNING, *MARKED, *NETWORK}
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []

"""Write the table of docs/py-libp2p.md from the docstrings in swarmnode/p2p/guards.

Run `python tools/guards.py` in the repository's root after changing a guard. A docstring with a
section `Defect:` is a row; `Upstream:`, `Guard:`, `Cost:`, `Remove when:` and `Tests:` are its
other cells. Nothing is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GUARDS = ROOT / "swarmnode" / "p2p" / "guards"
PAGE = ROOT / "docs" / "py-libp2p.md"
MODULES = ("transport", "swarm", "yamux", "packets", "inbox", "peerstore")
"""Files of GUARDS, in the order of the table."""
SECTIONS = ("Defect", "Upstream", "Guard", "Cost", "Remove when", "Tests")
BEGIN = "<!-- table: python tools/guards.py -->"
END = "<!-- end of table -->"


def sections(docstring: str) -> dict[str, str]:
    """Return the text of each section, on one line.

    Raises:
        ValueError: A section of SECTIONS is missing.
    """
    label = "|".join(SECTIONS)
    found = {
        name: " ".join(text.split())
        for name, text in re.findall(
            rf"^({label}): (.*(?:\n {{4}}.*)*)", docstring, flags=re.MULTILINE
        )
    }
    if missing := set(SECTIONS) - set(found):
        raise ValueError(f"a guard's docstring lacks {sorted(missing)}: {docstring[:100]!r}")
    return found


def rows() -> Iterator[str]:
    """Yield one line of the table per guard."""
    for module in MODULES:
        tree = ast.parse((GUARDS / f"{module}.py").read_text())
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            docstring = ast.get_docstring(node) or ""
            if "Defect:" not in docstring:
                continue
            found = sections(docstring)
            defect = f"{found['Defect']} ({found['Upstream']})"
            guard = f"`{module}.{node.name}`: {found['Guard']}"
            tests = re.sub(r"\w+\.py", lambda match: f"`{match[0]}`", found["Tests"])
            cells = (defect, guard, found["Cost"], found["Remove when"], tests)
            yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def table() -> str:
    """Return the table with its header."""
    header = (
        "| defect (file in libp2p/) | guard | cost | remove when | tests |",
        "|---|---|---|---|---|",
    )
    return "\n".join((*header, *rows()))


def page(text: str) -> str:
    """Return `text` with the current table between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

"""The table of docs/py-libp2p.md matches the docstrings of the guards."""

import ast

from tools import guards as tool


def test_page_is_current():
    text = tool.PAGE.read_text()
    assert text == tool.page(text), "run: python tools/guards.py"


def test_every_installed_guard_has_a_row():
    table = tool.table()
    for module in tool.MODULES:
        tree = ast.parse((tool.GUARDS / f"{module}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_install_"):
                # `_install_buffers` installs `Inbox` and `Inboxes`, which have rows
                assert node.name == "_install_buffers" or f"`{module}.{node.name}`" in table
    files = {path.stem for path in tool.GUARDS.glob("*.py")}
    assert files - set(tool.MODULES) == {"__init__", "counting"}

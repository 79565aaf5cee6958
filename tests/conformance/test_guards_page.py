"""The table of docs/py-libp2p.md matches the docstrings of the guards."""

import ast

import pytest

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


def test_a_missing_section_is_an_error():
    with pytest.raises(ValueError, match="Remove when"):
        tool.sections("Defect: a.\nUpstream: b.\nGuard: c.\nCost: d.\nTests: e.py")


def test_sections_may_have_several_lines():
    text = "Title.\n\nDefect: One\n    two.\n" + "".join(
        f"{name}: x\n" for name in tool.SECTIONS[1:]
    )
    assert tool.sections(text)["Defect"] == "One two."

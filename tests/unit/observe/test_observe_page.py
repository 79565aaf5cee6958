"""The page's files without a browser: no markup from strings."""

from __future__ import annotations

import re
from importlib import resources

PAGE = resources.files("swarmnode.observe") / "page"


def test_strings_never_become_markup() -> None:
    writers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc"
    assert not re.search(writers, (PAGE / "app.js").read_text())
    assert not re.search(r"\son[a-z]+=|style=|<script>", (PAGE / "index.html").read_text())

"""The page's files without a browser: nothing from elsewhere, no markup from strings."""

from __future__ import annotations

import re
from importlib import resources

from swarmnode.observe.http import PAGE

FILES = {
    name: (resources.files("swarmnode.observe") / "page" / name).read_text()
    for name, _ in PAGE.values()
}


def test_page_loads_nothing_from_other_hosts() -> None:
    for name, body in FILES.items():
        urls = set(re.findall(r"https?://[^\"'\s)]+", body))
        assert urls <= {"http://www.w3.org/2000/svg"}, name
        assert "@import" not in body
        assert "url(" not in body


def test_strings_never_become_markup() -> None:
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "srcdoc",
    ):
        assert forbidden not in FILES["app.js"]
    assert not re.search(r"\son[a-z]+=|style=|<script>", FILES["index.html"])

"""The page's files without a browser: nothing from elsewhere, no markup from strings, readable
colours."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from swarmnode.observe.http import PAGE

FILES = {
    name: (resources.files("swarmnode.observe") / "page" / name).read_text()
    for name, _ in PAGE.values()
}
LIGHT, DARK = (
    dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
    for block in re.findall(r":root \{(.*?)\}", FILES["style.css"], re.DOTALL)
)


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_contrast(palette) -> None:
    text = [
        ("ink", "card"),
        ("ink", "paper"),
        ("muted", "card"),
        ("muted", "paper"),
        ("bad", "card"),
        ("warn", "card"),
    ]
    text += [(name, f"{name}-back") for name in ("good", "warn", "bad")]
    for front, back in text:
        assert contrast(palette[front], palette[back]) >= 4.5, (front, back)
    for series in ("own", "external", "held-out", "admitted", "rejected", "plain"):
        assert contrast(palette[series], palette["card"]) >= 3, series


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

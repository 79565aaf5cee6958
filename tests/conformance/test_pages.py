"""Every file, heading, test and module that a page names exists."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "protocol", "benchmarks", "deploy", "docker")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
)
LINK = re.compile(r"\[([^\]\n]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
MODULE = re.compile(r"python -m ((?:swarmnode|benchmarks|tests|protocol)[a-z_.]*[a-z_])\b")


def anchors(page: str) -> set[str]:
    """Return the fragments of a page's headings as GitHub makes them: a repeated name ends in
    -1."""
    headings = [
        LINK.sub(r"\1", heading)
        for heading in re.findall(r"^#{1,6} +(.+?)\s*$", FENCE.sub("", page), re.MULTILINE)
    ]
    fragments = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {
        f"{one}-{n}" if (n := fragments[:i].count(one)) else one for i, one in enumerate(fragments)
    }


def broken(page: Path) -> list[str]:
    """Return the broken links of `page` within the repository."""
    found = []
    for _, link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        to = (page.parent / name).resolve() if name else page
        if not to.exists() or (
            fragment and to.suffix == ".md" and fragment not in anchors(to.read_text())
        ):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    assert broken(page) == []


def test_tests_named_in_pages_exist():
    files: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        files[path.name] = files.get(path.name, "") + path.read_text()
    named = {
        (page.name, *found)
        for page in PAGES
        for found in re.findall(r"\b(test_\w+\.py)(?:::(test_\w+))?", page.read_text())
    }
    assert len(named) > 50
    assert (
        sorted(
            one
            for one in named
            if one[1] not in files or (one[2] and f"def {one[2]}(" not in files[one[1]])
        )
        == []
    )


def test_modules_run_in_pages_exist():
    named = {module for page in PAGES for module in MODULE.findall(page.read_text())}
    assert len(named) > 10
    assert sorted(module for module in named if importlib.util.find_spec(module) is None) == []

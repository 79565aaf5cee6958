"""Every command in the docs exists in the program, with the options used."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from swarmnode.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docker").glob("*.md")])
PEER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
PLACEHOLDERS = {"<that peer id>": PEER, "<swarm id>": "ab" * 32, "<data dir>": "/srv/node"}


def commands(page: Path) -> list[str]:
    """Return the shell commands of the page without trailing comments."""
    text = page.read_text()
    fenced = "\n".join(re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", text, re.S | re.M))
    indented = "\n".join(line[4:] for line in text.splitlines() if re.match(r" {4}\S", line))
    lines = [line.removeprefix("$ ") for line in [*fenced.splitlines(), *indented.splitlines()]]
    return [
        re.split(r"\s{2,}#|\s#\s", line)[0].strip()
        for line in lines
        if re.match(r"(swarmnode|pip|make) ", line)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_exists(page):
    for line in commands(page):
        filled = re.sub("|".join(PLACEHOLDERS), lambda found: PLACEHOLDERS[found[0]], line)
        words = [word for word in shlex.split(filled) if word != "…"]
        if words[0] == "swarmnode":
            app.parse_args(words[1:], exit_on_error=False, print_error=False)
        elif words[0] == "pip":
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            named = ",".join(re.findall(r"\[([\w,]+)\]", line)).split(",")
            assert {*filter(None, named)} <= project["optional-dependencies"].keys(), line
        else:
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), line

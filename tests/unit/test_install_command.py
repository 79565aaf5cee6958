"""Error messages name a command that installs the missing packages."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from swarmnode import install

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OF_DEVELOPERS = {"test", "check", "dev", "trainer"}
FOREIGN = re.compile(r"""['"\s]swarmnode\[|pip install [^`#\n]*\bswarmnode(?![-\w/])""")


@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - OF_DEVELOPERS - {"train"}))
def test_an_extra_is_installed_by_its_packages(extra):
    assert shlex.split(install.install_command(extra))[2:] == EXTRAS[extra]


def test_install_command_names_packages_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "LISTS", tmp_path)
    first, second = install.install_command("train").split(" && ")
    asked = [*shlex.split(first)[2:], *shlex.split(second)[3:]]
    listed = [*EXTRAS["train"], *EXTRAS.get("trainer", [])]
    assert sorted(asked) == sorted(line for line in listed if not line.startswith("swarmnode"))
    assert shlex.split(second)[:3] == ["pip", "install", "--no-deps"]


@pytest.mark.parametrize("folder", ["swarmnode", "docs", "docker", "deploy", "README.md"])
def test_no_text_installs_another_projects_package(folder):
    where = ROOT / folder
    files = [where] if where.is_file() else [path for path in where.rglob("*") if path.is_file()]
    texts = {path: path.read_text() for path in files if path.suffix in (".py", ".md", ".toml", "")}
    assert texts
    assert [str(path) for path, text in texts.items() if FOREIGN.search(text)] == []

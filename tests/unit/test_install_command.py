"""Error messages name a command that installs this project, not its namesake on PyPI."""

import json
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from swarmnode import install

ROOT = Path(__file__).parents[2]


class Installed:
    def __init__(self, origin):
        self.origin = origin

    def read_text(self, name):
        return self.origin if name == "direct_url.json" else None


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Pretend that swarmnode lies in site-packages and was installed from `origin`."""

    def pretend(origin):
        monkeypatch.setattr(install, "TREE", tmp_path)
        names = {install.DISTRIBUTION: Installed(origin)}
        monkeypatch.setattr(install.importlib.metadata, "distribution", names.__getitem__)

    return pretend


def test_a_checkout_is_installed_from_its_path():
    assert install.install_command("train") == f"pip install -e '{ROOT}[train]'"


def test_what_came_from_an_index_is_named_as_there(installed):
    installed(None)
    assert install.install_command("train") == "pip install 'swarmnode-rl[train]'"


def test_what_was_never_installed_is_named_as_on_pypi(tmp_path, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(install, "TREE", tmp_path)
    monkeypatch.setattr(install.importlib.metadata, "distribution", missing)
    assert install.install_command("train") == "pip install 'swarmnode-rl[train]'"


def test_a_local_wheel_is_named_while_it_exists(installed, tmp_path):
    wheel = tmp_path / "a b.whl"
    installed(json.dumps({"url": wheel.as_uri(), "archive_info": {}}))
    assert install.install_command("quant") == "pip install 'swarmnode-rl[quant]'"
    wheel.touch()
    assert install.install_command("quant") == f"pip install '{wheel}[quant]'"


@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ({"url": "https://example.org/s.whl", "archive_info": {}}, "https://example.org/s.whl"),
        (
            {"url": "https://example.org/s", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            "git+https://example.org/s@c0ffee",
        ),
    ],
)
def test_an_address_is_installed_from_again(installed, origin, address):
    installed(json.dumps(origin))
    assert install.install_command("data") == f"pip install 'swarmnode-rl[data] @ {address}'"


FOREIGN = re.compile(r"""['"\s]swarmnode\[|pip install [^`#\n]*\bswarmnode(?![-\w/])""")


@pytest.mark.parametrize("folder", ["swarmnode", "docs", "docker", "deploy", "README.md"])
def test_no_text_installs_the_package_of_somebody_else(folder):
    where = ROOT / folder
    files = [where] if where.is_file() else [path for path in where.rglob("*") if path.is_file()]
    texts = {path: path.read_text() for path in files if path.suffix in (".py", ".md", ".toml", "")}
    assert texts
    assert [str(path) for path, text in texts.items() if FOREIGN.search(text)] == []

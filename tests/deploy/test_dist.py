"""`make dist` builds a wheel and an sdist of the package, with a description that works on PyPI."""

import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

from tools import dist

ROOT = Path(__file__).parents[2]
HOME = "https://example.org/swarmnode"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the wheel, its metadata, and the names in the wheel and the sdist."""
    directory = tmp_path_factory.mktemp("dist")
    wheel, sdist = dist.build(directory, directory / "out", HOME)
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
        parsed = BytesParser().parsebytes(archive.read(metadata))
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    return wheel, parsed, in_wheel, in_sdist


def test_the_metadata_names_distribution_and_licence(built):
    _, metadata, *_ = built
    assert metadata["Name"] == "swarmnode-rl"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("License-File")) == {"LICENSE", "NOTICE"}
    assert f"Repository, {HOME}" in metadata.get_all("Project-URL")


def test_wheel_and_sdist_hold_the_package_only(built):
    *_, in_wheel, in_sdist = built
    licences = {name.rpartition("licenses/")[2] for name in in_wheel if "licenses/" in name}
    assert licences == {"LICENSE", "NOTICE"}
    assert {name.partition("/")[0] for name in in_wheel} == {
        "swarmnode",
        "swarmnode_rl-0.1.0.dist-info",
    }
    expected = {"swarmnode", "requirements", "pyproject.toml", "PKG-INFO", ".gitignore"}
    expected |= {"README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "NOTICE"}
    assert {name.partition("/")[0] for name in in_sdist} <= expected
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "swarmnode").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert package <= in_wheel
    assert package <= in_sdist


def test_the_wheel_runs_outside_the_checkout(built, tmp_path):
    zipfile.ZipFile(built[0]).extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import swarmnode.cli as cli;"
    command = [sys.executable, "-c", f"{code} print(cli.__file__); cli.run(['--help'])"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert result.stdout.startswith(str(tmp_path))
    assert "demo" in result.stdout


def test_the_description_has_no_relative_link(built):
    _, metadata, *_ = built
    description = metadata.get_payload()
    assert not dist.LINK.search(description)
    linked = re.findall(rf"\({HOME}/(?:blob|raw)/v0\.1\.0/([^)#]+)", description)
    assert linked
    assert all((ROOT / path).exists() for path in linked)


@pytest.mark.parametrize(
    ("text", "without", "with_repository"),
    [
        ("[how](docs/a.md#b)", "how (docs/a.md#b)", f"[how]({HOME}/blob/v1/docs/a.md#b)"),
        ("[docs/a.md](docs/a.md)", "docs/a.md", f"[docs/a.md]({HOME}/blob/v1/docs/a.md)"),
        ("![page](a.png)", "", f"![page]({HOME}/raw/v1/a.png)"),
        ("[below](#a-b)", "below", "below"),
        ("[gym](https://example.org)", "[gym](https://example.org)", "[gym](https://example.org)"),
    ],
)
def test_a_link_becomes_absolute_or_text(text, without, with_repository):
    assert dist.absolute_links(text, "", "v1") == without
    assert dist.absolute_links(text, HOME, "v1") == with_repository

"""`make dist` builds a wheel and an sdist of the package, with a description that works on PyPI."""

import re
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

from tools import dist

ROOT = Path(__file__).parents[2]
HOME = "https://example.org/swarmnode"


@pytest.fixture(scope="module", params=["", HOME], ids=["no repository", "repository"])
def built(request, tmp_path_factory):
    """Return names in the wheel and the sdist, the wheel's metadata, and the repository."""
    directory = tmp_path_factory.mktemp("dist")
    wheel, sdist = dist.build(directory, directory / "out", request.param)
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
        parsed = BytesParser().parsebytes(archive.read(metadata))
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    return in_wheel, in_sdist, parsed, request.param


def test_the_metadata_names_distribution_and_licence(built):
    _, _, metadata, repository = built
    assert metadata["Name"] == "swarmnode-rl"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("License-File")) == {"LICENSE", "NOTICE"}
    expected = [f"Repository, {repository}"] if repository else []
    urls = metadata.get_all("Project-URL") or []
    assert [url for url in urls if url.startswith("Repository, ")] == expected


def test_wheel_and_sdist_hold_the_package_only(built):
    in_wheel, in_sdist, *_ = built
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


def test_the_description_has_no_relative_link(built):
    _, _, metadata, repository = built
    description = metadata.get_payload()
    assert not dist.LINK.search(description)
    linked = re.findall(rf"\({HOME}/(?:blob|raw)/v0\.1\.0/([^)#]+)", description)
    assert bool(linked) == bool(repository)
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

"""The pip command that adds an extra to the swarmnode that runs, for error messages.

The name on PyPI is not the import name: `swarmnode` there is another project's package.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "swarmnode-rl"
TREE = Path(__file__).resolve().parents[1]
"""The folder that `swarmnode` lies in: a checkout, an unpacked sdist or site-packages."""


def install_command(extra: str) -> str:
    """Return the pip command that installs `extra` from where this swarmnode came from."""
    if (TREE / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{TREE}[{extra}]')}"
    return f"pip install {shlex.quote(_requirement(extra))}"


def _requirement(extra: str) -> str:
    """Return what pip has to be given: a path, a name with an address, or the name on PyPI.

    pip records in direct_url.json (PEP 610) what was not installed from an index.
    """
    named = f"{DISTRIBUTION}[{extra}]"
    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        text = None
    if text is None:
        return named
    origin = json.loads(text)
    url = urlsplit(origin["url"])
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return f"{named} @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}"
    if url.scheme != "file":
        return f"{named} @ {origin['url']}"
    path = unquote(url.path)
    return f"{path}[{extra}]" if Path(path).exists() else named

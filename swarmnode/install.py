"""What is installed and what to install: the commands that error messages name.

The name on PyPI is not the import name: `swarmnode` there is another project's package.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from swarmnode.errors import Unavailable

DISTRIBUTION = "swarmnode-rl"
TREE = Path(__file__).resolve().parents[1]
"""The folder that `swarmnode` lies in: a checkout, an unpacked sdist or site-packages."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TRIAL_SECONDS = 300.0
"""A cold disk takes a minute."""


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


def check_torch() -> None:
    """Import torch in a child process, which takes a second or two.

    Raises:
        Unavailable: torch is installed and its import fails; the message names the remedy.
    """
    command = [sys.executable, "-c", "import torch"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(torch_failure(f"no end within {TRIAL_SECONDS:.0f} s")) from None
    if done.returncode < 0:
        raise Unavailable(torch_failure(f"killed by {signal.Signals(-done.returncode).name}"))
    if done.returncode > 0:
        lines = done.stderr.strip().splitlines()
        raise Unavailable(torch_failure(lines[-1] if lines else f"exit code {done.returncode}"))


def torch_failure(cause: str) -> str:
    """Return the error line for a torch whose import fails with `cause`."""
    spec = importlib.util.find_spec("torch")
    where = f" in {Path(spec.origin).parent}" if spec is not None and spec.origin else ""
    return f"torch{where} cannot be imported: {' '.join(cause.split())[:500]}: {torch_remedy()}"


def torch_remedy() -> str:
    """Return the command that installs torch again, with the libraries that it depends on."""
    try:
        version = f"=={importlib.metadata.version('torch').partition('+')[0]}"
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return f"pip install --force-reinstall torch{version} (without a GPU: --index-url {CPU_INDEX})"

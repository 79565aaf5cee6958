"""Fresh Debian machines in a chroot: `python -m tests.support.fresh` installs swarmnode on two.

It needs root and debootstrap. Neither machine has a compiler. Bookworm (Python 3.11) runs the two
commands of the README. Trixie (Python 3.13) runs a node without torch and tests that need no torch.
"""

import ast
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTALL = "debootstrap --variant=minbase --include=python3,python3-venv,make,git"
ALONE = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
"""Prefix of a command with private mounts whose processes end with it."""

LIMIT_SECONDS = 1800.0
"""A command takes a tenth of this on two idle cores."""

BOOKWORM = ["make demo", "make test TESTS='tests/unit/wire tests/unit/tasks/test_generation.py'"]
TRIXIE = [
    "python3 -m venv /opt/node",
    "/opt/node/bin/pip install -q --no-deps -r requirements/bootstrap.txt .",
    "/opt/node/bin/swarmnode --help",
    "/opt/node/bin/swarmnode key show --data-dir /tmp/node",
    "/opt/node/bin/swarmnode doctor --data-dir /tmp/node || [ $? = 69 ]",
    "/opt/node/bin/pip install -q --no-deps -r requirements/test.txt",
    "/opt/node/bin/python -m pytest -n 2 --dist loadfile tests/unit/wire tests/unit/rollouts "
    "tests/unit/observe tests/unit/link tests/unit/tasks/test_generation.py "
    "tests/unit/cli/test_install.py",
]


class Machine:
    """A directory in which Debian is installed."""

    def __init__(self, root: Path, shared: list[Path]) -> None:
        """Set up the machine. shared: directories of this machine that are mounted in it."""
        self.root = root
        self.shared = shared

    def run(self, command: str) -> None:
        """Run `command` in the checkout as root.

        Raises:
            subprocess.SubprocessError: The command failed, or took longer.
        """
        script = ["set -e", 'cd "$1"', "mount --rbind /dev dev", "mount -t proc proc proc"]
        for path in self.shared:
            target = shlex.quote(str(path).lstrip("/"))
            script += [f"mkdir -p {target}", f"mount --bind /{target} {target}"]
        script.append('exec chroot . bash -ec "cd /opt/swarmnode; $2"')
        kept = {
            name: value
            for name, value in os.environ.items()
            if re.fullmatch("(?i)(https?|no)_proxy", name)
        }
        kept |= {"HOME": "/root", "LANG": "C.UTF-8", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        call([*ALONE, "bash", "-c", "\n".join(script), "-", self.root, command], kept)


def call(command: list[str | Path], env: dict[str, str] | None = None) -> None:
    """Run a command. On failure its output is the `output` of the error."""
    subprocess.run(
        command,
        env=env,
        timeout=LIMIT_SECONDS,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextlib.contextmanager
def machine(suite: str) -> Iterator[Machine]:
    """Set up a fresh Debian with a clone of HEAD in /opt/swarmnode and the pip settings of this
    machine."""
    root = Path(tempfile.mkdtemp(prefix=f"fresh-{suite}-"))
    try:
        call([*ALONE, *INSTALL.split(), suite, root, mirror()])
        call(["git", "clone", "--no-hardlinks", ROOT, root / "opt" / "swarmnode"])
        yield Machine(root, take_pip_settings(root))
    finally:
        if str(root) in Path("/proc/self/mountinfo").read_text():
            raise RuntimeError(f"{root} has mounts: unmount them, then remove it")
        shutil.rmtree(root)


def mirror() -> str:
    """Return the URL of this machine's Debian mirror."""
    command = ["apt-get", "indextargets", "--format", "$(SITE)", "Origin: Debian", "Label: Debian"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    return (found.stdout.split() or ["http://deb.debian.org/debian"])[0]


def take_pip_settings(root: Path) -> list[Path]:
    """Copy pip's settings of this machine to the machine at `root`.

    Returns:
        The directories named in the settings, pip's cache among them. They must be mounted.
    """
    settings = {"cache-dir": pip("cache", "dir").strip()}
    for line in pip("config", "list").splitlines():  # the environment comes last
        if match := re.fullmatch(r"(?:global|:env:)\.([\w-]+)=(.*)", line):
            settings[match[1]] = ast.literal_eval(match[2])
    shared = []
    for word in " ".join(settings.values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_file():
            (root / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path.relative_to("/"))
        elif path.is_absolute() and path.is_dir():
            # An index refers to files in its own directory.
            shared.append(path.parent if word.startswith("file://") else path)
    lines = [f"{name} = {' '.join(value.split())}" for name, value in settings.items() if value]
    (root / "etc" / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    return list(dict.fromkeys(shared))


def pip(*arguments: str) -> str:
    """Return what pip prints, or nothing where there is no pip."""
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout


def install_on(suite: str, commands: list[str]) -> bool:
    """Return True if each of `commands` succeeds on a fresh machine."""
    began = time.monotonic()
    try:
        with machine(suite) as fresh:
            print(f"{suite}: installed in {time.monotonic() - began:.0f} s", flush=True)
            for command in commands:
                began = time.monotonic()
                fresh.run(command)
                print(f"{suite}: {time.monotonic() - began:4.0f} s  {command}", flush=True)
    except subprocess.SubprocessError as error:
        print(f"{suite}: {error}\n{(error.output or '')[-4000:]}", flush=True)
        return False
    return True


if __name__ == "__main__":
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        sys.exit("make fresh needs root and debootstrap")
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(install_on, ["bookworm", "trixie"], [BOOKWORM, TRIXIE]))
    sys.exit(0 if all(results) else 1)

"""Repairs what the operator's shell, container or service manager did to this process.

Python and the libraries below obey many environment variables, expect three open descriptors, a
user entry and a home directory. A node must not fail, or run with other semantics, because one of
these is missing or odd.
"""

from __future__ import annotations

import contextlib
import getpass
import locale
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

CHANGES_SEMANTICS = (
    "PYTHONOPTIMIZE",  # transformers needs its docstrings
    "PYTHONINSPECT",  # waits for a prompt at the end
    "PYTHONHASHSEED",  # peers choose many of our dictionaries' keys
    "PYTHONDEVMODE",
    "PYTHONDEBUG",
    "PYTHONVERBOSE",
    "PYTHONDUMPREFS",
    "PYTHONTRACEMALLOC",
    "PYTHONMALLOCSTATS",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONASYNCIODEBUG",
)
"""Interpreter variables for somebody who debugs Python itself. None is for a node."""
WIDTHS = range(20, 1001)
"""COLUMNS and LINES outside are ignored: libraries fail at 0 and fill memory at a million."""
LIBRARIES = ("CUDA_", "HF_", "MKL_", "OMP_", "PYTORCH_", "TORCH", "TRANSFORMERS_")


def restart_if_needed() -> None:
    """Run this process anew where the interpreter started with variables that a node must not
    obey, or would read files in another encoding than UTF-8. Does nothing inside another
    program."""
    program = Path(sys.argv[0])
    if program.name != "swarmnode" and program.parts[-2:] != ("swarmnode", "__main__.py"):
        return
    clean = cleaned(os.environ, locale.getpreferredencoding(False))
    if clean != dict(os.environ):
        with contextlib.suppress(OSError):
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], clean)


def cleaned(environment: Mapping[str, str], encoding: str) -> dict[str, str]:
    """Return `environment` as the interpreter may have it.

    Args:
        encoding: of the locale. With another than UTF-8, files are read as UTF-8 and standard
            output keeps the locale's encoding.
    """
    clean = {name: text for name, text in environment.items() if name not in CHANGES_SEMANTICS}
    if "error" in clean.get("PYTHONWARNINGS", ""):
        del clean["PYTHONWARNINGS"]
    if encoding.lower().replace("-", "") != "utf8":
        clean["PYTHONUTF8"] = "1"
        clean["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"
    return clean


def prepare() -> None:
    """Give this process what libraries expect: three open descriptors, text streams that can print
    any character, a user name, a sensible terminal size."""
    open_standard_streams()
    if Path(sys.argv[0]).name == "swarmnode":
        # `python -m` puts the working directory first, where a user's random.py would be imported
        os.environ.setdefault("PYTHONSAFEPATH", "1")
    for stream in (sys.stdout, sys.stderr):
        # "strict" would end a command at the first character that the terminal cannot show
        with contextlib.suppress(AttributeError, ValueError, OSError):
            if stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    for name in ("COLUMNS", "LINES"):
        text = os.environ.get(name, "")
        if text and not (text.isascii() and text.isdecimal() and int(text[:9]) in WIDTHS):
            del os.environ[name]
    try:
        getpass.getuser()
    except (KeyError, OSError, ImportError):
        os.environ["LOGNAME"] = f"uid{os.getuid()}"  # torch names its cache after the user


def open_standard_streams() -> None:
    """Open /dev/null in place of a closed standard stream. Otherwise the next file would take its
    number, and a warning or a child would write into it."""
    for fd, mode in enumerate(("r", "w", "w")):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
        name = ("stdin", "stdout", "stderr")[fd]
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def provide_directories(data_dir: Path) -> None:
    """Name the data directory as home and as place for temporary files where there is none."""
    if not os.path.isabs(os.path.expanduser("~")):
        os.environ["HOME"] = str(data_dir)
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        temporary = data_dir / "tmp"
        with contextlib.suppress(OSError):
            temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.environ["TMPDIR"] = str(temporary)


def obeyed() -> list[str]:
    """Return the names of the variables that torch and transformers may obey."""
    return sorted(name for name in os.environ if name.startswith(LIBRARIES))

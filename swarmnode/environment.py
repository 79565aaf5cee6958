"""Repair the environment that this process inherits from a shell, container or service manager.

Python and its libraries obey many environment variables. They expect three open descriptors, a
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
    "PYTHONHASHSEED",  # peers choose keys of many dictionaries
    "PYTHONDEVMODE",
    "PYTHONDEBUG",
    "PYTHONVERBOSE",
    "PYTHONDUMPREFS",
    "PYTHONTRACEMALLOC",
    "PYTHONMALLOCSTATS",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONASYNCIODEBUG",
)
"""Interpreter variables for debugging. A node must run without them."""
WIDTHS = range(20, 1001)
"""Accepted values of COLUMNS and LINES. Libraries fail at 0 and fill memory at a million."""
LIBRARIES = ("CUDA_", "HF_", "MKL_", "OMP_", "PYTORCH_", "TORCH", "TRANSFORMERS_")
"""Prefixes of variables that torch, transformers or their libraries obey."""


def restart_if_needed() -> None:
    """Restart this process with a clean environment if necessary.

    A restart is necessary if the environment contains variables that a node must not obey, or if
    Python would read files in another encoding than UTF-8. Other programs that import this module
    are never restarted.
    """
    program = Path(sys.argv[0])
    if program.name != "swarmnode" and program.parts[-2:] != ("swarmnode", "__main__.py"):
        return
    clean = clean_variables(os.environ, locale.getpreferredencoding(False))
    if clean != dict(os.environ):
        with contextlib.suppress(OSError):
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], clean)


def clean_variables(environment: Mapping[str, str], encoding: str) -> dict[str, str]:
    """Return `environment` without variables that a node must not obey.

    Args:
        encoding: Encoding of the locale. If it is not UTF-8, the result makes Python read files as
            UTF-8 while standard output keeps the encoding of the locale.
    """
    clean = {name: text for name, text in environment.items() if name not in CHANGES_SEMANTICS}
    if "error" in clean.get("PYTHONWARNINGS", ""):
        del clean["PYTHONWARNINGS"]
    if encoding.lower().replace("-", "") != "utf8":
        clean["PYTHONUTF8"] = "1"
        clean["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"
    return clean


def prepare() -> None:
    """Set up what libraries expect: three open descriptors, text streams that can print any
    character, a user name, a sensible terminal size."""
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
    """Open /dev/null in place of a closed standard stream. Otherwise the next file that
    is opened would take its number, and a warning or a child would write into that file."""
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
    """Use the data directory as home directory, for caches and for temporary files, if there is no
    other, for example because the root file system is read-only."""
    import platformdirs

    if not os.path.isabs(os.path.expanduser("~")):
        os.environ["HOME"] = str(data_dir)
    cache = platformdirs.user_cache_path()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        os.environ["XDG_CACHE_HOME"] = str(data_dir.absolute() / "cache")
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        temporary = data_dir / "tmp"
        with contextlib.suppress(OSError):
            temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.environ["TMPDIR"] = str(temporary)


def library_variables() -> list[str]:
    """Return the names of the set variables that torch and transformers may obey."""
    return sorted(name for name in os.environ if name.startswith(LIBRARIES))

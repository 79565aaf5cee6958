"""Build the release files and try them without the checkout: `make dist`.

checkout → sdist → unpacked, links of README.md rewritten for PyPI → dist/*.tar.gz, dist/*.whl
→ twine check → fresh virtual environment with the wheel → swarmnode demo --tiny
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LISTS = ROOT / "requirements"
LINK = re.compile(r"(!?)\[([^\]\n]*)\]\((?![a-z]+:)([^)\s]+)\)")
"""A Markdown link or image whose target is a path or an anchor."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--repository",
        default="",
        help="https address of the project; without it, PyPI's page has no links",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--torch-index", default="", help="package index that torch comes from first"
    )
    parser.add_argument("--no-trial", action="store_true", help="build and check only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarmnode-dist-") as directory:
        files = build(Path(directory), args.out, args.repository)
        run(sys.executable, "-m", "twine", "check", "--strict", *files)
        if not args.no_trial:
            try_wheel(
                Path(directory), next(f for f in files if f.suffix == ".whl"), args.torch_index
            )
    print(*files, sep="\n")
    return 0


def build(directory: Path, out: Path, repository: str) -> list[Path]:
    """Build sdist and wheel into `out` from an unpacked first sdist. Return their paths."""
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "sdist",
        "-d",
        directory / "first",
        cwd=ROOT,
    )
    (archive,) = (directory / "first").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(directory / "tree", filter="data")
    (tree,) = (directory / "tree").iterdir()
    make_fit_for_pypi(tree, repository.rstrip("/"))
    for old in out.glob("swarmnode_rl-*"):
        old.unlink()
    run(sys.executable, "-m", "hatchling", "build", "-d", out.absolute(), cwd=tree)
    return sorted(out.glob("swarmnode_rl-*"))


def make_fit_for_pypi(tree: Path, repository: str) -> None:
    """Rewrite the links of README.md in `tree`. Add `repository` to its metadata if it is given."""
    project = tree / "pyproject.toml"
    version = tomllib.loads(project.read_text())["project"]["version"]
    readme = tree / "README.md"
    readme.write_text(absolute_links(readme.read_text(), repository, f"v{version}"))
    if repository:
        urls = f'\n[project.urls]\nRepository = "{repository}"\n'
        project.write_text(project.read_text() + urls)


def absolute_links(text: str, repository: str, tag: str) -> str:
    """Return `text` with links that work on PyPI, where a relative link leads nowhere.

    Without a repository a link becomes its text and path, and an image disappears.
    """

    def replacement(link: re.Match[str]) -> str:
        image, label, target = link.groups()
        if target.startswith("#"):
            return label
        if repository:
            return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/{tag}/{target})"
        if image:
            return ""
        return label if label in target else f"{label} ({target})"

    return LINK.sub(replacement, text)


def try_wheel(directory: Path, wheel: Path, torch_index: str) -> None:
    """Install `wheel` into a fresh environment and run the demo from it, away from the checkout."""
    python = directory / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", directory / "venv")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = ["--requirement", LISTS / "torch.txt"]
    from_index = [*pip, "--retries", "1", "--index-url", torch_index, *torch]
    if not torch_index or subprocess.run(from_index, cwd=directory).returncode != 0:
        run(*pip, *torch, cwd=directory)
    run(*pip, "--no-deps", "--requirement", LISTS / "trainer.txt", cwd=directory)
    run(*pip, "--no-deps", wheel.absolute(), cwd=directory)
    home = {"HOME": str(directory), "XDG_CONFIG_HOME": str(directory), "PYTHONPATH": ""}
    run(python.with_name("swarmnode"), "--version", cwd=directory, env=home)
    run(
        python.with_name("swarmnode"), "demo", "--tiny", "--http-port", "0", cwd=directory, env=home
    )


def run(*command: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    """Print and run a command. If it fails, end this program with the exit code of the command."""
    words = [str(word) for word in command]
    print("+", *words, flush=True)
    done = subprocess.run(words, cwd=cwd, env={**os.environ, **(env or {})})
    if done.returncode != 0:
        sys.exit(done.returncode)


if __name__ == "__main__":
    sys.exit(main())

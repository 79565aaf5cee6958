"""Rules of CONTRIBUTING.md that no linter checks."""

import re
import subprocess
from pathlib import Path

from tests.mutations.__main__ import load

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "swarmnode").rglob("*.py"))


def test_no_model_brings_code():
    """ruff rejects functions that execute data."""
    asked = [path.name for path in SOURCES if "trust_remote_code=True" in path.read_text()]
    assert asked == []


def test_product_imports_neither_tests_nor_tools():
    needs = re.compile(r"\b^\s*(?:from|import) (?:tests|tools|benchmarks)\b", re.MULTILINE)
    assert [path.name for path in SOURCES if needs.search(path.read_text())] == []


def test_no_local_paths():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    pattern = re.compile(r"(?:^|[^A-Za-z0-9_.])/(?:home|root|work|Users)/")
    found = []
    for name in listed:
        path = ROOT / name
        if (
            path.suffix in {".py", ".md", ".toml", ".json", ".yml", ".yaml", ".sh", ".service", ""}
            and path.is_file()
        ):
            found += [
                name
                for line in path.read_text(errors="replace").splitlines()
                if pattern.search(line)
            ]
    assert [name for name in found if not name.endswith("test_house_rules.py")] == []


def test_make_bench_runs_every_quick_benchmark():
    quick = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if "make_parser(" in path.read_text()
    }
    (named,) = re.findall(
        r"^\tfor name in (.*?); do .* --quick", (ROOT / "Makefile").read_text(), re.M
    )
    assert quick - {"soak"} == set(named.split())  # soak is a separate, long target


def test_every_mutation_applies_and_its_tests_exist():
    for mutation in load():
        mutation.apply()
        missing = [test for test in mutation.tests if not (ROOT / test.partition("::")[0]).exists()]
        assert missing == [], mutation.name

"""Rules of CONTRIBUTING.md that no linter checks."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "swarmnode").rglob("*.py"))
DANGEROUS = re.compile(
    r"\b(?:c?pickle|dill|marshal|shelve)\b|torch\.load\(|(?<![.\w])(?:eval|exec)\(|parse_expr|sympify|trust_remote_code=True"
)


def code_of(path):
    """Return the code without comments and docstrings, which may explain why something is
    dangerous."""
    import io
    import tokenize

    kept = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in (
            tokenize.COMMENT,
            tokenize.STRING,
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
        ):
            kept.append((token.start[0], token.string))
    lines = {}
    for number, text in kept:
        before = lines.get(number, "")
        lines[number] = (
            before + (" " if before[-1:].isidentifier() and text.isidentifier() else "") + text
        )
    return lines


def test_package_never_executes_data():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {text}"
        for path in SOURCES
        for number, text in code_of(path).items()
        if DANGEROUS.search(text)
    ]
    assert found == []


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

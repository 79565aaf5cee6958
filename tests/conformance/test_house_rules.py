"""Rules of CONTRIBUTING.md that a machine can hold us to."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support import counting

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "swarmnode").rglob("*.py"))
DANGEROUS = re.compile(
    r"\b(?:c?pickle|dill|marshal|shelve)\b|torch\.load\(|(?<![.\w])(?:eval|exec)\(|parse_expr|sympify|trust_remote_code=True"
)


def code_of(path):
    """Without comments and docstrings: saying why something is dangerous is allowed."""
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


def test_nothing_that_executes_data_is_in_the_package():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {text}"
        for path in SOURCES
        for number, text in code_of(path).items()
        if DANGEROUS.search(text)
    ]
    assert found == []


def test_the_search_finds_what_it_is_there_for(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import pickle\nx = torch.load(f)\ny = eval(text)\nmodel.eval()\nz = 'eval(1)'\n"
    )
    assert [number for number, text in code_of(bad).items() if DANGEROUS.search(text)] == [1, 2, 3]


def test_nothing_that_runs_needs_the_testing_package():
    product = [path for path in SOURCES if ROOT / "swarmnode" / "testing" not in path.parents]
    assert [
        path.name
        for path in product
        if "swarmnode.testing" in path.read_text() or "tests.support" in path.read_text()
    ] == []


def test_no_path_of_somebody_s_machine():
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*pip, "--wheel-dir", str(directory), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=110,
    )
    (path,) = directory.glob("*.whl")
    return path


def test_the_wheel_has_the_data_it_needs_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for needed in (
        "policy/embedded/model.safetensors",
        "policy/embedded/tokenizer.json",
        "observe/page/index.html",
        "observe/page/app.js",
    ):
        assert f"swarmnode/{needed}" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"swarmnode"}


def test_the_wheel_answers_outside_the_checkout(wheel, tmp_path):
    unpacked = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(unpacked)
    code = (
        "import swarmnode, swarmnode.cli; print(swarmnode.__file__); swarmnode.cli.run(['--help'])"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(unpacked)!r}); {code}"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert result.stdout.startswith(str(unpacked))
    assert "demo" in result.stdout


def test_the_readmes_tree_names_every_folder_and_nothing_else():
    tree = re.search(r"```\nswarmnode/\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[
        1
    ].splitlines()
    inner = {line.split("/")[0].strip() for line in tree if line.startswith("  ")}
    outer = {line.split("/")[0] for line in tree if not line.startswith("  ")}
    folders = lambda where: {
        path.name
        for path in where.iterdir()
        if path.is_dir() and not path.name.startswith((".", "_"))
    }
    tracked = {
        name.split("/")[0]
        for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
        if "/" in name
    }
    assert inner == folders(ROOT / "swarmnode")
    assert outer | {"swarmnode"} == {name for name in tracked if not name.startswith(".")}


def test_every_page_is_listed():
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} == listed


def test_make_bench_runs_every_benchmark_that_has_a_quick_form():
    quick = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if re.search(r'add_argument\(\s*"--quick"', path.read_text())
    }
    (named,) = re.findall(
        r"^\tfor name in (.*?); do .* --quick", (ROOT / "Makefile").read_text(), re.M
    )
    assert quick - {"soak"} == set(named.split())  # soak is a target by itself, and lasts


def test_torch_is_pinned_for_set_up_and_open_for_everybody_else():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "torch>=2.6" in project["project"]["optional-dependencies"]["trainer"]
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()


# ---- counts --------------------------------------------------------------------------------------
#
# Each may only fall: whoever lowers one lowers its bound.

TOP_LEVEL_FILES = 8
ANY_LINES = 23
BROAD_HANDLERS_IN_P2P = 6
SIMPLE_NAMESPACES = 0
DIALECT = 0
TAKES_CONFIG = 16
PRIVATE_REACHES_OF_TESTS = 124
CONTRACT_ENTRIES = 10
PARAMETERS = 8
ATTRIBUTES = 14

IGNORED_ERRORS = {"swarmnode.p2p.guards.*"}


def shown(paths):
    """Relative to the checkout, as `counting` shall name them."""
    return [path.relative_to(ROOT) for path in paths]


@pytest.fixture
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_top_level_has_few_files():
    assert len(list((ROOT / "swarmnode").glob("*.py"))) <= TOP_LEVEL_FILES


@pytest.mark.usefixtures("at_root")
@pytest.mark.parametrize(
    ("most", "found"),
    [
        pytest.param(
            ANY_LINES, lambda: counting.lines_naming("Any", shown(SOURCES)), id="lines with Any"
        ),
        pytest.param(
            SIMPLE_NAMESPACES,
            lambda: counting.lines_naming("SimpleNamespace", shown(SOURCES)),
            id="SimpleNamespace for a type",
        ),
        pytest.param(
            BROAD_HANDLERS_IN_P2P,
            lambda: counting.broad_handlers(shown((ROOT / "swarmnode" / "p2p").rglob("*.py"))),
            id="except Exception in p2p",
        ),
        pytest.param(
            DIALECT, lambda: counting.dialect(shown(SOURCES)), id="docstrings without a subject"
        ),
        pytest.param(
            TAKES_CONFIG,
            lambda: counting.taking("Config", shown(SOURCES)),
            id="functions that take all of Config",
        ),
        pytest.param(
            PRIVATE_REACHES_OF_TESTS,
            lambda: counting.private_reaches(shown((ROOT / "tests").rglob("*.py"))),
            id="private names used by tests",
        ),
    ],
)
def test_at_most_so_many(most, found):
    places = found()
    assert len(places) <= most, "\n".join(places)


@pytest.mark.usefixtures("at_root")
@pytest.mark.parametrize(
    "found",
    [
        pytest.param(
            lambda: counting.many_parameters(shown(SOURCES), PARAMETERS),
            id="parameters of a function",
        ),
        pytest.param(
            lambda: counting.many_attributes(shown(SOURCES), ATTRIBUTES), id="attributes of a class"
        ),
    ],
)
def test_shapes(found):
    assert found() == {}


def test_types_are_asked_for_everywhere():
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    ignored = {
        module
        for entry in mypy["overrides"]
        if entry.get("ignore_errors")
        for module in entry["module"]
    }
    assert ignored <= IGNORED_ERRORS
    assert mypy["disallow_untyped_defs"]
    assert all(entry.get("disallow_untyped_defs", True) for entry in mypy["overrides"])


def test_the_network_process_is_a_short_list():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (without_torch,) = [
        contract
        for contract in contracts
        if contract["name"] == "the network process never loads torch"
    ]
    assert len(without_torch["source_modules"]) <= CONTRACT_ENTRIES
    (layers,) = [contract for contract in contracts if contract["type"] == "layers"]
    assert layers["exhaustive"]


MADE_UP = '''
"""Of nothing."""
from typing import Any
from types import SimpleNamespace
from other import _theirs

# Any, in a comment
@app.command
def command(a, b, c): "Any"

def whole(config: Config, *, maybe: "Config | None" = None) -> Any:
    """That it holds."""
    try:
        return SimpleNamespace(other=config._private)
    except Exception:
        pass
    try:
        return [config.part for part in ()]
    except BaseException:
        raise

class Small:
    size: int
    """Whoever it is of."""
    def __init__(self, a, b):
        self.a, self._b = a, b

class Large(Small):
    """Often large."""
    def grow(self, c: Any, part: ConfigPart):
        self.c = self._b
        monkeypatch.setattr(self.c, "_d", 3)
'''


def test_the_counts_count(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("made.py")
    path.write_text(MADE_UP)
    assert counting.lines_naming("Any", [path]) == ["made.py:11", "made.py:30"]
    assert counting.lines_naming("SimpleNamespace", [path]) == ["made.py:14"]
    assert counting.broad_handlers([path]) == ["made.py:15"]
    assert [line.split(": ")[1] for line in counting.dialect([path])] == [
        "Of nothing.",
        "That it holds.",
        "Whoever it is of.",
    ]
    assert counting.taking("Config", [path]) == ["made.py:whole", "made.py:whole"]
    assert counting.many_parameters([path], 1) == {
        "made.py:whole": 2,
        "made.py:Small.__init__": 2,
        "made.py:Large.grow": 2,
    }
    assert counting.many_attributes([path], 2) == {"made.py:Large": 3}
    assert counting.private_reaches([path]) == [
        "made.py:5: _theirs",
        "made.py:14: _private",
        "made.py:32: _d",
    ]

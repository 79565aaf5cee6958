"""What set-up installs for whom: a newcomer sees nodes learn after one install of what a node
needs."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = {
    "trl",
    "datasets",
    "mypy",
    "pytest",
    "pytest-trio",
    "ruff",
    "hypothesis",
    "import-linter",
    "kubernetes-validate",
}


def packages(*extras):
    """Names of the packages that swarmnode with these extras asks for, those of extras that they
    name included."""
    names = {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]}
    for extra in extras:
        for line in PROJECT["optional-dependencies"][extra]:
            inner = re.fullmatch(r"swarmnode-rl\[(.*)\]", line)
            names |= packages(*inner[1].split(",")) if inner else {re.match(r"[\w-]+", line)[0]}
    return names


def installs(target, tmp_path):
    """The commands of pip that `make target` would run in a fresh checkout."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(
        ["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True
    )
    return [line for line in done.stdout.splitlines() if "/pip install" in line]


def extras_of(commands):
    found = re.findall(r"'\.\[([\w,]+)\]'", "\n".join(commands))
    return sorted({extra for some in found for extra in some.split(",")})


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("demo", ["trainer"]),
        ("test", ["test", "trainer"]),
        ("check", ["check", "test", "trainer"]),
        ("bench", ["test", "trainer"]),
    ],
)
def test_each_command_installs_what_it_needs_and_no_more(target, extras, tmp_path):
    assert extras_of(installs(target, tmp_path)) == extras


def test_what_the_demo_needs_has_no_tool_of_the_tests():
    assert not packages("trainer") & TOOLS
    assert packages("test", "check") >= TOOLS


def test_the_network_alone_needs_no_torch():
    assert not packages() & {
        "torch",
        "transformers",
        "accelerate",
        "peft",
        "safetensors",
        "numpy",
        "reasoning-gym",
    }
    assert packages("train") - packages("trainer") == {"reasoning-gym"}


def test_reasoning_gym_comes_in_the_version_of_the_tasks_without_what_it_depends_on(tmp_path):
    (pinned,) = [
        line
        for line in PROJECT["optional-dependencies"]["train"]
        if line.startswith("reasoning-gym")
    ]
    (command,) = [line for line in installs("demo", tmp_path) if pinned in line]
    assert "--no-deps" in command

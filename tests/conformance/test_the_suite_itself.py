"""A group of tests that has to run and was skipped fails the run: otherwise a tool that is not
installed is silent."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = {
    "nat/test_skipped.py": (
        "import pytest\n@pytest.mark.skipif(True, reason='no tool')\ndef test_it(): pass\ndef"
        " test_other(): pass\n"
    ),
    "deploy/test_module.py": (
        "import pytest\npytest.importorskip('no_such_module')\ndef test_it(): pass\n"
    ),
    "swarm/test_ran.py": "def test_it(): pass\n",
}


@pytest.fixture
def suite(tmp_path):
    for name, text in TESTS.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    shutil.copy(CONFTEST, tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\ntestpaths = tests\naddopts = -p no:cacheprovider\n"
    )

    def run(*options):
        command = [sys.executable, "-m", "pytest", *options]
        # what the run around it was given
        alone = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
        }
        return subprocess.run(
            command, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=60
        )

    return run


@pytest.mark.parametrize("workers", [["-n0"], ["-n", "1", "--dist", "loadfile"]])
def test_what_was_skipped_is_listed_and_fails_the_run(suite, workers):
    told = suite(
        *workers, "--must-run=nat", "--must-run=deploy", "--must-run=swarm", "--must-run=browser"
    )
    assert told.returncode == pytest.ExitCode.TESTS_FAILED
    complaints = [
        line
        for line in told.stdout.splitlines()
        if line.endswith(("skipped", "no test ran")) and ":" in line
    ]
    assert sorted(complaints) == [
        "browser: no test ran",
        "deploy: no test ran",
        "tests/deploy/test_module.py: skipped",
        "tests/nat/test_skipped.py::test_it: skipped",
    ]


def test_a_run_without_such_groups_may_skip(suite):
    assert suite("-n0", "--must-run=swarm").returncode == pytest.ExitCode.OK
    assert suite("-n0").returncode == pytest.ExitCode.OK

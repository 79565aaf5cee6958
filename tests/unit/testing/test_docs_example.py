"""The file in docs/testing.md is a test file that passes, in a directory of its own and without
anything of this repository's tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]


def test_the_example_runs(tmp_path):
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "testing.md").read_text(), re.S
    )
    (tmp_path / "test_example.py").write_text(example)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntrio_mode = true\n")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider"]
    told = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "3 passed" in told.stdout

"""A whole node started in a hostile environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ODD = {
    "PYTHONOPTIMIZE": "2",
    "PYTHONINSPECT": "1",
    "PYTHONWARNINGS": "error",
    "PYTHONHASHSEED": "0",
    "PYTHONIOENCODING": "ascii",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "LC_ALL": "C",
    "COLUMNS": "0",
    "TMPDIR": "/nonexistent",
    "OMP_NUM_THREADS": "0",
    "CUDA_VISIBLE_DEVICES": "junk",
}
OPTIONS = (
    "http.port=0",
    "network.mdns=false",
    'network.listen_addrs=["/ip4/127.0.0.1/tcp/0"]',
    "policy.devices=cpu",
    "training.max_steps=1",
    "training.num_generations=2",
    "training.eval_every=1000",
)
PROGRAM = "import sys\nfrom swarmnode.__main__ import main\nsys.exit(main())\n"


@pytest.mark.swarm
@pytest.mark.parametrize("redirected", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_a_node_trains_in_a_hostile_environment(tmp_path: Path, redirected: str) -> None:
    (tmp_path / "swarmnode").write_text(PROGRAM)  # as an installed command is
    here = tmp_path / "here"
    here.mkdir()
    for module in ("random", "torch", "datasets"):
        (here / f"{module}.py").write_text("raise SystemExit('the user\\'s own module')")
    command = [sys.executable, str(tmp_path / "swarmnode"), "run", "-d", str(tmp_path / "node")]
    for option in OPTIONS:
        command += ["-s", option]
    path = os.pathsep.join(each for each in sys.path if each)
    environment = {**os.environ, **ODD, "PYTHONPATH": path, "HOME": "relative"}
    ran = subprocess.run(
        ["bash", "-c", f'exec "$@" {redirected}', "bash", *command],
        cwd=here,
        env=environment,
        timeout=240,
        check=False,
    )
    log = "".join(file.read_text() for file in (tmp_path / "node" / "log").glob("*.jsonl"))
    assert ran.returncode == 0, log
    assert (tmp_path / "node" / "trainer" / "state.safetensors").exists()
    assert not (here / "relative").exists()

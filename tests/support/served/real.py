"""A real vLLM server for tests, started by the command that `swarmnode vllm-command` prints.

SWARMNODE_VLLM is the Python of an environment with vLLM, which tests/support/served/install.sh
creates.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from swarmnode.config import Config
from swarmnode.policy.engine.vllm_command import vllm_command
from tests.support.waiting import free_port

VARIABLE = "SWARMNODE_VLLM"
START_SECONDS = 600.0


def python() -> str:
    """Return the Python that has vLLM, or an empty string."""
    return os.environ.get(VARIABLE, "")


@contextlib.contextmanager
def running(model: str, log: Path, rank: int = 8) -> Iterator[str]:
    """Yield the URL of a server for a value of `policy.model`, once it answers."""
    url = f"http://127.0.0.1:{free_port()}"
    server = {"url": url}
    settings = {"model": model, "devices": "cpu", "lora": {"r": rank}, "server": server}
    made = vllm_command(Config.model_validate({"policy": settings}))
    environment = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    environment |= {**made.environment, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [python(), *made.arguments[1:]],
            env=environment,
            cwd=log.parent,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_for(url, process, log)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    late = time.monotonic() + START_SECONDS
    while time.monotonic() < late and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"vLLM did not start:\n{log.read_text(errors='replace')[-2000:]}")

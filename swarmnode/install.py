"""Install commands for error messages, and a check that torch can be imported.

The commands list the packages of an extra of pyproject.toml instead of `swarmnode[extra]`, for two
reasons. The name `swarmnode` on PyPI belongs to another project. And pip would resolve py-libp2p's
dependencies again, one of which needs a compiler.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from swarmnode.errors import Unavailable

EXTRAS = {
    "data": ("datasets>=3.0",),
    "gymnasium": ("gymnasium>=1.2",),
    "math": (
        "antlr4-python3-runtime==4.13.2",
        "latex2sympy2-extended==1.11.0",
        "math-verify==0.9.0",
        "sympy==1.14.0",
    ),
    "quant": ("bitsandbytes>=0.45",),
    "train": (
        "accelerate>=1.0",
        "numpy>=1.26",
        "peft>=0.13",
        "pyyaml>=6.0.2",
        "safetensors>=0.4.5",
        "torch>=2.6",
        "transformers>=5.19",
    ),
    "verifiers": ("verifiers>=0.4,<0.5",),
}
"""Packages of each extra. `train` also needs `REASONING_GYM`."""
REASONING_GYM = "reasoning-gym==0.1.25"
"""Installed without its dependencies. The tasks import only PyYAML, which `train` contains."""
LISTS = Path(__file__).resolve().parents[1] / "requirements"
"""The pinned lists. They exist in a checkout only."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TRIAL_SECONDS = 300.0
"""Timeout of importing torch, which takes a minute from a cold disk."""


def install_command(extra: str) -> str:
    """Return the shell command that installs the packages of `extra`."""
    if extra != "train":
        return f"pip install {shlex.join(EXTRAS[extra])}"
    if (LISTS / "trainer.txt").is_file():
        torch, trainer = (shlex.quote(str(LISTS / name)) for name in ("torch.txt", "trainer.txt"))
        return f"pip install -r {torch} && pip install --no-deps -r {trainer}"
    packages = shlex.join(EXTRAS["train"])
    return f"pip install {packages} && pip install --no-deps {REASONING_GYM}"


def check_torch() -> None:
    """Import torch in a child process, which takes a second or two.

    Raises:
        Unavailable: torch is installed and its import fails; the message names the remedy.
    """
    command = [sys.executable, "-c", "import torch"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(torch_failure(f"no end within {TRIAL_SECONDS:.0f} s")) from None
    if done.returncode < 0:
        raise Unavailable(torch_failure(f"killed by {signal.Signals(-done.returncode).name}"))
    if done.returncode > 0:
        lines = done.stderr.strip().splitlines()
        raise Unavailable(torch_failure(lines[-1] if lines else f"exit code {done.returncode}"))


def torch_failure(cause: str) -> str:
    """Return the error line for an import of torch that failed with `cause`."""
    spec = importlib.util.find_spec("torch")
    where = f" in {Path(spec.origin).parent}" if spec is not None and spec.origin else ""
    return f"torch{where} cannot be imported: {' '.join(cause.split())[:500]}: {torch_remedy()}"


def torch_remedy() -> str:
    """Return the command that installs torch again, with the libraries that it depends on."""
    try:
        version = f"=={importlib.metadata.version('torch').partition('+')[0]}"
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return f"pip install --force-reinstall torch{version} (without a GPU: --index-url {CPU_INDEX})"

"""Where tests of tasksets find verifiers: the real package, if it is installed, or the stand-in."""

import importlib.util
from pathlib import Path

STAND_IN = Path(__file__).parent / "standin"
"""Has the signatures of verifiers 0.4.0 that swarmnode uses."""
IS_REAL = importlib.util.find_spec("verifiers") is not None

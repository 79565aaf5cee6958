"""Where this directory is on PYTHONPATH, `time.time` is the clock of a machine that is wrong by what the file named in SKEW_FILE says.

Seconds, as text; no file is no skew. The file is looked at once in a tenth of a second, so that a running process's clock can be set.
"""

import os
import time

_file = os.environ.get("SKEW_FILE", "")
_true, _true_ns, _monotonic = time.time, time.time_ns, time.monotonic
_known = [0.0, -1.0]
"""The skew, and when it was looked at."""


def _skew():
    now = _monotonic()
    if now - _known[1] > 0.1:
        _known[1] = now
        try:
            with open(_file) as file:
                _known[0] = float(file.read() or 0)
        except (OSError, ValueError):
            _known[0] = 0.0
    return _known[0]


if _file:
    time.time = lambda: _true() + _skew()
    time.time_ns = lambda: _true_ns() + int(_skew() * 1e9)

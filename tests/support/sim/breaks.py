"""Four defects put into the product on purpose, to see whether the simulator finds them: each as a
patch for the time of a simulation.

guard      a group's question need not be its author's any more
deadline   whoever asks for groups waits for ever
commit     the exchange is not told what the trainer has committed
storm      whoever publishes far more than it may is not found
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

from swarmnode.p2p.storms import Storms
from swarmnode.rollouts import admission
from swarmnode.rollouts.pace import Throughput
from swarmnode.weights.exchange import Exchange

BREAKS: dict[str, tuple[Any, str, Any]] = {
    "guard": (admission, "check_seed", mock.Mock(return_value=True)),
    "deadline": (Throughput, "deadline", mock.Mock(return_value=math.inf)),
    "commit": (Exchange, "exchange_ended", mock.Mock()),
    "storm": (Storms, "found", mock.Mock(return_value=False)),
}


@contextlib.contextmanager
def broken(name: str) -> Iterator[None]:
    """With "" nothing is broken."""
    with mock.patch.object(*BREAKS[name]) if name else contextlib.nullcontext():
        yield

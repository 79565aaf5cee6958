"""Three deliberate defects in the product, to check that the simulator finds them. Each is a patch
for one simulation.

guard      a group's question need not be its author's
deadline   requests for groups have no deadline
commit     the exchange does not learn about commits of the trainer
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

from swarmnode.rollouts.network import admission, exchange
from swarmnode.weights.network.swaps import SwapService

BREAKS: dict[str, tuple[Any, str, Any]] = {
    "guard": (admission, "check_seed", mock.Mock(return_value=True)),
    "deadline": (exchange, "fetch_deadline", mock.Mock(return_value=math.inf)),
    "commit": (SwapService, "swap_ended", mock.Mock()),
}


@contextlib.contextmanager
def broken(name: str) -> Iterator[None]:
    """Apply a defect. The empty name applies none."""
    with mock.patch.object(*BREAKS[name]) if name else contextlib.nullcontext():
        yield

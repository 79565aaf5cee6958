import logging
from collections.abc import Iterator

import pytest
import structlog

from swarmnode.observe.logs import NOISY


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Restore the configuration of logging after each test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in NOISY}
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, was in levels.items():
        logging.getLogger(name).setLevel(was)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()

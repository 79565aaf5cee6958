"""A seat that cannot be taken: the crew is told, and the process that would have sat there goes on."""

import threading

import pytest

from swarmnode.errors import ConfigError, DeviceError, PeerError, StateError
from swarmnode.stages.local import Assigned
from swarmnode.trainer.crew_seat import Sitting


class NoRecovery:
    def journal(self, assigned):
        return None


@pytest.mark.parametrize("error", [ConfigError, DeviceError, StateError, PeerError])
def test_a_stage_that_cannot_be_built_is_said_to_have_failed(error):
    said, failed = [], threading.Event()

    def send(status):
        said.append(status)
        if status.phase == "failed":
            failed.set()

    def build(assigned):
        raise error("not this one")

    sitting = Sitting(build, NoRecovery(), send, lambda what: None)
    sitting.start()
    try:
        sitting.receive(Assigned(b"c" * 32, 1, 0, (1, 1), (9, 9), ("a", "b"), 0, True, False, ""))
        assert failed.wait(10)
        assert said[-1].reason == "not this one"
        sitting.check()
    finally:
        sitting.stop()

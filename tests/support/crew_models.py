"""The objects that a crew trainer opens for a complete configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from swarmnode.config import Config
from swarmnode.stages.crew_messages import StageAssignment
from swarmnode.stages.trainer.crew_model import CrewModel, open_model
from swarmnode.stages.trainer.restore import StageRecovery
from swarmnode.stages.trainer.stage import Stage
from swarmnode.stages.trainer.stage_averaging import StageAveraging
from swarmnode.stages.trainer.stage_checkpoints import recovery_settings
from swarmnode.trainer.state import adapter_shape


@contextlib.contextmanager
def opened(*, policy: Any = (), **sections: Any) -> Iterator[tuple[Config, CrewModel]]:
    """Open the model of a configuration on a CPU that always trains in crews."""
    policy = {"devices": "cpu", **dict(policy)}
    config = Config.model_validate({"policy": policy, "stages": {"mode": "always"}, **sections})
    with open_model(config) as model:
        yield config, model


def stage_of(model: CrewModel, assigned: StageAssignment) -> Stage:
    runtime = model.build(assigned.layers, assigned.stage)
    return Stage(assigned, runtime, model.settings(), model.limits())


def averaging_of(config: Config, stage: Stage, send, **more) -> StageAveraging:
    adapter = adapter_shape(config.policy.lora)
    return StageAveraging(config.weights, adapter, config.node.data_dir, stage, send, **more)


def recovery_of(config: Config, model: CrewModel, directory, averaging=lambda: None):
    """Return the recovery of a stage, with state streams through the sockets of a network
    process."""
    return StageRecovery(directory, recovery_settings(config.stages), model, averaging)

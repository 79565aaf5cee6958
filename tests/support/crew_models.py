"""The objects that a crew trainer opens for a complete configuration."""

from __future__ import annotations

from swarmnode.config import Config
from swarmnode.stages.crew_messages import StageAssignment
from swarmnode.stages.trainer.crew_model import CrewModel
from swarmnode.stages.trainer.restore import StageRecovery
from swarmnode.stages.trainer.stage import Stage
from swarmnode.stages.trainer.stage_averaging import StageAveraging
from swarmnode.stages.trainer.stage_checkpoints import recovery_settings
from swarmnode.trainer.state import adapter_shape


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

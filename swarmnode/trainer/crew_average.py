"""NoLoCo of one stage, with the same stage of other crews: the replica of `trainer.weights`, over this stage's tensors alone.

Names are the whole model's, so the layout, and with it the fingerprint that partners compare, says which layers these are: a stage pairs
with holders of exactly the same ones, and a whole policy with none of them. Corrections are applied where a step has just been taken, the
one moment at which all stages move and no wave is under way.

Not averaged is a tied embedding that is trained: both ends hold it, and two partners would make two of it. There is no probe either: no
stage can judge a policy of which it has a part; norm, direction and distance of a partner's weights are judged as ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from swarmnode.config import Config
from swarmnode.policy.micro import MicroBatcher
from swarmnode.stages.member import Member, Observer
from swarmnode.trainer.crew_stage import Stage
from swarmnode.trainer.engine import adapter_shape
from swarmnode.trainer.messages import WeightsReport
from swarmnode.trainer.state import Counters
from swarmnode.trainer.weights import Replica
from swarmnode.weights import local


class StageAveraging(Observer):
    """Make it while the stage has the base weights: the codec is relative to them. connected: is there a network process?"""

    def __init__(
        self, config: Config, stage: Stage, send: Callable[[local.FromTrainer], None], connected: Callable[[], bool] = lambda: True
    ) -> None:  # fmt: skip
        self._counters = Counters()
        self._connected = connected
        self._since = time.monotonic()
        tensors = averaged(stage)
        policy: Any = SimpleNamespace(model=SimpleNamespace(named_parameters=lambda: iter(tensors.items())))
        self._replica = Replica(
            policy, config.weights, self._counters, MicroBatcher(config.training.per_device_train_tokens), config.node.data_dir,
            lock=stage.lock, send=send, adapter=adapter_shape(config),
        )  # fmt: skip

    def begin(self) -> None:
        """The stage has its weights: slow weights are theirs, without momentum."""
        self._replica.restore({})

    def committed(self, member: Member) -> None:
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._counters.step = member.participant.step
        self._replica.between_steps(self._connected(), seconds, stepped=True)

    def receive(self, message: local.ToTrainer) -> None:
        """From the link's thread."""
        self._replica.receive(message)

    def facts(self) -> local.ReplicaFacts:
        return self._replica.facts(False)

    def report(self) -> WeightsReport:
        return self._replica.report()

    def close(self) -> None:
        self._replica.close()


def averaged(stage: Stage) -> dict[str, torch.nn.Parameter]:
    """Name in the whole model → what is averaged of this stage; empty where that is nothing."""
    spec, shared = stage.runtime.spec, stage.runtime.embedding()
    return {spec.whole(n): p for n, p in stage.runtime.model.named_parameters() if p.requires_grad and p is not shared}


def make_averaging(
    config: Config, stage: Stage, send: Callable[[local.FromTrainer], None], connected: Callable[[], bool]
) -> StageAveraging | None:  # fmt: skip
    """None where nothing is averaged."""
    return StageAveraging(config, stage, send, connected) if config.weights.rule != "off" and averaged(stage) else None

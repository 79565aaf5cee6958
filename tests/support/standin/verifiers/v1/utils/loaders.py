from __future__ import annotations

import importlib

from verifiers.v1 import Taskset, TasksetConfig


def taskset_class(taskset_id: str) -> type[Taskset]:
    module = importlib.import_module(taskset_id.replace("-", "_").lower())
    (name,) = module.__all__
    return getattr(module, name)


def taskset_config_type(taskset_id: str) -> type[TasksetConfig]:
    return TasksetConfig


def load_taskset(config: TasksetConfig) -> Taskset:
    return taskset_class(config.id)(config)

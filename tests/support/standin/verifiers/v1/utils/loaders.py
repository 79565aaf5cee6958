from __future__ import annotations

import importlib
from typing import get_args

from verifiers.v1 import Env, EnvConfig, SingleAgentEnv, Taskset, TasksetConfig


def _exported(taskset_id: str, base: type) -> list[type]:
    module = importlib.import_module(taskset_id.replace("-", "_").lower())
    return [one for one in map(vars(module).get, module.__all__) if issubclass(one, base)]


def taskset_class(taskset_id: str) -> type[Taskset]:
    (found,) = _exported(taskset_id, Taskset)
    return found


def taskset_config_type(taskset_id: str) -> type[TasksetConfig]:
    return TasksetConfig


def load_taskset(config: TasksetConfig) -> Taskset:
    return taskset_class(config.id)(config)


def environment_class(taskset_id: str, env_id: str = "") -> type[Env]:
    return next(iter(_exported(taskset_id, Env)), SingleAgentEnv)


def env_config_type(taskset_id: str, env_id: str = "") -> type[EnvConfig]:
    return get_args(environment_class(taskset_id).__orig_bases__[0])[0]  # type: ignore[attr-defined]

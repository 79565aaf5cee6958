"""Tasksets of verifiers (v1): their data as rows of a dataset, their rewards in the scorer's child.
docs/own-task.md lists what works.

verifiers is imported in two places alone: the child that makes rows (`fetch`), and the scorer child
before it locks itself in.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from swarmnode.errors import ConfigError
from swarmnode.install import install_command
from swarmnode.tasks import own

if TYPE_CHECKING:
    from types import ModuleType

PREFIX = "verifiers:"
"""What a dataset's source, and then its verifier, begins with; the id of an installed taskset
follows."""


def find(source: str) -> own.Source:
    """The code of an installed taskset, which is not imported. Raises ConfigError."""
    return own.find(f"{_module(source)}:taskset")


def release() -> str:
    """The installed version of verifiers, which is part of a task's. Raises ConfigError."""
    try:
        return importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"task.datasets: a taskset needs verifiers: {install_command('verifiers')}"
        ) from None


def _module(source: str) -> str:
    """verifiers' own rule from an id to a module."""
    return source.removeprefix(PREFIX).rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def rows(source: str) -> Iterator[dict[str, str]]:
    """Every task of a taskset: its prompt, and all of its data. Runs its code. Raises ValueError
    for what cannot be trained on."""
    # what is imported is what was hashed, and not bytecode that lies beside it
    sys.pycache_prefix = os.devnull
    _verifiers()
    own.imported_from(find(source), source)
    from verifiers.v1.utils import loaders

    name = source.removeprefix(PREFIX)
    taskset = loaders.load_taskset(loaders.taskset_config_type(name)(id=name))
    if not taskset.bounded:
        raise ValueError(
            f"{name} is infinite: make a finite taskset of it, for example with take(n)"
        )
    if taskset.task_type().NEEDS_CONTAINER:
        raise ValueError(
            f"{name} needs a container: only rewards that read nothing but the answer can be judged"
            " in the sandbox"
        )
    for task in taskset:
        prompt, system = task.data.prompt, task.data.system_prompt
        if not isinstance(prompt, str) and any(message.role != "user" for message in prompt or []):
            raise ValueError(
                f"{name}: a prompt of several roles: only what a user says in one turn can be asked"
            )
        text = f"{system}\n\n{task.data.prompt_text}" if system else task.data.prompt_text
        yield {"prompt": text, "answer": "", "data": task.data.model_dump_json()}


def reward_function(source: str, code: own.Source) -> own.RewardFunction:
    """What a taskset gives an answer: its rewards by their weights, divided by the weights where
    these are more than 1 together.

    Rewards that need a runtime are left out, as by verifiers itself. Raises ConfigError.
    """
    vf = _verifiers()
    own.imported_from(code, source)
    from verifiers.v1.utils import decorators, loaders

    try:
        task_type = loaders.taskset_class(source.removeprefix(PREFIX)).task_type()
        data_type, build = task_type.data_type(), vf.VersionInfo(version=release())
    except Exception as error:
        raise ConfigError(f"task.datasets: {source}: {own.one_line(error)}") from error

    def scored(text: str, row: str) -> float:
        data = data_type.model_validate_json(row)
        task = task_type(data)
        if task.plugged_judges():
            raise ValueError("a judge is a model, which the sandbox does not have")
        said = [vf.MessageNode(message=vf.UserMessage(content=data.prompt_text))]
        said.append(
            vf.MessageNode(parent=0, message=vf.AssistantMessage(content=text), sampled=True)
        )
        trace = vf.Trace(
            id="",
            verifiers=build,
            task=vf.TraceTask(type=task_type.__name__, data=data),
            agent=vf.AgentInfo.model_construct(),
            nodes=said,
        )
        total = weights = 0.0
        for function in task.hooks("reward"):
            runtime = inspect.signature(function).parameters.get("runtime")
            if runtime is not None and runtime.default is inspect.Parameter.empty:
                continue
            result: float | Mapping[str, float] = own.finished(
                decorators.invoke(function, {"task": data, "trace": trace})
            )
            for value in result.values() if isinstance(result, Mapping) else [result]:
                weights += function._vf_weight
                total += function._vf_weight * float(value)
        if weights <= 0:
            raise ValueError("it has no reward that does without a runtime")
        return total / max(1.0, weights)

    return lambda prompts, completions, data, **_: [
        scored(text, row) for text, row in zip(completions, data, strict=True)
    ]


def _verifiers() -> ModuleType:
    with own.bytecode():
        import verifiers.v1 as vf
    return vf

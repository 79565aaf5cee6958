"""Tasksets of verifiers (v1): their data as rows of a dataset, their rewards and their environments
in the scorer child. docs/own-task.md lists what is supported.

    one answer      @vf.reward(task, trace)                          ─▶ reward
    an episode      Env.run(task, agents), a coroutine of the package
                    `await interaction.turn(message)` suspends it    ─▶ text out, action in
                    @vf.stop, @vf.reward, Env.finalize               ─▶ end, reward

The sandbox has no event loop, model, container or network. An environment that needs one is refused
with an error that names it.

Only two processes import verifiers: the child that makes rows (`fetch`), and the scorer child
before it enters its sandbox.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import os
import sys
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from swarmnode.errors import ConfigError
from swarmnode.install import install_command
from swarmnode.tasks import own, owner_code

if TYPE_CHECKING:
    from types import ModuleType

PREFIX = "verifiers:"
"""Prefix of a dataset's source, and then of its verifier, before the id of an installed taskset."""


def find(source: str) -> owner_code.Source:
    """Find the code of an installed taskset without importing it. Raises ConfigError."""
    return owner_code.find(f"{_module_name(source)}:taskset")


def installed_version() -> str:
    """Return the installed version of verifiers, which is part of a task's version. Raises
    ConfigError.
    """
    try:
        return importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"task.datasets: a taskset needs verifiers: {install_command('verifiers')}"
        ) from None


def _module_name(source: str) -> str:
    """Return the module of a taskset's id, by the rule of verifiers."""
    return source.removeprefix(PREFIX).rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def rows(source: str) -> Iterator[dict[str, str]]:
    """Yield prompt and data of every task of a taskset. Runs its code. Raises ValueError if the
    taskset cannot be trained on.
    """
    # Import the hashed files, not bytecode beside them.
    sys.pycache_prefix = os.devnull
    _import_verifiers()
    owner_code.import_hashed(find(source), source)
    from verifiers.v1.utils import loaders

    name = source.removeprefix(PREFIX)
    taskset = loaders.load_taskset(loaders.taskset_config_type(name)(id=name))
    if not taskset.bounded:
        raise ValueError(f"{name} is infinite: use a finite part of it, for example take(n)")
    if taskset.task_type().NEEDS_CONTAINER:
        raise ValueError(
            f"{name} needs a container: the sandbox can only judge rewards that read nothing but"
            " the answer"
        )
    for task in taskset:
        prompt = task.data.prompt
        if not isinstance(prompt, str) and any(message.role != "user" for message in prompt or []):
            raise ValueError(
                f"{name}: a prompt of several roles: only a prompt of the role user is supported"
            )
        data = task.data.model_dump_json()
        # The environment opens a task without a prompt; the data then identify its row.
        text = task.data.prompt_text
        yield {
            "prompt": _with_system_prompt(task.data, text) if text else data,
            "answer": "",
            "data": data,
        }


def _with_system_prompt(data: Any, text: str) -> str:  # noqa: ANN401 # the library is not imported here
    """Return `text` after the task's system prompt, if it has one."""
    return "\n\n".join(part for part in (data.system_prompt, text) if part)


def reward_function(source: str, code: owner_code.Source) -> own.RewardFunction:
    """Return the reward function of a taskset whose tasks take one answer. Raises ConfigError."""
    vf = _import_verifiers()
    owner_code.import_hashed(code, source)
    from verifiers.v1.utils import loaders

    name = source.removeprefix(PREFIX)
    try:
        task_type = loaders.taskset_class(name).task_type()
        data_type, environment_type = task_type.data_type(), loaders.environment_class(name)
    except Exception as error:
        raise ConfigError(f"task.datasets: {source}: {owner_code.one_line(error)}") from error
    if environment_type is not vf.SingleAgentEnv:
        raise ConfigError(
            f"task.datasets: {source}: {environment_type.__name__} plays several turns: set turns"
            " to the maximum number of actions of an episode"
        )

    def scored(text: str, row: str) -> float:
        task = task_type(data_type.model_validate_json(row))
        trace = _empty_trace(task)
        _append_message(trace, vf.UserMessage(content=task.data.prompt_text))
        _append_message(trace, vf.AssistantMessage(content=text), sampled=True)
        _record_scores(task, trace)
        return _total_reward(trace)

    return lambda prompts, completions, data, **_: [
        scored(text, row) for text, row in zip(completions, data, strict=True)
    ]


def _empty_trace(task: Any) -> Any:  # noqa: ANN401
    """Return an empty trace of `task`, without a random id and without a time."""
    vf = _import_verifiers()
    from verifiers import __version__
    from verifiers.v1.state import state_cls

    return vf.Trace(
        id="",
        verifiers=vf.VersionInfo(version=__version__),
        task=vf.TraceTask(type=type(task).__name__, data=task.data),
        agent=vf.AgentInfo.model_construct(),
        state=state_cls(type(task))(),
    )


def _append_message(trace: Any, message: Any, *, sampled: bool = False) -> None:  # noqa: ANN401
    parent = len(trace.nodes) - 1 if trace.nodes else None
    node = _import_verifiers().MessageNode(parent=parent, message=message, sampled=sampled)
    trace.nodes.append(node)


def _record_scores(task: Any, trace: Any) -> None:  # noqa: ANN401
    """Record the task's metrics and rewards, as `Task.score` does without a runtime.

    Raises ValueError for a judge, TypeError for code that waits, and what that code raises.
    """
    from verifiers.v1.utils import decorators

    if task.plugged_judges():
        raise ValueError("a judge is a model, which the sandbox does not have")
    for kind in ("metric", "reward"):
        for function in task.hooks(kind):
            runtime = inspect.signature(function).parameters.get("runtime")
            if runtime is not None and runtime.default is inspect.Parameter.empty:
                continue
            result: float | Mapping[str, float] = owner_code.run_coroutine(
                decorators.invoke(function, {"task": task.data, "trace": trace})
            )
            named = result if isinstance(result, Mapping) else {function.__name__: result}
            for name, value in named.items():
                if kind == "metric":
                    trace.record_metric(name, value)
                else:
                    trace.record_reward(name, value, function._vf_weight)


def _total_reward(trace: Any) -> float:  # noqa: ANN401
    """Return the sum of the weighted rewards, divided by the sum of the weights if that is above 1.
    Raises ValueError if there is no reward.
    """
    rewards = [reward for reward in trace.rewards.values() if reward is not None]
    weights = sum(reward.weight for reward in rewards)
    if weights <= 0:
        raise ValueError("it has no reward that works without a runtime")
    total: float = sum(reward.score * reward.weight for reward in rewards)
    return total / max(1.0, weights)


# ---- episodes ------------------------------------------------------------------------------------

Step = Callable[[str], tuple[str, float, bool]]


def environment(source: str, code: owner_code.Source, template: str) -> own.Generator:
    """Return the function that begins an episode of a taskset's environment: `(data, turns)`.

    Args:
        template: Template around the first text.

    Raises:
        ConfigError: The environment needs more than turns of one policy.
    """
    _import_verifiers()
    owner_code.import_hashed(code, source)
    from verifiers.v1.utils import loaders

    name = source.removeprefix(PREFIX)
    try:
        environment_type = loaders.environment_class(name)
        env = environment_type(loaders.env_config_type(name)(taskset={"id": name}))
        role, config = _find_agent(env)
        task_type = loaders.taskset_class(name).task_type()
        data_type = task_type.data_type()
        _stop_hooks(task_type)
        owner_code.run_coroutine(env.start())
    except Exception as error:
        problem = error if isinstance(error, _Unsupported) else owner_code.one_line(error)
        raise ConfigError(f"task.datasets: {source}: {problem}") from error

    def begin(data: str, turns: int) -> tuple[str, Step]:
        task = task_type(data_type.model_validate_json(data))
        max_turns = turns if config.max_turns is None else min(turns, config.max_turns)
        agent = _Agent(role, config, max_turns)
        episode = _play_episode(env, task, agent)

        def step(action: str) -> tuple[str, float, bool]:
            text, reward = _resume(episode, action)
            if reward is None:
                return text, 0.0, False
            return agent.unread, reward, True

        first, reward = _resume(episode, None)
        if reward is not None:
            raise ValueError("the environment ended before its first turn")
        return template.replace("{prompt}", first), step

    return begin


class _Unsupported(ValueError):
    """Raised if an environment needs something that the sandbox does not have."""


def _find_agent(env: Any) -> tuple[str, Any]:  # noqa: ANN401
    """Return name and configuration of the only agent of an environment. Raises _Unsupported for an
    environment that needs more than turns.
    """
    vf = _import_verifiers()
    from verifiers.v1.configs.agent import agent_config_fields

    class_name, tasks = type(env).__name__, type(env.taskset)
    task_type, configs = tasks.task_type(), agent_config_fields(env.config)
    if isinstance(env, vf.SingleAgentEnv):
        raise _Unsupported("it has no environment of several turns: leave turns out")
    if len(configs) != 1:
        names = ", ".join(configs)
        raise _Unsupported(
            f"{class_name} has the agents {names}: one is the policy, the others are models, which"
            " the sandbox does not have"
        )
    ((role, config),) = configs.items()
    if config.model is not None or config.client is not None:
        raise _Unsupported(f"{class_name}: its agent {role} is a model of its own, not the policy")
    if any((config.max_input_tokens, config.max_output_tokens, config.max_total_tokens)):
        raise _Unsupported(
            f"{class_name}: its agent {role} has a limit of tokens: set max_turns instead"
        )
    if task_type.NEEDS_CONTAINER:
        raise _Unsupported(
            f"{task_type.__name__} needs a container, which the sandbox does not have"
        )
    if task_type.toolsets(env.taskset.config.task) or tasks.toolsets(env.taskset.config):
        raise _Unsupported(
            f"{class_name} has tool servers, which need a network, and the sandbox has none"
        )
    return role, config


Episode = Coroutine[Any, Any, float]


async def _play_episode(env: Any, task: Any, agent: _Agent) -> float:  # noqa: ANN401
    """Play one task, as `Env.run_episode` does, and return its reward."""
    vf = _import_verifiers()
    agents = types.SimpleNamespace(**{agent.role: agent})
    await env.setup(agents)
    await env.run(task, agents)
    trace = agent.trace
    if trace is None:
        raise ValueError(f"{type(env).__name__}.run() had no conversation")
    trace_task = vf.TraceTask(type=type(task).__name__, data=task.data)
    await env.finalize(task, vf.Episode(id="", task=trace_task, ok=True, traces=[trace]))
    return _total_reward(trace)


class _Text(str):
    """Text for the policy; a suspended conversation yields it."""


@types.coroutine
def _wait_for_action(text: str) -> Generator[_Text, str, str]:
    """Suspend the episode until `_resume` sends the policy's action."""
    return (yield _Text(text))


def _resume(episode: Episode, action: str | None) -> tuple[str, float | None]:
    """Continue an episode up to its next turn or its end.

    Returns:
        Text for the policy, and the reward at the end of the episode, else None.

    Raises:
        TypeError: The episode waits for something other than a turn.
        Exception: Any error of the environment.
    """
    try:
        text = episode.send(action)
    except StopIteration as stop:
        return "", stop.value
    if not isinstance(text, _Text):
        episode.close()
        raise TypeError("it waits for something other than a turn, which the sandbox does not have")
    return str(text), None


class _Agent:
    """The policy as an agent of verifiers that can only take turns."""

    def __init__(self, role: str, config: Any, turns: int) -> None:  # noqa: ANN401
        self.role, self.config, self._turns = role, config, turns
        self.trainable = True
        self.trace: Any = None
        self.unread = ""
        """The environment's last message, if the episode ended before the policy read it."""

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"agents.{self.role}.{name}: the policy can only take turns, by interaction(task):"
            " the sandbox has no model, container or network"
        )

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any, **resources: object) -> AsyncIterator[_Conversation]:  # noqa: ANN401
        """Open the conversation; scoring follows when the environment leaves it."""
        from verifiers.v1.utils import decorators

        if self.trace is not None:
            raise TypeError("a second conversation: an episode has one")
        if any(each is not None for each in resources.values()):
            raise TypeError(f"it asks for {', '.join(resources)}, which the sandbox does not have")
        trace = self.trace = _empty_trace(task)
        given = {"trace": trace, "runtime": _NoRuntime()}
        await decorators.invoke(task.setup, given)
        yield _Conversation(self, task, self._turns)
        trace.stop("user_closed")
        trace.ok = True
        await decorators.invoke(task.finalize, given)
        _record_scores(task, trace)


class _NoRuntime:
    """Replaces the container or process of verifiers."""

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"runtime.{name}: the sandbox has no container and no process")


class _Conversation:
    """verifiers' `Interaction` without a model."""

    def __init__(self, agent: _Agent, task: Any, turns: int) -> None:  # noqa: ANN401
        self.trace = agent.trace
        self._agent, self._task, self._turns = agent, task, turns
        self._stops, self._over = _stop_hooks(task.__class__), False

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"interaction.{name}: the sandbox has only turn(message) and trace")

    async def turn(self, message: Any = None) -> Any:  # noqa: ANN401
        """Show a message to the policy and return its answer as a `Segment`. The segment is
        terminated at a limit or a `@vf.stop`.

        Args:
            message: A text or messages of the user; None for the first turn of a task with a
                prompt.
        """
        vf, data = _import_verifiers(), self._task.data
        prompted = not self.trace.nodes and data.prompt is not None
        if self._over:
            raise RuntimeError("the conversation is over: its last segment was terminated")
        if (message is None) != prompted:
            raise ValueError(
                "turn() without a message is for the first turn of a task with a prompt"
            )
        texts = _read_texts(data.prompt_text if message is None else message)
        self._agent.unread = "\n\n".join(texts)
        self._over = self.trace.num_turns >= self._turns or any(map(self._stopped, self._stops))
        if self._over:
            return vf.Segment(messages=[], terminated=True)
        text = self._agent.unread
        if not self.trace.nodes:
            text = _with_system_prompt(data, text)
            if data.system_prompt:
                _append_message(self.trace, vf.SystemMessage(content=data.system_prompt))
        for each in texts:
            _append_message(self.trace, vf.UserMessage(content=each))
        answer = vf.AssistantMessage(content=await _wait_for_action(text))
        self._agent.unread = ""
        _append_message(self.trace, answer, sampled=True)
        return vf.Segment(messages=[answer])

    def _stopped(self, name: str) -> bool:
        found = getattr(self._task, name)(self.trace)
        return bool(owner_code.run_coroutine(found) if inspect.iscoroutine(found) else found)


@functools.cache
def _stop_hooks(task_type: type[object]) -> list[str]:
    """Return the names of a task's `@vf.stop` methods, which read the trace. Raises _Unsupported
    for hooks that read a model's requests or responses.

    Call it before the process enters its sandbox, because it evaluates annotations.
    """
    from verifiers.v1 import session
    from verifiers.v1.utils import decorators

    task = object.__new__(task_type)  # hooks are methods of an instance; they need no data here
    hooks = decorators.discover_decorated(task, "stop")
    boundaries = [session.hook_boundary(hook, allow_trace=True) for hook in hooks]
    if decorators.discover_decorated(task, "intercept") or {*boundaries} - {
        _import_verifiers().Trace
    }:
        raise _Unsupported(
            f"{task_type.__name__} has hooks on a model's requests or responses: only @vf.stop on"
            " the trace can be used"
        )
    return [hook.__name__ for hook in hooks]


def _read_texts(message: Any) -> list[str]:  # noqa: ANN401
    """Return the texts of a turn. Raises TypeError if a message is not a text of the user."""
    if isinstance(message, str):
        return [message]
    fields = [each if isinstance(each, dict) else vars(each) for each in message]
    if any(each.get("role") != "user" or type(each.get("content")) is not str for each in fields):
        raise TypeError("a turn has only texts of the role user")
    return [each["content"] for each in fields]


def _import_verifiers() -> ModuleType:
    with owner_code.cached_bytecode():
        import verifiers.v1 as vf
    return vf

"""Tasksets of verifiers (v1): their data as rows of a dataset, their rewards and their environments
in the scorer child. docs/own-task.md lists what works.

    one answer      @vf.reward(task, trace)                          ─▶ reward
    an episode      Env.run(task, agents), a coroutine of the package
                    `await interaction.turn(message)` suspends it    ─▶ text out, action in
                    @vf.stop, @vf.reward, Env.finalize               ─▶ end, reward

The sandbox has no event loop, no model, no container and no network. An environment that needs one
is refused with a line that names it.

verifiers is imported in two places alone: the child that makes rows (`fetch`), and the scorer child
before it locks itself in.
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
        prompt = task.data.prompt
        if not isinstance(prompt, str) and any(message.role != "user" for message in prompt or []):
            raise ValueError(
                f"{name}: a prompt of several roles: only what a user says in one turn can be asked"
            )
        data = task.data.model_dump_json()
        # A task without a prompt is opened by its environment; its row is known by its data.
        text = task.data.prompt_text
        yield {"prompt": _instructed(task.data, text) if text else data, "answer": "", "data": data}


def _instructed(data: Any, text: str) -> str:  # noqa: ANN401 # the library is not imported here
    """Return `text` behind the task's system prompt, if it has one."""
    return "\n\n".join(part for part in (data.system_prompt, text) if part)


def reward_function(source: str, code: own.Source) -> own.RewardFunction:
    """Return the reward function of a taskset whose tasks take one answer. Raises ConfigError."""
    vf = _verifiers()
    own.imported_from(code, source)
    from verifiers.v1.utils import loaders

    name = source.removeprefix(PREFIX)
    try:
        task_type = loaders.taskset_class(name).task_type()
        data_type, environment_type = task_type.data_type(), loaders.environment_class(name)
    except Exception as error:
        raise ConfigError(f"task.datasets: {source}: {own.one_line(error)}") from error
    if environment_type is not vf.SingleAgentEnv:
        raise ConfigError(
            f"task.datasets: {source}: {environment_type.__name__} plays several turns: set turns"
            " to the most actions of an episode"
        )

    def scored(text: str, row: str) -> float:
        task = task_type(data_type.model_validate_json(row))
        trace = _trace(task)
        _say(trace, vf.UserMessage(content=task.data.prompt_text))
        _say(trace, vf.AssistantMessage(content=text), sampled=True)
        _score(task, trace)
        return _reward(trace)

    return lambda prompts, completions, data, **_: [
        scored(text, row) for text, row in zip(completions, data, strict=True)
    ]


def _trace(task: Any) -> Any:  # noqa: ANN401
    """Return an empty trace of `task`. It has no random id and no clock decides anything in it."""
    vf = _verifiers()
    from verifiers import __version__
    from verifiers.v1.state import state_cls

    return vf.Trace(
        id="",
        verifiers=vf.VersionInfo(version=__version__),
        task=vf.TraceTask(type=type(task).__name__, data=task.data),
        agent=vf.AgentInfo.model_construct(),
        state=state_cls(type(task))(),
    )


def _say(trace: Any, message: Any, *, sampled: bool = False) -> None:  # noqa: ANN401
    parent = len(trace.nodes) - 1 if trace.nodes else None
    node = _verifiers().MessageNode(parent=parent, message=message, sampled=sampled)
    trace.nodes.append(node)


def _score(task: Any, trace: Any) -> None:  # noqa: ANN401
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
            result: float | Mapping[str, float] = own.finished(
                decorators.invoke(function, {"task": task.data, "trace": trace})
            )
            named = result if isinstance(result, Mapping) else {function.__name__: result}
            for name, value in named.items():
                if kind == "metric":
                    trace.record_metric(name, value)
                else:
                    trace.record_reward(name, value, function._vf_weight)


def _reward(trace: Any) -> float:  # noqa: ANN401
    """Return the rewards by their weights, divided by the weights where these are more than 1
    together. Raises ValueError if there is no reward."""
    rewards = [reward for reward in trace.rewards.values() if reward is not None]
    weights = sum(reward.weight for reward in rewards)
    if weights <= 0:
        raise ValueError("it has no reward that does without a runtime")
    total: float = sum(reward.score * reward.weight for reward in rewards)
    return total / max(1.0, weights)


# ---- episodes ------------------------------------------------------------------------------------

Step = Callable[[str], tuple[str, float, bool]]


def environment(source: str, code: own.Source, template: str) -> own.Generator:
    """Return the function that begins an episode of a taskset's environment: `(data, turns)`.

    Args:
        template: Put around the first text.

    Raises:
        ConfigError: The environment needs more than turns of one policy.
    """
    _verifiers()
    own.imported_from(code, source)
    from verifiers.v1.utils import loaders

    name = source.removeprefix(PREFIX)
    try:
        environment_type = loaders.environment_class(name)
        played = environment_type(loaders.env_config_type(name)(taskset={"id": name}))
        role, seat = _seat(played)
        task_type = loaders.taskset_class(name).task_type()
        data_type = task_type.data_type()
        _stops(task_type)
        own.finished(played.start())
    except Exception as error:
        told = error if isinstance(error, _Refused) else own.one_line(error)
        raise ConfigError(f"task.datasets: {source}: {told}") from error

    def begin(data: str, turns: int) -> tuple[str, Step]:
        task = task_type(data_type.model_validate_json(data))
        most = turns if seat.max_turns is None else min(turns, seat.max_turns)
        agent = _Agent(role, seat, most)
        episode = _episode(played, task, agent)

        def step(action: str) -> tuple[str, float, bool]:
            text, reward = _resumed(episode, action)
            if reward is None:
                return text, 0.0, False
            return agent.unread, reward, True

        first, reward = _resumed(episode, None)
        if reward is not None:
            raise ValueError("the environment ended before its first turn")
        return template.replace("{prompt}", first), step

    return begin


class _Refused(ValueError):
    """What an environment needs, and the sandbox does not have."""


def _seat(played: Any) -> tuple[str, Any]:  # noqa: ANN401
    """Return name and configuration of the one agent of an environment. Raises _Refused for an
    environment that needs more than turns."""
    vf = _verifiers()
    from verifiers.v1.configs.agent import agent_config_fields

    called, tasks = type(played).__name__, type(played.taskset)
    task_type, seats = tasks.task_type(), agent_config_fields(played.config)
    if isinstance(played, vf.SingleAgentEnv):
        raise _Refused("it has no environment of several turns: leave turns out")
    if len(seats) != 1:
        names = ", ".join(seats)
        raise _Refused(
            f"{called} has the agents {names}: one is the policy, the others are models, which the"
            " sandbox does not have"
        )
    ((role, seat),) = seats.items()
    if seat.model is not None or seat.client is not None:
        raise _Refused(f"{called}: its agent {role} is a model of its own, not the policy")
    if any((seat.max_input_tokens, seat.max_output_tokens, seat.max_total_tokens)):
        raise _Refused(f"{called}: its agent {role} has a limit of tokens: set max_turns instead")
    if task_type.NEEDS_CONTAINER:
        raise _Refused(f"{task_type.__name__} needs a container, which the sandbox does not have")
    if task_type.toolsets(played.taskset.config.task) or tasks.toolsets(played.taskset.config):
        raise _Refused(f"{called} has tool servers, which need a network that the sandbox has not")
    return role, seat


Episode = Coroutine[Any, Any, float]


async def _episode(played: Any, task: Any, agent: _Agent) -> float:  # noqa: ANN401
    """Play one task, as `Env.run_episode` does, and return its reward."""
    vf = _verifiers()
    agents = types.SimpleNamespace(**{agent.role: agent})
    await played.setup(agents)
    await played.run(task, agents)
    trace = agent.trace
    if trace is None:
        raise ValueError(f"{type(played).__name__}.run() had no conversation")
    about = vf.TraceTask(type=type(task).__name__, data=task.data)
    await played.finalize(task, vf.Episode(id="", task=about, ok=True, traces=[trace]))
    return _reward(trace)


class _Text(str):
    """What a conversation waits with: the text for the policy."""


@types.coroutine
def _action(text: str) -> Generator[_Text, str, str]:
    """Suspend the episode until `_resumed` is given the policy's action."""
    return (yield _Text(text))


def _resumed(episode: Episode, action: str | None) -> tuple[str, float | None]:
    """Continue an episode up to its next turn or its end: (text for the policy, reward or None).

    Raises TypeError if it waits for something else, and whatever it raises.
    """
    try:
        text = episode.send(action)
    except StopIteration as stop:
        return "", stop.value
    if not isinstance(text, _Text):
        episode.close()
        raise TypeError("it waits for something else than a turn, which the sandbox does not have")
    return str(text), None


class _Agent:
    """The policy, as an environment sees it: an agent that can only take turns."""

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
    async def interaction(self, task: Any, **borrowed: object) -> AsyncIterator[_Conversation]:  # noqa: ANN401
        """Open the conversation; scoring follows when the environment leaves it."""
        from verifiers.v1.utils import decorators

        if self.trace is not None:
            raise TypeError("a second conversation: an episode is one")
        if any(each is not None for each in borrowed.values()):
            raise TypeError(f"it asks for {', '.join(borrowed)}, which the sandbox does not have")
        trace = self.trace = _trace(task)
        given = {"trace": trace, "runtime": _NoRuntime()}
        await decorators.invoke(task.setup, given)
        yield _Conversation(self, task, self._turns)
        trace.stop("user_closed")
        trace.ok = True
        await decorators.invoke(task.finalize, given)
        _score(task, trace)


class _NoRuntime:
    """Stands where verifiers has a container or a process."""

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"runtime.{name}: the sandbox has no container and no process")


class _Conversation:
    """verifiers' `Interaction`, without a model behind it."""

    def __init__(self, agent: _Agent, task: Any, turns: int) -> None:  # noqa: ANN401
        self.trace = agent.trace
        self._agent, self._task, self._turns = agent, task, turns
        self._stops, self._over = _stops(task.__class__), False

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"interaction.{name}: the sandbox has turn(message) and trace alone")

    async def turn(self, message: Any = None) -> Any:  # noqa: ANN401
        """Show a message to the policy and return its answer as a `Segment`; a terminated one at a
        limit or a `@vf.stop`.

        Args:
            message: A text or messages of the user; None for the first turn of a task with a
                prompt.
        """
        vf, data = _verifiers(), self._task.data
        prompted = not self.trace.nodes and data.prompt is not None
        if self._over:
            raise RuntimeError("the conversation is over: its last segment was terminated")
        if (message is None) != prompted:
            raise ValueError(
                "turn() without a message is for the first turn of a task with a prompt"
            )
        said = _texts(data.prompt_text if message is None else message)
        self._agent.unread = "\n\n".join(said)
        self._over = self.trace.num_turns >= self._turns or any(map(self._stopped, self._stops))
        if self._over:
            return vf.Segment(messages=[], terminated=True)
        text = self._agent.unread
        if not self.trace.nodes:
            text = _instructed(data, text)
            if data.system_prompt:
                _say(self.trace, vf.SystemMessage(content=data.system_prompt))
        for each in said:
            _say(self.trace, vf.UserMessage(content=each))
        answer = vf.AssistantMessage(content=await _action(text))
        self._agent.unread = ""
        _say(self.trace, answer, sampled=True)
        return vf.Segment(messages=[answer])

    def _stopped(self, name: str) -> bool:
        found = getattr(self._task, name)(self.trace)
        return bool(own.finished(found) if inspect.iscoroutine(found) else found)


@functools.cache
def _stops(task_type: type[object]) -> list[str]:
    """Return the names of a task's `@vf.stop` methods, which look at the trace. Raises _Refused for
    hooks that look at a model's requests and responses.

    It reads annotations, which the sandbox refuses to evaluate: so it has to be called before.
    """
    from verifiers.v1 import session
    from verifiers.v1.utils import decorators

    task = object.__new__(task_type)  # hooks are methods of an instance, whatever its data
    hooks = decorators.discover_decorated(task, "stop")
    kinds = [session.hook_boundary(hook, allow_trace=True) for hook in hooks]
    if decorators.discover_decorated(task, "intercept") or {*kinds} - {_verifiers().Trace}:
        raise _Refused(
            f"{task_type.__name__} has hooks on a model's requests or responses: only @vf.stop on"
            " the trace can be used"
        )
    return [hook.__name__ for hook in hooks]


def _texts(message: Any) -> list[str]:  # noqa: ANN401
    """Return the texts of a turn. Raises TypeError for what is not a text of the user."""
    if isinstance(message, str):
        return [message]
    fields = [each if isinstance(each, dict) else vars(each) for each in message]
    if any(each.get("role") != "user" or type(each.get("content")) is not str for each in fields):
        raise TypeError("a turn has texts of the role user alone")
    return [each["content"] for each in fields]


def _verifiers() -> ModuleType:
    with own.bytecode():
        import verifiers.v1 as vf
    return vf

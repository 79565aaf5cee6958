from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Generic, get_args

from pydantic import BaseModel, ConfigDict
from typing_extensions import TypeVar

from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
from verifiers.v1.state import State
from verifiers.v1.utils.decorators import discover_decorated, intercept, metric, reward, stop

__all__ = [
    "AgentConfig",
    "Env",
    "EnvConfig",
    "State",
    "Task",
    "TaskData",
    "Taskset",
    "TasksetConfig",
    "Trace",
    "intercept",
    "metric",
    "reward",
    "stop",
]


class UserMessage(BaseModel):
    role: str = "user"
    content: str


class SystemMessage(BaseModel):
    role: str = "system"
    content: str


class AssistantMessage(BaseModel):
    role: str = "assistant"
    content: str | None = None


class TaskData(BaseModel):
    model_config = ConfigDict(frozen=True)
    idx: int | None = None
    prompt: str | list[UserMessage | SystemMessage] | None = None
    system_prompt: str | None = None

    @property
    def prompt_text(self) -> str:
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n\n".join(message.content for message in self.prompt or [])


class TaskConfig(BaseModel):
    judges: list[str] = []


class TasksetConfig(BaseModel):
    id: str = ""
    task: TaskConfig = TaskConfig()


class VersionInfo(BaseModel):
    version: str


class AgentInfo(BaseModel):
    name: str = "agent"


class MessageNode(BaseModel):
    parent: int | None = None
    message: SystemMessage | UserMessage | AssistantMessage
    sampled: bool = False


class TraceTask(BaseModel):
    type: str
    data: Any


class Reward(BaseModel):
    score: float
    weight: float = 1.0


class Trace(BaseModel):
    id: str = ""
    verifiers: VersionInfo | None = None
    task: TraceTask
    agent: AgentInfo
    nodes: list[MessageNode] = []
    state: State = State()
    rewards: dict[str, Reward | None] = {}
    metrics: dict[str, float | None] = {}
    ok: bool = False
    stop_condition: str | None = None

    @property
    def num_turns(self) -> int:
        return sum(node.sampled for node in self.nodes)

    def record_reward(self, name: str, value: float, weight: float = 1.0) -> None:
        self.rewards[name] = Reward(score=float(value), weight=float(weight))

    def record_metric(self, name: str, value: float) -> None:
        self.metrics[name] = float(value)

    def stop(self, condition: str, override: bool = False) -> None:
        self.stop_condition = condition

    @property
    def assistant_messages(self) -> list[AssistantMessage]:
        return [node.message for node in self.nodes if isinstance(node.message, AssistantMessage)]

    @property
    def last_reply(self) -> str:
        return (self.assistant_messages[-1].content or "").strip()


class Request(BaseModel):
    pass


class Segment(BaseModel):
    messages: list[AssistantMessage]
    terminated: bool = False

    @property
    def last_reply(self) -> str:
        return (self.messages[-1].content or "").strip() if self.messages else ""


class Episode(BaseModel):
    id: str = ""
    task: TraceTask
    ok: bool = False
    traces: list[Trace] = []


class Runtime:
    pass


DataT = TypeVar("DataT", bound=TaskData)
StateT = TypeVar("StateT", default=State)
TaskT = TypeVar("TaskT")


class Task(Generic[DataT, StateT]):
    NEEDS_CONTAINER: ClassVar[bool] = False

    def __init__(self, data: DataT, config: TaskConfig | None = None) -> None:
        self.data = data
        self.config = config if config is not None else TaskConfig()

    async def setup(self, trace: Trace, runtime: Runtime) -> None:
        return None

    async def finalize(self, trace: Trace, runtime: Runtime) -> None:
        return None

    def plugged_judges(self) -> list[Any]:
        return list(self.config.judges)

    def hooks(self, attr: str) -> list[Any]:
        return discover_decorated(self, attr)

    @classmethod
    def data_type(cls) -> type[TaskData]:
        return get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]

    @classmethod
    def toolsets(cls, config: TaskConfig) -> list[Any]:
        return []


class Taskset(Generic[TaskT]):
    INFINITE: bool = False

    def __init__(self, config: TasksetConfig) -> None:
        self.config = config

    @property
    def bounded(self) -> bool:
        return not self.INFINITE

    def load(self) -> Iterable[TaskT]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[TaskT]:
        for idx, task in enumerate(self.load()):
            task.data = task.data.model_copy(update={"idx": idx})
            yield task

    @classmethod
    def task_type(cls) -> type[Task]:
        return get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]

    @classmethod
    def toolsets(cls, config: TasksetConfig) -> list[Any]:
        return []


class EnvConfig(BaseModel):
    taskset: TasksetConfig = TasksetConfig()


ConfigT = TypeVar("ConfigT", bound=EnvConfig)


class Env(Generic[ConfigT]):
    def __init__(self, config: ConfigT) -> None:
        from verifiers.v1.utils.loaders import load_taskset

        self.config = config
        self.taskset = load_taskset(config.taskset)
        if not agent_config_fields(config):
            raise ValueError(f"{type(self).__name__} declares no agents")

    async def setup(self, agents: Any) -> None:
        return None

    async def run(self, task: Task, agents: Any) -> None:
        raise NotImplementedError

    async def finalize(self, task: Task, episode: Episode) -> None:
        return None

    async def start(self) -> None:
        return None


class SingleAgentEnvConfig(EnvConfig):
    agent: AgentConfig = AgentConfig()


class SingleAgentEnv(Env[SingleAgentEnvConfig]):
    pass

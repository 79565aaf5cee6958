from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Generic, TypeVar, get_args

from pydantic import BaseModel, ConfigDict

from verifiers.v1.utils.decorators import discover_decorated, metric, reward

__all__ = ["Task", "TaskData", "Taskset", "TasksetConfig", "Trace", "metric", "reward"]


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
    message: UserMessage | AssistantMessage
    sampled: bool = False


class TraceTask(BaseModel):
    type: str
    data: Any


class Trace(BaseModel):
    id: str = ""
    verifiers: VersionInfo | None = None
    task: TraceTask
    agent: AgentInfo
    nodes: list[MessageNode] = []

    @property
    def assistant_messages(self) -> list[AssistantMessage]:
        return [node.message for node in self.nodes if isinstance(node.message, AssistantMessage)]

    @property
    def last_reply(self) -> str:
        return self.assistant_messages[-1].content or ""


class Runtime:
    pass


DataT = TypeVar("DataT", bound=TaskData)
TaskT = TypeVar("TaskT")


class Task(Generic[DataT]):
    NEEDS_CONTAINER: ClassVar[bool] = False

    def __init__(self, data: DataT, config: TaskConfig | None = None) -> None:
        self.data = data
        self.config = config if config is not None else TaskConfig()

    def plugged_judges(self) -> list[Any]:
        return list(self.config.judges)

    def hooks(self, attr: str) -> list[Any]:
        return discover_decorated(self, attr)

    @classmethod
    def data_type(cls) -> type[TaskData]:
        return get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]


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
        return iter(self.load())

    @classmethod
    def task_type(cls) -> type[Task]:
        return get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]

from __future__ import annotations

from pydantic import BaseModel


class AgentConfig(BaseModel):
    model: str | None = None
    client: str | None = None
    max_turns: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_total_tokens: int | None = None


def agent_config_fields(config: BaseModel) -> dict[str, AgentConfig]:
    return {name: value for name, value in config if isinstance(value, AgentConfig)}

"""The first text of an episode with tools: a question, the form of a call, and the tools.

    describe   question, tools  ─▶  text      scorer child: the same text for every model
    split      text  ─▶  question, tools      policy: for a chat template that shows tools itself

All members of a swarm have the same text and the same form of a call, because a receiver replays
the calls of a policy that may be of another family. What a model reads is decided by its own chat
template (`policy.text`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
"""Form of a call, as a `response_template` of transformers. Part of the task's version by its
transcript."""
RULES = (
    "You can call functions and are given what they return. Write a call as <tool_call>"
    '{"name": "...", "arguments": {...}}</tool_call>. A turn without a call is your last.'
    " The functions:"
)
_BEFORE, _AFTER = f"\n{RULES}\n", "\n"


def describe(question: str, tools: Sequence[dict[str, Any]]) -> str:
    """Return the first text.

    Args:
        tools: JSON schemas, `{"type": "function", "function": {"name": …, …}}`.
    """
    return f"{question}{_BEFORE}" + _AFTER.join(json.dumps(tool["function"]) for tool in tools)


@functools.lru_cache(maxsize=256)
def _tools(described: str) -> tuple[dict[str, Any], ...]:
    """Return the tools of the lines after RULES; none if the lines are something else."""
    try:
        functions = [json.loads(line) for line in described.split(_AFTER)]
    except (ValueError, RecursionError):
        return ()
    if not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions):
        return ()
    return tuple({"type": "function", "function": each} for each in functions)


def split(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the question and the tools of a first text; the text itself if it names no tools."""
    question, found, described = text.rpartition(_BEFORE)
    tools = list(_tools(described)) if found else []
    return (question, tools) if tools else (text, [])

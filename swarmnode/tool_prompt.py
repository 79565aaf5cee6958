"""The first text of an episode with tools: a question, the form of a call, and the tools.

    describe   question, form, tools  ─▶  text      scorer child: the same text for every model
    split      text  ─▶  question, form, tools      policy: for a chat template that shows tools

All members of a swarm have the same text and the same form of a call, because a receiver replays
calls of policies of other model families. The model's own chat template decides what the model
reads (`policy.text`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RESPONSE_TEMPLATE: Mapping[str, Any] = {
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
"""Default form of a call, as a `response_template` of transformers: the form of Qwen 2.5 and 3."""
FORM = json.dumps(RESPONSE_TEMPLATE)
_RULES = "\nYou can call functions and are given what they return. "
_USUAL = 'Write a call as <tool_call>{"name": "...", "arguments": {...}}</tool_call>.'
_OTHER = "Write a call so that this response template of transformers reads it: "
_FUNCTIONS = " A turn without a call is your last. The functions:\n"


@dataclass(frozen=True)
class FirstText:
    """The parts of a first text."""

    question: str
    form: str = FORM
    """Response template, as JSON."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas, `{"type": "function", "function": {"name": …, …}}`; empty if the text is only a
    question.
    """


def describe(question: str, tools: Sequence[dict[str, Any]], form: str = FORM) -> str:
    """Return the first text. The parameters are those of `FirstText`."""
    rule = _USUAL if form == FORM else _OTHER + form
    lines = [json.dumps(tool["function"]) for tool in tools]
    return f"{question}{_RULES}{rule}{_FUNCTIONS}" + "\n".join(lines)


def split(text: str) -> FirstText:
    """Return the parts of a first text. A text that is not from `describe` is a question."""
    question, found, rest = text.rpartition(_RULES)
    rule, _, described = rest.partition(_FUNCTIONS)
    form = FORM if rule == _USUAL else rule.removeprefix(_OTHER)
    tools = _tools(described) if found and form != rule else ()
    return FirstText(question, form, tools) if tools else FirstText(text)


@functools.lru_cache(maxsize=256)
def _tools(described: str) -> tuple[dict[str, Any], ...]:
    """Return the tools of a text with one tool per line; empty if a line is not a tool."""
    try:
        functions = [json.loads(line) for line in described.split("\n")]
    except (ValueError, RecursionError):
        return ()
    if not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions):
        return ()
    return tuple({"type": "function", "function": each} for each in functions)

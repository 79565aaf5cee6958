"""Environments whose public methods are tools, with the interface of TRL's `environment_factory`,
played as episodes.

    reset(**row)     ─▶ text or None
    a public method  ─▶ result of a call
    get_reward()     ─▶ 0 to 1

The first text describes the tools and the form of a call (`tool_prompt`). Every model can therefore
use them, also one without a chat template. transformers' response parser parses the calls in the
scorer child. A class may set the form of a call of its models' tokenizers:

    response_template    as in tokenizer_config.json
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from swarmnode.errors import ConfigError
from swarmnode.tasks import owner_code
from swarmnode.tool_prompt import RESPONSE_TEMPLATE, describe

CALLS = 8
"""Maximum number of calls in one action that are run."""
NOT_TOOLS = ("reset", "get_reward")

Step = Callable[[str], tuple[str, float, bool]]


def is_environment(found: object) -> bool:
    """Return True for a class that TRL's `environment_factory` accepts."""
    return inspect.isclass(found) and callable(getattr(found, "reset", None))


def generator(name: str, environment: Callable[..., Any]) -> Callable[..., tuple[str, Step]]:
    """Return the function that begins an episode of a class: `(seed, turns, prompt, **columns)`.

    Imports transformers' parser. Raises ConfigError for a class without tools or reward.
    """
    from transformers.utils.chat_parsing import parse_response
    from transformers.utils.chat_parsing.response_templates import load_response_template
    from transformers.utils.chat_template_utils import get_json_schema

    methods = {
        method: function
        for method, function in inspect.getmembers(environment, predicate=inspect.isfunction)
        if method not in NOT_TOOLS and not method.startswith("_")
    }
    if not methods or not callable(getattr(environment, "get_reward", None)):
        raise ConfigError(
            f"{name!r} is a class with reset(): it needs public methods, which are its tools, and"
            " get_reward()"
        )
    try:
        schemas: list[Any] = [get_json_schema(function) for function in methods.values()]
    except Exception as error:
        raise ConfigError(f"{name!r}: its tools: {owner_code.one_line(error)}") from error
    try:
        form = json.dumps(getattr(environment, "response_template", RESPONSE_TEMPLATE))
        template = load_response_template(json.loads(form))
        if "tool_calls" not in template.fields:
            raise ValueError("it has no field tool_calls")
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{name!r}: its response_template: {owner_code.one_line(error)}"
        ) from error

    def begin(seed: int, turns: int, prompt: str = "", **columns: object) -> tuple[str, Step]:
        instance, taken = environment(), 0
        arguments = select_arguments(instance.reset, {**columns, "prompt": prompt, "seed": seed})
        first = instance.reset(**arguments)
        if first is not None and not isinstance(first, str):
            raise TypeError(f"reset() returned {type(first).__name__}, not a text or None")

        def step(action: str) -> tuple[str, float, bool]:
            nonlocal taken
            taken += 1
            try:
                calls = parse_response(action, template, prefix="", tools=schemas).get("tool_calls")
            except (ValueError, TypeError, RecursionError):
                text, last = (
                    "That call cannot be read: it is not JSON with name and arguments.",
                    False,
                )
            else:
                text, last = "\n".join(_run_calls(instance, methods, calls or [])), not calls
            if not last and taken < turns:
                return text, 0.0, False
            reward = instance.get_reward()
            return text, 0.0 if reward is None else float(reward), True

        return describe(f"{prompt}{first or ''}", schemas, form), step

    return begin


def _run_calls(instance: Any, methods: Mapping[str, Any], calls: list[Any]) -> list[str]:  # noqa: ANN401
    """Return the result of each call, or the error of a failed call. The episode continues."""
    results = []
    for call in calls[:CALLS]:
        asked = call["function"] if isinstance(call["function"], dict) else {}
        name, arguments = asked.get("name"), asked.get("arguments", {})
        if not isinstance(name, str) or name not in methods or not isinstance(arguments, dict):
            results.append(f"There is no such function: {str(name)[:64]}.")
            continue
        try:
            returned = getattr(instance, name)(**arguments)
            if inspect.iscoroutine(returned):
                returned = owner_code.run_coroutine(returned)
            results.append(returned if isinstance(returned, str) else json.dumps(returned))
        except MemoryError:
            raise
        except Exception as error:  # the owner's code  # noqa: BLE001
            results.append(f"{name} failed: {type(error).__name__}: {error}")
    if len(calls) > CALLS:
        results.append(f"Only the first {CALLS} calls of a turn are made.")
    return results


def select_arguments(
    function: Callable[..., object], given: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments of `given` that a function has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(given)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in given.items() if name in names}

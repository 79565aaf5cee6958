"""`swarmnode chat` and `swarmnode serve`: conversations with a policy."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from swarmnode.cli.options import NODE, Flag, NodeOptions, load, require_trainer
from swarmnode.errors import Unavailable
from swarmnode.install import check_torch

if TYPE_CHECKING:
    from swarmnode.config import Config
    from swarmnode.talk.messages import Opening, Ready, Turn

LENGTH = 256
"""Tokens of an answer, if the swarm's answers are not longer."""
NEW = "/new"
Model = Annotated[
    str | None,
    Parameter(
        help="Instead of the saved policy: a directory, for example of `swarmnode export`, a .gguf"
        " file, a Hub name, `smollm2` or `embedded`."
    ),
]
Before = Annotated[Flag, Parameter(help="Use the base model, as it was before training.")]
Length = Annotated[
    int | None,
    Parameter(
        validator=Number(gte=1, lte=2**20),
        help="Largest number of tokens of an answer; by default that of training, at least 256.",
    ),
]


def chat(
    model: Model = None,
    *,
    before: Before = False,
    length: Length = None,
    temperature: Annotated[float | None, Parameter(validator=Number(gte=0, lte=2))] = None,
    node: NodeOptions = NODE,
) -> int:
    """Talk to the last saved policy in the terminal, with the model's chat template and the swarm's
    system prompt. The node may run meanwhile.

    A line that ends with a backslash continues on the next one. Ctrl-C stops an answer, Ctrl-D ends
    the conversation, and /new starts another.

    Parameters
    ----------
    temperature
        Temperature of sampling, 0 for the most likely answer; by default that of training.
    """
    from swarmnode.talk.messages import Child, Question, Turn

    opening, config = _opening("chat", model, before, node)
    training = config.training
    with Child(opening) as child:
        title = _title(config, child.wait_until_ready(), before)
        _say(f"{title}. Ctrl-C stops an answer, Ctrl-D ends, {NEW} starts over")
        if system := config.policy.chat.get("system"):
            _say(f"system prompt: {system}")
        turns: list[Turn] = []
        number = 0
        while (text := _ask()) is not None:
            if text.strip() == NEW:
                turns.clear()
            if text.strip() in ("", NEW):
                continue
            number += 1
            turns.append(Turn("user", text))
            question = Question(
                number,
                turns,
                length or max(LENGTH, training.max_completion_length),
                training.temperature if temperature is None else temperature,
                training.top_p,
            )
            answer, end = child.answer(question, _show)
            _show("\n")
            turns.append(Turn("assistant", answer))
            if end.error:
                _say(f"{end.error}. {NEW} starts over")
                del turns[-2:]
            elif end.finish == "length":
                _say(f"cut after {end.completion_tokens} tokens, see --length")
    return 0


def serve(
    model: Model = None,
    *,
    before: Before = False,
    length: Length = None,
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 9500,
    node: NodeOptions = NODE,
) -> int:
    """Serve the last saved policy on loopback with OpenAI's API: /v1/models and
    /v1/chat/completions. The node may run meanwhile. For one user; for more, `swarmnode export` and
    vLLM.

    Parameters
    ----------
    port
        0 chooses a free one.
    """
    import trio

    from swarmnode.observe import logs
    from swarmnode.process import leaves
    from swarmnode.talk import server
    from swarmnode.talk.messages import Child

    opening, config = _opening("serve", model, before, node)
    logs.configure(config.log, "serve")
    training = config.training
    served = server.Served(
        config.policy.model,
        length or max(LENGTH, training.max_completion_length),
        training.temperature,
        training.top_p,
    )
    try:
        sock = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise Unavailable(f"serve: port {port}: {error.strerror}; set another --port") from None
    sock.setblocking(False)

    async def run(child: Child) -> None:
        pipes = [trio.lowlevel.FdStream(os.dup(pipe)) for pipe in child.pipes]
        async with trio.open_nursery() as nursery:

            async def wait_for_signal() -> None:
                with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                    async for _ in signals:
                        nursery.cancel_scope.cancel()

            nursery.start_soon(wait_for_signal)
            await server.serve(sock, server.Answers(*pipes), served)
            raise Unavailable("the policy's process has ended; the cause is above")

    with sock, Child(opening) as child:
        title = _title(config, child.wait_until_ready(), before)
        _say(f"{title}, at http://127.0.0.1:{sock.getsockname()[1]}/v1")
        try:
            trio.run(run, child)
        except* Unavailable as error:
            raise next(leaves(error)) from None
    return 0


def _opening(
    command: str, model: str | None, before: bool, node: NodeOptions
) -> tuple[Opening, Config]:
    """Return what the child opens, and the configuration.

    Raises:
        Unavailable: `before` is set, and the base of an export is not known.
    """
    from swarmnode import settings
    from swarmnode.swarm import manifest_store
    from swarmnode.talk.messages import Opening

    require_trainer(command)
    check_torch()
    config, _ = manifest_store.apply_stored(load(node).config)
    saved = model is None and not before
    if model is not None and before:
        record = Path(model).expanduser() / "swarmnode.json"
        if not record.is_file():
            raise Unavailable(f"{command} --before: {model} was not written by `swarmnode export`")
        model = json.loads(record.read_text())["base"]
    if not saved:
        named = {"policy.model": model, "policy.revision": None} if model is not None else {}
        plain = {"policy.lora.r": 0, "policy.quantization": "none"}
        config = settings.replaced(config, plain | named, command)
    return Opening(config.model_dump_json(), command, saved), config


def _title(config: Config, ready: Ready, before: bool) -> str:
    if ready.step is not None:
        return f"{config.policy.model} after {ready.step} training steps"
    return config.policy.model + (" before training" if before else "")


def _ask() -> str | None:
    """Return the operator's next message; None at the end."""
    prompt, text = ("> ", "") if sys.stdin.isatty() else ("", "")
    try:
        while (text := text + input(prompt)).endswith("\\"):
            text = text[:-1] + "\n"
    except (EOFError, KeyboardInterrupt):
        _show("\n" if prompt else "")
        return None
    return text


def _show(text: str) -> None:
    from swarmnode.observe.samples import visible

    print(visible(text), end="", flush=True)


def _say(text: str) -> None:
    from swarmnode.observe.samples import visible

    print(f"swarmnode: {visible(text)}", file=sys.stderr, flush=True)

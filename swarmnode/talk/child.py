"""`python -m swarmnode.talk.child`: opens a policy and answers questions, see `messages`. Only this
process loads torch.

All questions are answered at once, a token of each in turn.
"""

from __future__ import annotations

import queue
import secrets
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec
import torch

from swarmnode.config import Config
from swarmnode.errors import SwarmNodeError, Unavailable
from swarmnode.policy.convert import tell
from swarmnode.policy.generate import Sampling, stream
from swarmnode.policy.load import load_policy, overwrite, trainable
from swarmnode.policy.model import Policy
from swarmnode.policy.ways import reason
from swarmnode.process import die_with_parent, run_main
from swarmnode.talk.messages import End, Opening, Piece, Question, Ready, Stop, line, to_child
from swarmnode.trainer import state
from swarmnode.trainer.export import find_copies
from swarmnode.trainer.measure import open_model
from swarmnode.weights.trainer.lora import freeze_a

LEAST_TEMPERATURE = 0.01
"""Below, the most likely token is taken, because logits would overflow."""
UNFINISHED_CHARACTER = "\ufffd"
"""End of a text whose last token is part of a character."""


def open_policy(opening: Opening) -> tuple[Policy, int | None]:
    """Return the policy, and the step of a saved one.

    Raises:
        LocalError: The model or the saved state does not exist, cannot be used, or does not fit
            into free memory.
    """
    config = Config.model_validate_json(opening.config)
    if not opening.saved:
        return open_model(config.policy, lambda cfg: load_policy(cfg, tell, trains=False)), None
    trainer = config.node.data_dir / "trainer"
    path = trainer / state.FILE
    crew = find_copies(trainer)
    if crew is not None and (not path.exists() or crew.written > path.stat().st_mtime):
        raise Unavailable(
            f"the policy in {trainer.parent} is in stages: `swarmnode export DIR`, then"
            f" `swarmnode {opening.command} DIR`"
        )
    if not path.exists():
        raise Unavailable(
            f"no saved policy in {trainer.parent}: run the node first, choose its directory with"
            " -d, or add --before for the base model"
        )
    policy = load_policy(config.policy, tell, trains=False)
    freeze_a(dict(policy.model.named_parameters()))
    owner = state.owner(policy.fingerprint, state.adapter_shape(config.policy.lora))
    found = state.read_file(path, owner, only_weights=True)
    assert found is not None
    overwrite(trainable(policy.model), state.weights(found[1]))
    return policy, found[0].step


def answer(policy: Policy, question: Question) -> Iterator[Piece | End]:
    """Yield a piece per token, which may be empty, then the end."""
    seed = secrets.randbits(48) if question.seed is None else question.seed
    temperature = question.temperature if question.temperature >= LEAST_TEMPERATURE else 0.0
    sampling = Sampling(1, question.max_tokens, temperature, question.top_p)
    prompt: list[int] = []
    ids, sent = list[int](), 0
    try:
        prompt = policy.encode_turns(msgspec.to_builtins(question.turns))
        for token in stream(policy, prompt, sampling, policy.random_generator(seed)):
            ids.append(token)
            text = policy.decode(ids)
            whole = not text.endswith(UNFINISHED_CHARACTER)
            yield Piece(question.id, text[sent:] if whole else "")
            sent = len(text) if whole else sent
    except Exception as error:  # a model's code may raise anything  # noqa: BLE001
        why = str(error) if isinstance(error, SwarmNodeError) else reason(error)
        yield End(question.id, "", len(prompt), len(ids), why)
        return
    if rest := policy.decode(ids)[sent:]:
        yield Piece(question.id, rest)
    finish = "stop" if ids and ids[-1] in policy.eos_ids else "length"
    yield End(question.id, finish, len(prompt), len(ids))


def serve(
    policy: Policy, receive: Callable[[bool], Question | Stop | None], send: Callable[[bytes], None]
) -> None:
    """Answer questions until the end of the input.

    Args:
        receive: Returns the next message, or None at the end. With True it waits for a message;
            with False it raises queue.Empty if there is none.
        send: Writes a line.
    """
    active: dict[int, Iterator[Piece | End]] = {}
    while True:
        try:
            while True:
                message = receive(not active)
                if message is None:
                    return
                if isinstance(message, Question):
                    active[message.id] = answer(policy, message)
                elif active.pop(message.id, None) is not None:
                    send(line(End(message.id, "", 0, 0)))
        except queue.Empty:
            pass
        for number, answering in list(active.items()):
            part = next(answering)
            if isinstance(part, End):
                del active[number]
            if isinstance(part, End) or part.text:
                send(line(part))


def main() -> int:
    die_with_parent()
    policy, step = open_policy(msgspec.json.decode(sys.stdin.buffer.readline(), type=Opening))
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for received in sys.stdin.buffer:
            lines.put(received)
        lines.put(b"")

    def receive(wait: bool) -> Question | Stop | None:
        received = lines.get(wait)
        return to_child(received) if received else None

    def send(message: bytes) -> None:
        sys.stdout.buffer.write(message)
        sys.stdout.buffer.flush()

    threading.Thread(target=read, daemon=True).start()
    send(line(Ready(step)))
    with torch.no_grad(), policy.accelerator.autocast():
        serve(policy, receive, send)
    return 0


if __name__ == "__main__":
    sys.exit(run_main("swarmnode", main))

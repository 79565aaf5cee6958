"""One stage's part in generation: the waves that are open here, a prefill and then a token at a
time. The tail draws the tokens. Torch."""

from __future__ import annotations

import hashlib

import torch

from swarmnode.errors import BadMessage
from swarmnode.pipeline import frames
from swarmnode.pipeline.activations import encode
from swarmnode.pipeline.context import StageContext
from swarmnode.pipeline.learning import prompts_of
from swarmnode.pipeline.work import Questions, read_questions
from swarmnode.policy.generate import sample
from swarmnode.wire.tensors import pack_ids, pack_logprobs, unpack_ids


class Decoding:
    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._waves: dict[bytes, Questions] = {}
        self._drawn: dict[bytes, int] = {}
        """Session → tokens that each completion has."""

    async def prefill(self, frame: frames.Prefill, body: bytes) -> None:
        """Raises BadMessage, ValueError."""
        at, runtime = self._context, self._context.runtime
        about = body[: frame.about]
        questions = read_questions(about, frame.rows, at.links.limits)
        if frame.fingerprint != at.fingerprint:
            raise BadMessage("fingerprint", "a wave of another policy")
        if frame.session not in self._waves and len(self._waves) >= at.links.limits.sessions:
            raise BadMessage("session", "too many waves")
        x = None if at.index == 0 else at.activations(body[frame.about :], frame.rows, frame.codec)
        prompts = prompts_of(questions, runtime.device)
        self._waves[frame.session] = questions
        self._drawn[frame.session] = questions.position
        y = await at.compute(lambda: runtime.prefill(frame.session, frame.fingerprint, prompts, x))
        if runtime.spec.has_head:
            self._draw(
                frame.session,
                list(questions.names),
                y.repeat_interleave(questions.num_generations, 0),
            )
            return
        passed = frames.Prefill(
            at.place, frame.session, frame.fingerprint, at.settings.codec, frame.rows, frame.about
        )
        at.links.send(at.index + 1, passed, about + encode(y, at.settings.codec))

    async def decode(self, frame: frames.Decode, body: bytes) -> None:
        """Raises BadMessage, ValueError."""
        at, runtime = self._context, self._context.runtime
        names = unpack_ids(body[: 4 * frame.rows]).tolist()
        rest = body[4 * frame.rows :]
        wave = self._waves.get(frame.session)
        if wave is None:
            raise BadMessage("session", "not open here")
        if self._drawn[frame.session] + 1 >= wave.max_tokens:
            raise BadMessage("rows", "the wave has all its tokens")
        ids = lambda: torch.tensor(unpack_ids(rest), device=runtime.device).long()
        x = ids() if at.index == 0 else at.activations(rest, frame.rows, frame.codec)
        y = await at.compute(lambda: runtime.decode(frame.session, frame.fingerprint, names, x))
        self._drawn[frame.session] += 1
        if runtime.spec.has_head:
            self._draw(frame.session, names, y)
            return
        passed = frames.Decode(
            at.place, frame.session, frame.fingerprint, at.settings.codec, frame.rows
        )
        at.links.send(at.index + 1, passed, body[: 4 * frame.rows] + encode(y, at.settings.codec))

    def _draw(self, session: bytes, names: list[int], logits: torch.Tensor) -> None:
        """Tail: a token for each of `names` from logits (n, V). A completion's draw at a position
        is the same whoever else is left."""
        wave, position = self._waves[session], self._drawn[session]
        key = hashlib.blake2b(
            wave.seed.to_bytes(8, "big") + position.to_bytes(8, "big"), digest_size=8
        ).digest()
        generator = torch.Generator(logits.device).manual_seed(int.from_bytes(key, "big") >> 1)
        every = logits.new_zeros(wave.total, logits.shape[1])
        every[names] = logits
        token, logprob = sample(every, wave.temperature, wave.top_p, generator)
        body = pack_ids(token[names].tolist()) + pack_logprobs(logprob[names].cpu().numpy())
        self._context.links.send(0, frames.Tokens(self._context.place, session, len(names)), body)

    def forget(self, session: bytes) -> None:
        self._waves.pop(session, None)
        self._drawn.pop(session, None)
        self._context.runtime.sessions.drop(session)

    def clear(self) -> None:
        self._waves.clear()
        self._drawn.clear()
        self._context.runtime.sessions.clear()

"""A stage's keys and values of the waves being generated, by (session, policy fingerprint).

A session belongs to one version of the whole policy: keys of old weights and queries of new ones
make a policy that nobody has. Whatever goes wrong, a session is dropped, and its head begins again
from token ids: they are all that a wave needs to be repeated anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import DynamicCache

from swarmnode.errors import BadMessage


@dataclass(frozen=True)
class Prompts:
    """Q prompts padded on the left, each to be answered `num_generations` times."""

    ids: torch.Tensor
    """(Q, P)."""
    mask: torch.Tensor
    """(Q, P) 1 on tokens."""
    num_generations: int
    names: tuple[int, ...] = ()
    """(Q · num_generations,) what the completions are called; empty: 0, 1, …"""


@dataclass
class Session:
    fingerprint: bytes
    cache: DynamicCache
    rows: list[int]
    """(n,) which of the N completions are still being generated; ascending."""
    mask: torch.Tensor
    """(n, tokens so far)."""
    position: torch.Tensor
    """(n, 1) of the latest token."""


class Sessions:
    def __init__(self) -> None:
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(
        self, session: bytes, fingerprint: bytes, cache: DynamicCache, prompts: Prompts
    ) -> None:
        """Keeps a prefilled cache of Q prompts, repeated for their completions. One that was open
        under this name is replaced."""
        cache.batch_repeat_interleave(prompts.num_generations)
        mask = prompts.mask.repeat_interleave(prompts.num_generations, 0)
        position = mask.sum(1, keepdim=True) - 1
        self._sessions[session] = Session(
            fingerprint, cache, list(prompts.names or range(len(mask))), mask, position
        )

    def step(self, session: bytes, fingerprint: bytes, rows: list[int]) -> Session:
        """The session, one token further, with `rows` only. Raises BadMessage: session (not open),
        fingerprint (another policy), rows."""
        kept = self._sessions.get(session)
        if kept is None:
            raise BadMessage("session", "not open here")
        if kept.fingerprint != fingerprint:
            raise BadMessage("fingerprint", "the session belongs to another policy")
        if rows != kept.rows:
            where = {row: i for i, row in enumerate(kept.rows)}
            if not rows or sorted(set(rows)) != rows or not where.keys() >= set(rows):
                raise BadMessage("rows", "not a rising choice of the rows that are left")
            index = torch.tensor([where[row] for row in rows])
            kept.cache.batch_select_indices(index)
            kept.mask, kept.position, kept.rows = kept.mask[index], kept.position[index], rows
        kept.mask = torch.cat([kept.mask, torch.ones_like(kept.position)], 1)
        kept.position = kept.position + 1
        return kept

    def drop(self, session: bytes) -> None:
        self._sessions.pop(session, None)

    def clear(self) -> None:
        """When the weights move, or the crew pauses."""
        self._sessions.clear()

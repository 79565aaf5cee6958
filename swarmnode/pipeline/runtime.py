"""What one stage computes: forward, backward by recomputation, and the cached steps of generation.
No network, no schedule.

    R rows of a packed micro-batch (`packing.py`), H hidden size, V vocabulary
    stage 0        token ids             → hidden (R, H)
    body           hidden (R, H)         → hidden (R, H)
    last stage     hidden (R, H)         → log-probabilities (N, T), or the next token's logits

In a swapped run (`routes.py`) an end stage also runs its embedding, its layers or its head alone.

Backward needs nothing but what the stage was given: it runs forward again with gradient. So a stage
keeps inputs, not graphs, and whoever holds its weights can serve a backward that another began (as
hivemind and Petals do; a third more compute, a fraction of the memory). What its layers compute on
the way would not fit beside a real model: then completions are run one by one, and each layer keeps
its input only. Logits are made of as many tokens at a time as in `policy.logprobs`, and only of
those that are wanted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import DynamicCache

from swarmnode.pipeline.packing import Packing, packing
from swarmnode.pipeline.routes import Part
from swarmnode.pipeline.sessions import Prompts, Sessions
from swarmnode.pipeline.spec import StageSpec
from swarmnode.policy.footprint import logits_tokens
from swarmnode.policy.logprobs import Batch, checkpointed, in_pieces, needs_checkpointing
from swarmnode.policy.model import cache_keyword

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(log-probabilities (N, T), entropies (N, T)) → scalar."""


class StageRuntime:
    """One stage on this machine. `model` is as `split` makes it; `dtype` what it computes in,
    float32 or bfloat16.

    Args:
        known_logits: takes the logits of all rows of the model and returns those of the tokens that
            the tokenizer has (`PolicyText.known_logits`).
    """

    def __init__(
        self,
        spec: StageSpec,
        model: Any,  # noqa: ANN401
        *,
        dtype: torch.dtype = torch.float32,
        known_logits: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
    ) -> None:
        self.spec = spec
        self.known_logits = known_logits
        self.model = model
        self._base = model.get_base_model() if hasattr(model, "get_base_model") else model
        """The transformers model; an adapter, if any, is in its layers."""
        self.dtype = dtype
        self.device = next(model.parameters()).device
        self.hidden_size = int(model.config.hidden_size)
        self.sessions = Sessions()
        self.worked = 0
        """Forwards, backwards and steps of decoding that were begun, and whatever else `works` was
        told."""
        self.tokens = 0
        """Tokens that were run forward: in training, for scores, in prompts and one by one."""
        self._layers: Any = None

    def works(self) -> None:
        """A sign that a piece of work goes on, for `policy.layers.report_layers`: of a real model
        one takes minutes on a CPU."""
        self.worked += 1

    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained ones."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def embedding(self) -> torch.nn.Parameter | None:
        """The tied tensor that the other end holds too, where it is trained; its gradient is half
        of the truth."""
        if not self.spec.shares_embedding:
            return None
        module = (
            self.model.get_input_embeddings()
            if self.spec.has_embedding
            else self.model.get_output_embeddings()
        )
        weight = module.weight
        assert isinstance(weight, torch.nn.Parameter)
        return weight if weight.requires_grad else None

    def run(
        self,
        x: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: DynamicCache | None = None,
        keep: int = 0,
        part: Part = "all",
    ) -> torch.Tensor:
        """Ids (N, L) on stage 0, else hidden states (N, L, H) → hidden states (N, L, H), or logits
        (N, keep or L, V) on the last stage. With `part` "layers" hidden states to hidden states on
        every stage.

        mask (N, everything up to and with L) is 1 on tokens; positions (N, L).
        """
        whole = part == "all"
        inputs = (
            {"inputs_embeds": x.to(self.model.dtype)} if x.is_floating_point() else {"input_ids": x}
        )
        if self.spec.has_head and whole:
            inputs["logits_to_keep"] = keep  # type: ignore[assignment]
        model = self.model if whole else self._without_ends()
        with self._autocast():
            output = model(
                **inputs,
                attention_mask=mask,
                position_ids=positions,
                use_cache=cache is not None,
                **{cache_keyword(self._base.__class__.forward): cache},
            )
        return self.known_logits(output.logits) if self.spec.has_head and whole else output.logits

    def _without_ends(self) -> Any:  # noqa: ANN401
        """The same layers in a model that lacks norm and head."""
        if self._layers is None:
            self._layers, inner = _shallow(self._base), _shallow(self._base.model)
            inner.norm = self._layers.lm_head = torch.nn.Identity()
            self._layers.model = inner
        return self._layers

    @property
    def _lora_rank(self) -> int:
        return max(
            (config.r for config in getattr(self.model, "peft_config", {}).values()), default=0
        )

    @torch.no_grad()
    def forward(self, batch: Batch, x: torch.Tensor | None, part: Part = "all") -> torch.Tensor:
        """`x` (R, H), None where token ids go in → (R, H) for the next stage. Not for the last
        stage's head."""
        self.worked += 1
        out = self.hidden(batch, x, part)
        self.tokens += len(out)
        return out

    def backward(
        self, batch: Batch, x: torch.Tensor | None, gradient: torch.Tensor, part: Part = "all"
    ) -> torch.Tensor | None:
        """Adds to the weights' gradients; `gradient` (R, H) of what `forward` gave → gradient of
        `x`, None on stage 0."""
        self.worked += 1
        inputs = None if x is None else x.detach().requires_grad_()
        hidden = self.hidden(batch, inputs, part)
        if hidden.requires_grad:  # not so on a stage 0 in which nothing is trained
            hidden.backward(gradient.to(hidden.device))
        return None if inputs is None else inputs.grad

    def learn(
        self,
        batch: Batch,
        x: torch.Tensor | None,
        temperature: float,
        loss: Loss,
        part: Part = "all",
    ) -> torch.Tensor | None:
        """Last stage: forward, loss and backward in one → gradient of `x`, None where this is the
        only stage."""
        self.worked += 2
        inputs = None if x is None else x.detach().requires_grad_()
        loss(*self.logprobs(batch, inputs, temperature, part)).backward()
        return None if inputs is None else inputs.grad

    @torch.no_grad()
    def score(
        self, batch: Batch, x: torch.Tensor | None, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Last stage, without gradient: log-probabilities and entropies, (N, T) each."""
        self.worked += 1
        return self.logprobs(batch, x, temperature)

    @torch.no_grad()
    def prefill(
        self, session: bytes, fingerprint: bytes, prompts: Prompts, x: torch.Tensor | None
    ) -> torch.Tensor:
        """Opens a session: `x` (prompt tokens, H), None on stage 0 → the same, or logits (Q, V) on
        the last stage."""
        self.worked += 1
        where = prompts.mask.nonzero(as_tuple=True)
        self.tokens += len(where[0])
        positions = (prompts.mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        padded = (
            prompts.ids
            if x is None
            else x.new_zeros(*prompts.mask.shape, x.shape[1]).index_put(where, x)
        )
        out = self.run(padded, prompts.mask, positions, cache, keep=1)
        self.sessions.open(session, fingerprint, cache, prompts)
        return out[:, -1] if self.spec.has_head else out[where].float()

    @torch.no_grad()
    def decode(
        self, session: bytes, fingerprint: bytes, rows: list[int], x: torch.Tensor
    ) -> torch.Tensor:
        """One token further for `rows` of the session: ids (n,) on stage 0, else (n, H) → (n, H),
        or logits (n, V) on the last stage.

        Rows that are left out are dropped from the cache for good. Raises BadMessage as
        `Sessions.step` does.
        """
        self.worked += 1
        self.tokens += len(rows)
        kept = self.sessions.step(session, fingerprint, rows)
        out = self.run(x[:, None], kept.mask, kept.position, kept.cache, keep=1)
        return out[:, -1] if self.spec.has_head else out[:, 0].float()

    def _autocast(self) -> AbstractContextManager:
        return (
            nullcontext()
            if self.dtype == torch.float32
            else torch.autocast(self.device.type, self.dtype)
        )

    def hidden(self, batch: Batch, x: torch.Tensor | None, part: Part = "all") -> torch.Tensor:
        """As `forward`, with gradient."""
        where = packing(batch)
        if part == "embed":
            embed = self.model.get_input_embeddings()
            with self._autocast():
                return where.pack(
                    embed(batch.prompt_ids), embed(batch.completion_ids[:, :-1])
                ).float()
        return where.pack(*self._both(batch, where, x, part)).float()

    def _both(
        self, batch: Batch, where: Packing, x: torch.Tensor | None, part: Part
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states of the prompts (Q, P, H) and of the completions (N, T − 1, H), None where T
        is 1."""
        prompts, later = (
            where.unpack(x) if x is not None else (batch.prompt_ids, batch.completion_ids[:, :-1])
        )
        if part == "head":
            return prompts, later
        if torch.is_grad_enabled() and needs_checkpointing(
            self._base, self.dtype, self._lora_rank, batch
        ):
            with checkpointed(self._base):
                return self._one_by_one(batch, prompts, later, part)
        return self._prompts_once(batch, prompts, later, part)

    def _one_by_one(
        self, batch: Batch, prompts: torch.Tensor, later: torch.Tensor | None, part: Part
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `_both`: each completion behind a prompt of its own, without a cache, so that layers
        can be run again in the backward pass."""
        first: dict[int, torch.Tensor] = {}
        rest = []
        for row, owner in enumerate(batch.prompt_of.tolist()):
            real, count = batch.prompt_mask[owner].bool(), int(batch.completion_mask[row].sum()) - 1
            asked = prompts[owner][real]
            # (L,) or (L, H)
            ids = asked if later is None else torch.cat([asked, later[row, :count]])
            positions = torch.arange(len(ids), device=ids.device)[None]
            out = self.run(ids[None], torch.ones_like(positions), positions, part=part)[0]  # (L, H)
            if owner not in first:
                padding = out.new_zeros(len(real) - len(asked), out.shape[1])
                first[owner] = torch.cat([padding, out[: len(asked)]])
            if later is not None:
                rest.append(
                    torch.cat(
                        [out[len(asked) :], out.new_zeros(later.shape[1] - count, out.shape[1])]
                    )
                )
        return torch.stack([first[owner] for owner in range(len(prompts))]), torch.stack(
            rest
        ) if rest else None

    def _prompts_once(
        self, batch: Batch, prompts: torch.Tensor, later: torch.Tensor | None, part: Part
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `_both`: prompts, then the completions on their keys and values."""
        positions = (batch.prompt_mask.cumsum(1) - 1).clamp(min=0)  # (Q, P)
        cache = DynamicCache(config=self.model.config)
        first = self.run(prompts, batch.prompt_mask, positions, cache, part=part)
        if batch.completion_ids.shape[1] == 1:
            return first, None
        assert later is not None
        owner = batch.prompt_of
        cache.batch_select_indices(owner.cpu())
        seen = torch.cat(
            [batch.prompt_mask[owner], batch.completion_mask[:, :-1].to(batch.prompt_mask.dtype)], 1
        )
        after = positions[owner, -1:] + 1 + torch.arange(later.shape[1], device=owner.device)
        return first, self.run(later, seen, after, cache, part=part)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            logits = self._base.lm_head(self._base.model.norm(hidden.to(self.model.dtype)))
        return self.known_logits(logits)

    def logprobs(
        self, batch: Batch, x: torch.Tensor | None, temperature: float, part: Part = "all"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `score`, with gradient."""
        where = packing(batch)
        self.tokens += where.rows
        first, later = self._both(batch, where, x, "head" if part == "head" else "layers")
        row = torch.arange(len(batch.completion_ids), device=first.device)
        column = torch.zeros_like(row)
        states = [first[:, -1][batch.prompt_of]]  # (N, H), they predict the first tokens
        if later is not None:
            states.append(later[where.completions])
            row = torch.cat([row, where.completions[0]])
            column = torch.cat([column, where.completions[1] + 1])
        piece = logits_tokens(self.model.config.vocab_size, self.device.type)
        chosen, spread = in_pieces(
            self._head, torch.cat(states), batch.completion_ids[row, column], temperature, piece
        )
        zeros = torch.zeros(batch.completion_ids.shape, device=chosen.device)
        return zeros.index_put((row, column), chosen), zeros.index_put((row, column), spread)


def _shallow(module: Any) -> Any:  # noqa: ANN401
    """A module of its own with the same parameters and, until they are replaced, the same parts."""
    new = copy.copy(module)
    new._modules = dict(module._modules)
    return new

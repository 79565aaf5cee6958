"""`swarmnode plan`: what training a model needs, before anything of it is downloaded."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from swarmnode.cli.options import AsJson, say, size_bytes
from swarmnode.errors import ConfigError

if TYPE_CHECKING:
    from swarmnode.policy.plan import PlannedMethod

LONGEST = 2**20
PROMPT_TOKENS = 512
"""Tokens of a prompt, added to the default answer length if `--length` is not given."""


def plan(
    model: str,
    *,
    length: Annotated[int | None, Parameter(name=["--length", "-n"])] = None,
    memory: str | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
    rank: int = 16,
    revision: str | None = None,
    json: AsJson = False,
) -> int:
    """What training a model needs in memory, by way of training, and what fits. Reads config.json
    and the headers of the weights only.

    Parameters
    ----------
    model
        A directory, a Hugging Face Hub name, or `embedded`.
    length
        Tokens of a row: prompt and answer together. Without it, the longest answer that such a
        model samples by default, and a prompt of 512 tokens.
    memory
        Of the device, e.g. 24GB. Without it, the smallest card is named that each way needs.
    device
        cuda, or cpu: there memory is that of the machine.
    dtype
        What is computed in; auto is bfloat16 on a GPU and float32 on a CPU.
    rank
        Of LoRA.
    revision
        Of a Hub model.
    """
    from swarmnode.model_defaults import defaults_for

    whole, adapter = (defaults_for(model, lora_rank) for lora_rank in (0, rank))
    if length is None:
        length = whole.max_completion_length + PROMPT_TOKENS
    if not 1 <= length <= LONGEST or not 1 <= rank <= 1024:
        raise ConfigError(f"command line: --length is 1 to {LONGEST} tokens, --rank 1 to 1024")
    from swarmnode.doctor.probes import driver_cards
    from swarmnode.policy.footprint import averaging_bytes, saving_bytes, trained_parameters
    from swarmnode.policy.plan import best, choices, settings
    from swarmnode.policy.published import published_shape

    shape = published_shape(model, revision)
    computed = dtype if dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    room = size_bytes(memory) if memory is not None else None
    found = choices(shape, device, computed, rank, length, room)
    here = driver_cards()
    told = {
        "cards": here,
        "model": model,
        "parameters": shape.parameters,
        "length": length,
        "device": device,
        "dtype": computed,
        "memory_bytes": room,
        "cache_bytes_per_token": shape.cache_bytes,
        "crew_copy_bytes": shape.parameters,
        "choices": [
            {
                "name": c.name,
                "optim": c.method.optim,
                "checkpointing": c.method.checkpointing,
                "need_bytes": c.row.total,
                "micro_batch_tokens": c.micro_batch,
                "card_gb": c.card,
                "set": settings(c),
                "defaults": defaults_for(model, c.method.lora_rank).values(),
                **asdict(c.row),
                "averaging_host_bytes": sum(averaging_bytes(trained_parameters(shape, c.method))),
                "saving_host_bytes": saving_bytes(
                    trained_parameters(shape, c.method), c.method.optim
                ),
            }
            for c in found
        ],
    }
    where = "a GPU" if device == "cuda" else "the CPU"
    lines = [
        (
            f"{model}: {shape.parameters:,} parameters; rows of {length:,} tokens in {computed}, on"
            f" {where}"
        ),
        "",
        *_table(found, room),
        "",
        (
            f"A completion that is being sampled keeps {_size(shape.cache_bytes * length)} of keys"
            f" and values at {length:,} tokens."
        ),
    ]
    trained = {c.name.split(",")[0]: trained_parameters(shape, c.method) for c in found}
    averaged = {name: averaging_bytes(count) for name, count in trained.items()}
    lines.append(
        "Averaging with others keeps in host memory: "
        + "; ".join(
            f"{name}: {_size(always)}, {_size(always + more)} during an exchange"
            for name, (always, more) in averaged.items()
        )
        + "."
    )
    saved = "; ".join(f"{name}: {_size(saving_bytes(count))}" for name, count in trained.items())
    lines.append(f"Saving takes there, while the state is written: {saved}.")
    copy = (
        "In a crew, a whole copy to sample from (stages.policy_copy = memory) takes"
        f" {_size(shape.parameters)}"
    )
    lines.append(f"{copy}; ten times as fast between homes.")
    rates = (
        f"{whole.learning_rate:g}"
        if whole == adapter
        else f"{whole.learning_rate:g}, of an adapter {adapter.learning_rate:g}"
    )
    lines.append(
        f"Defaults for this model: training.learning_rate = {rates};"
        f" training.max_completion_length = {whole.max_completion_length}."
    )
    if here:
        lines += ["This machine has:", *(f"  {line}" for line in here)]
    if len(here) > 1:
        lines.append("Each card holds a copy and trains a part of every step (policy.devices).")
    if room is not None:
        chosen = best(found)
        lines.append(
            _advice(chosen, model, revision) if chosen else _too_small(found, memory or "")
        )
    return say(told, "\n".join(lines), json)


def _table(found: list[PlannedMethod], room: int | None) -> list[str]:
    last = "smallest card" if room is None else "fits, micro-batch"
    lines = [
        f"{'trained':<26}{'optimizer':<12}{'layers run again':<18}"
        f"{'resident':>10}{'row':>10}{'needs':>10}   {last}"
    ]
    for c in found:
        by_card = f"{c.card} GB" if c.card else "none"
        by_room = f"{c.micro_batch:,} tokens" if c.micro_batch else "no"
        again = "yes" if c.method.checkpointing else "no"
        sizes = "".join(
            f"{_size(count):>10}"
            for count in (c.row.resident, c.row.total - c.row.resident, c.row.total)
        )
        lines.append(
            f"{c.name:<26}{c.method.optim:<12}{again:<18}{sizes}  "
            f" {by_card if room is None else by_room}"
        )
    return lines


def _advice(chosen: PlannedMethod, model: str, revision: str | None) -> str:
    from swarmnode.policy.plan import settings

    said = [
        f"policy.model={model}",
        *([f"policy.revision={revision}"] if revision else []),
        *settings(chosen),
    ]
    how = " ".join(f"--set {shlex.quote(text)}" for text in said)
    return (
        f"Fits: {chosen.name}, micro-batches of up to {chosen.micro_batch:,} tokens. swarmnode run"
        f" {how}"
    )


def _too_small(found: list[PlannedMethod], memory: str) -> str:
    least = min(found, key=lambda c: c.row.total)
    return (
        f"Nothing fits {memory}: {least.name} needs {_size(least.row.total)}. Shorter rows, a"
        " smaller model, or a crew (docs/stages.md)."
    )


def _size(count: int) -> str:
    return f"{count / 10**9:.1f} GB" if count >= 10**9 else f"{count / 10**6:.0f} MB"

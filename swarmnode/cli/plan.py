"""`swarmnode plan`: estimate the memory for training a model, without downloading it."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from swarmnode.cli.options import AsJson, parse_size, print_result
from swarmnode.errors import ConfigError

if TYPE_CHECKING:
    from swarmnode.policy.plan import PlannedMethod

MAX_LENGTH = 2**20
PROMPT_TOKENS = 512
"""Tokens of the prompt in the default of `--length`."""


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
    """Estimate the memory for training a model, for each method, and show which methods fit.

    The command reads only config.json and the headers of the weights.

    Parameters
    ----------
    model
        A directory, a .gguf file, a Hugging Face Hub name, `smollm2`, or `embedded`.
    length
        Tokens of a row: prompt and completion. By default the model's default completion length
        plus a prompt of 512 tokens.
    memory
        Memory of the device, e.g. 24GB. Without it, the table shows the smallest sufficient card.
    device
        cuda or cpu. For cpu, the memory is that of the machine.
    dtype
        Type of the computation. auto: bfloat16 on a GPU, float32 on a CPU.
    rank
        Rank of LoRA.
    revision
        Revision of a Hub model.
    """
    if not 1 <= (1 if length is None else length) <= MAX_LENGTH or not 1 <= rank <= 1024:
        raise ConfigError(
            f"command line: --length must be 1 to {MAX_LENGTH} tokens, --rank 1 to 1024"
        )
    from swarmnode.config import TrainingConfig
    from swarmnode.doctor.probes import driver_cards
    from swarmnode.model_defaults import default_alpha, defaults_for
    from swarmnode.observe.status import duration
    from swarmnode.policy.footprint import averaging_bytes, saving_bytes, trained_parameters
    from swarmnode.policy.plan import best, choices, measure_operations, settings, step_seconds
    from swarmnode.policy.published import published_shape

    shape = published_shape(model, revision)
    # After config.json has been read, from which the learning rates follow.
    whole = defaults_for(model, revision=revision)
    adapter = defaults_for(model, rank, revision=revision)
    if length is None:
        length = whole.max_completion_length + PROMPT_TOKENS
    computed = dtype if dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    room = parse_size(memory) if memory is not None else None
    found = choices(shape, device, computed, rank, length, room)
    cards = driver_cards()
    training, tokens = TrainingConfig(), min(length, whole.max_completion_length)
    answers = training.groups_per_step * training.num_generations
    operations = measure_operations() if device == "cpu" else None
    seconds = step_seconds(shape, computed, answers, tokens, operations)
    result = {
        "cards": cards,
        "model": model,
        "parameters": shape.parameters,
        "length": length,
        "device": device,
        "dtype": computed,
        "memory_bytes": room,
        "cache_bytes_per_token": shape.cache_bytes,
        "crew_copy_bytes": shape.parameters,
        "step_seconds": seconds,
        "choices": [
            {
                "name": c.name,
                "optim": c.method.optim,
                "checkpointing": c.method.checkpointing,
                "need_bytes": c.row.total,
                "micro_batch_tokens": c.micro_batch,
                "card_gb": c.card,
                "set": settings(c),
                "defaults": (adapter if c.method.lora_rank else whole).values(),
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
        *_format_table(found, room),
        "",
        (
            f"The KV cache of one completion needs {_format_size(shape.cache_bytes * length)} at"
            f" {length:,} tokens."
        ),
    ]
    trained = {c.name.split(",")[0]: trained_parameters(shape, c.method) for c in found}
    averaged = {name: averaging_bytes(count) for name, count in trained.items()}
    lines.append(
        "Host memory for weight averaging: "
        + "; ".join(
            f"{name}: {_format_size(always)}, {_format_size(always + more)} during an exchange"
            for name, (always, more) in averaged.items()
        )
        + "."
    )
    saved = "; ".join(
        f"{name}: {_format_size(saving_bytes(count))}" for name, count in trained.items()
    )
    lines.append(f"Host memory while the state is saved: {saved}.")
    lines.append(
        "In a crew, a policy copy for sampling (stages.policy_copy = memory) needs"
        f" {_format_size(shape.parameters)}. Over home connections it samples ten times faster."
    )
    lines.append(
        f"A step of {answers} answers of {tokens:,} tokens takes about {duration(seconds)}"
        f" {'on this CPU' if device == 'cpu' else 'on a GPU that reads 1 TB/s'}, half of it"
        " sampling. Shorter answers take less. The estimate may be wrong by a factor of three;"
        " `swarmnode task try` measures."
    )
    rates = (
        f"{whole.learning_rate:g}"
        if whole == adapter
        else f"{whole.learning_rate:g} ({adapter.learning_rate:g} for an adapter with"
        f" lora_alpha {default_alpha(rank)})"
    )
    lines.append(
        f"Defaults for this model: training.learning_rate = {rates};"
        f" training.max_completion_length = {whole.max_completion_length}."
    )
    if cards:
        lines += ["GPUs of this machine:", *(f"  {line}" for line in cards)]
    if len(cards) > 1:
        lines.append("Training is data parallel: each GPU holds a copy (policy.devices).")
    if room is not None:
        chosen = best(found)
        lines.append(
            _format_advice(chosen, model, revision)
            if chosen
            else _format_failure(found, memory or "")
        )
    return print_result(result, "\n".join(lines), json)


def _format_table(found: list[PlannedMethod], room: int | None) -> list[str]:
    last = "smallest card" if room is None else "fits, micro-batch"
    lines = [
        f"{'method':<26}{'optimizer':<12}{'checkpointing':<18}"
        f"{'resident':>10}{'row':>10}{'needs':>10}   {last}"
    ]
    for c in found:
        by_card = f"{c.card} GB" if c.card else "none"
        by_room = f"{c.micro_batch:,} tokens" if c.micro_batch else "no"
        checkpointing = "yes" if c.method.checkpointing else "no"
        sizes = "".join(
            f"{_format_size(count):>10}"
            for count in (c.row.resident, c.row.total - c.row.resident, c.row.total)
        )
        lines.append(
            f"{c.name:<26}{c.method.optim:<12}{checkpointing:<18}{sizes}  "
            f" {by_card if room is None else by_room}"
        )
    return lines


def _format_advice(chosen: PlannedMethod, model: str, revision: str | None) -> str:
    from swarmnode.policy.plan import settings

    overrides = [
        f"policy.model={model}",
        *([f"policy.revision={revision}"] if revision else []),
        *settings(chosen),
    ]
    options = " ".join(f"--set {shlex.quote(text)}" for text in overrides)
    return (
        f"Fits: {chosen.name}, micro-batches of up to {chosen.micro_batch:,} tokens. Start it with:"
        f" swarmnode run {options}"
    )


def _format_failure(found: list[PlannedMethod], memory: str) -> str:
    least = min(found, key=lambda c: c.row.total)
    return (
        f"No method fits {memory}: {least.name} needs {_format_size(least.row.total)}. Use shorter"
        " rows, a smaller model, or a crew (docs/stages.md)."
    )


def _format_size(count: int) -> str:
    return f"{count / 10**9:.1f} GB" if count >= 10**9 else f"{count / 10**6:.0f} MB"

"""Tries a policy before training.

    sample     two questions of different length, by the engine that training would choose
    score      the same tokens again: log-probabilities must equal those of sampling
    gradient   an answer of `training.max_completion_length` tokens, by the method that training
               would choose

An engine or method that does not work with the model is not used (`ways.py`), and the next one is
tried. A model that cannot be sampled from or trained at all is refused in one line before training
starts. A trainer stores the result of a trial and does not repeat it for the same model on the same
machine (`try_once`).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
import transformers

from swarmnode import __version__
from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.errors import DeviceError, SwarmNodeError, Unavailable
from swarmnode.files import write_atomically
from swarmnode.model_defaults import is_on_hub
from swarmnode.policy.decode import pads
from swarmnode.policy.engine.continuous import Continuous
from swarmnode.policy.engine.selector import EngineChoice, Kind, answered
from swarmnode.policy.fingerprint import canonical
from swarmnode.policy.generate import GroupSample, Sampling, generate
from swarmnode.policy.load import Policy, load_policy
from swarmnode.policy.logprobs import Row, collate, completion_logprobs, logprobs_by
from swarmnode.policy.micro import MicroBatcher, free_memory, is_oom
from swarmnode.policy.slots import unsuited
from swarmnode.policy.ways import bound, mean_gap, reason, refuse, refused, widest_bound

QUESTIONS = ("What is 3 + 4? Answer: ", "Calculate 12 + 25 - 3. Answer: ")
TOKENS = 8
"""Tokens to sample for each answer."""
ROWS = 2
"""Answers to each question."""
PARTS = 2
"""Parts of a trial: sampling and training."""


@dataclass(frozen=True)
class Trial:
    """Result of a trial."""

    tokens: int
    """Number of sampled tokens."""
    engine: str
    """Engine that samples from the model."""
    warnings: Sequence[str]
    """Settings that an operator should change, one line each."""
    refused: Sequence[str]
    """Methods that are not used, with the reason."""
    seconds: float
    """Duration; 0 if the result was recorded at an earlier start."""

    def __str__(self) -> str:
        when = f"in {self.seconds:.1f} s" if self.seconds else "at an earlier start"
        found = f"{self.tokens} tokens sampled ({self.engine}), scored and trained on {when}"
        return "; ".join([found, *(f"not used: {way}" for way in self.refused)])


def try_policy(
    cfg: PolicyConfig, training: TrainingConfig | None = None
) -> tuple[str, Sequence[str]]:
    """Load a policy and try it. Return the result in a few words, and warnings.

    Raises:
        Unavailable: The model cannot be trained.
        LocalError: See `load_policy`.
    """
    started = time.monotonic()
    policy = load_policy(cfg)
    loaded = time.monotonic() - started
    trial = try_loaded(cfg, policy, training or TrainingConfig())
    return f"loaded in {loaded:.1f} s, {trial}", trial.warnings


def try_loaded(
    cfg: PolicyConfig,
    policy: Policy,
    training: TrainingConfig,
    alive: Callable[[], None] = lambda: None,
    report: Callable[[int, int], None] = lambda part, parts: None,
) -> Trial:
    """Try a loaded policy. Weights do not change, and gradients are cleared.

    Args:
        training: Settings with the longest answer and the sampling temperature.
        alive: Called regularly during the trial.
        report: Called at the start of each part with its number and that of all parts.

    Raises:
        Unavailable: The model cannot be trained.
        DeviceError: Memory ran out.
    """
    name, started = f"policy.model {cfg.model!r}", time.monotonic()
    try:
        report(1, PARTS)
        rows, engine = try_sampling(name, policy, training, alive)
        report(2, PARTS)
        warnings = try_training(name, policy, training, rows)
    except SwarmNodeError:
        raise
    except Exception as error:
        if is_oom(error):
            raise DeviceError(f"{name}: memory ran out in a trial") from error
        raise Unavailable(f"{name} cannot be trained: {reason(error)}") from error
    unused = [f"{way} ({why})" for way, why in refused(policy).items()]
    sampled = sum(row.tokens for row in rows)
    return Trial(sampled, engine, warnings, unused, time.monotonic() - started)


class TrialRecord(msgspec.Struct, frozen=True):
    """A passed trial, as stored in the data directory."""

    key: str
    """Hash of everything that the result depends on, see `trial_key`."""
    trial: Trial
    obstacles: dict[str, str]
    """`Policy.obstacles` after the trial."""
    measured: dict[str, float]


def try_once(
    cfg: PolicyConfig,
    policy: Policy,
    training: TrainingConfig,
    path: Path,
    alive: Callable[[], None] = lambda: None,
    report: Callable[[int, int], None] = lambda part, parts: None,
) -> Trial:
    """Return the recorded trial of this policy, or try it and record the result.

    A trial with warnings is not recorded, because free memory may cause them.

    Args:
        path: File of the record. A damaged one is replaced.

    Raises:
        Unavailable, DeviceError: See `try_loaded`.
    """
    key = trial_key(cfg, policy, training)
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        record = msgspec.json.decode(path.read_bytes(), type=TrialRecord)
        if record.key == key:
            policy.obstacles.update(record.obstacles)
            policy.measured.update(record.measured)
            return replace(record.trial, seconds=0.0)
    trial = try_loaded(cfg, policy, training, alive, report)
    if not trial.warnings:
        record = TrialRecord(key, trial, policy.obstacles, policy.measured)
        write_atomically(path, msgspec.json.encode(record))
    return trial


def trial_key(cfg: PolicyConfig, policy: Policy, training: TrainingConfig) -> str:
    """Return a hash of model, settings, versions and device."""
    facts = [
        policy.fingerprint.hex(),
        policy.tokenizer_hash.hex(),
        cfg.model_dump_json(exclude={"server"}),
        [training.max_completion_length, training.temperature, sorted(training.options)],
        [__version__, torch.__version__, transformers.__version__],
        [str(policy.device), str(policy.dtype), policy.is_spread, processor(policy.device)],
    ]
    return hashlib.sha256(canonical(facts)).hexdigest()


def processor(device: torch.device) -> str:
    """Return the name of a GPU or of this machine's CPU, with the instruction set that torch
    uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines: list[str] = []
    with contextlib.suppress(OSError):  # Linux only
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    names = [line for line in lines if line.startswith("model name")] or [platform.machine()]
    return f"{names[0]} {torch.backends.cpu.get_cpu_capability()}"


# ---- sampling ------------------------------------------------------------------------------------


@torch.no_grad()
def try_sampling(
    name: str,
    policy: Policy,
    training: TrainingConfig,
    alive: Callable[[], None] = lambda: None,
) -> tuple[list[Row], Kind]:
    """Sample by the engine that training would choose, and score the samples. If their
    log-probabilities differ, the continuous engine is not used, and lockstep is tried.

    Returns:
        The sampled rows and the engine.

    Raises:
        Unavailable: No engine can sample.
    """
    prompts = list(QUESTIONS)
    for prompt in prompts:
        ids = policy.encode_prompt(prompt)
        if not ids or max(ids) >= policy.vocab_size:
            problem = "to tokens that the model does not have" if ids else "to no tokens"
            raise Unavailable(f"{name}: its tokenizer encodes a question {problem}")
        if not policy.fits(prompt):
            raise Unavailable(
                f"{name}: a question of {len(ids):,} tokens leaves no room for an answer in its"
                f" context of {policy.context:,} tokens"
            )
    temperature, longest = training.temperature, training.max_completion_length
    sampling = Sampling(ROWS, min(TOKENS, longest), temperature)
    engine = EngineChoice.of(training.options, longest, unsuited(policy)).kind
    if engine == "continuous":
        try:
            batcher, generator = MicroBatcher(2**20), policy.random_generator(0)
            groups = answered(Continuous(policy, batcher, sampling, generator), prompts)
            gap = _sampled_gap(policy, groups, temperature)
            if gap <= bound(policy):
                return _rows(groups), engine
            refuse(policy, "slots", f"its log-probabilities differ by {gap:.2g} nats")
        except Exception as error:  # a model's code may raise anything
            if is_oom(error):
                raise
            refuse(policy, "slots", reason(error))
        alive()
    try:
        groups = generate(policy, prompts, sampling, policy.random_generator(0), alive)
        gap = _sampled_gap(policy, groups, temperature)
        if pads(policy) and not gap <= widest_bound(policy):
            refuse(policy, "padding", f"its log-probabilities differ by {gap:.2g} nats")
            groups = generate(policy, prompts, sampling, policy.random_generator(0), alive)
            gap = _sampled_gap(policy, groups, temperature)
    except SwarmNodeError:
        raise
    except Exception as error:
        if is_oom(error):
            raise
        raise Unavailable(f"{name} cannot be sampled from: {reason(error)}") from error
    alive()
    if not math.isfinite(gap):
        raise Unavailable(
            f"{name}: its log-probabilities are not finite; the download is damaged, or the weights"
            f" overflow in {str(policy.dtype).removeprefix('torch.')}"
        )
    if gap > widest_bound(policy):
        raise Unavailable(
            f"{name} cannot be trained: log-probabilities differ by {gap:.2g} nats between sampling"
            " and scoring"
        )
    return _rows(groups), "lockstep"


def _rows(groups: Sequence[GroupSample]) -> list[Row]:
    return [Row(group.prompt_ids, each.ids) for group in groups for each in group.completions]


def _sampled_gap(policy: Policy, groups: Sequence[GroupSample], temperature: float) -> float:
    """Return the mean difference in nats between log-probabilities recorded in sampling and those
    of scoring row by row."""
    recorded = [x for group in groups for each in group.completions for x in each.logprobs]
    batch = collate(_rows(groups), policy.pad_id, policy.device)
    scored, _ = logprobs_by("row by row", policy, batch, temperature)
    return mean_gap(recorded, scored[batch.completion_mask.to(scored.device)].tolist())


# ---- training ------------------------------------------------------------------------------------


def try_training(
    name: str, policy: Policy, training: TrainingConfig, rows: Sequence[Row]
) -> list[str]:
    """Compute the gradient of an answer of the full length, by the method that training would
    choose.

    Args:
        rows: Sampled rows.

    Returns:
        Warnings with a remedy for the operator, one line each.

    Raises:
        Unavailable: The model cannot be trained.
    """
    warnings, long = list[str](), long_row(policy, rows, training.max_completion_length)
    if long.tokens < training.max_completion_length:
        warnings.append(
            f"answers of training.max_completion_length = {training.max_completion_length} do not"
            f" fit into the model's context of {policy.context:,} tokens, and are cut there"
        )
    try:
        warnings += _full_length(name, policy, long, training.temperature)
    finally:
        policy.model.zero_grad(set_to_none=True)
    return warnings


def long_row(policy: Policy, rows: Sequence[Row], longest: int) -> Row:
    """Return an answer of `longest` tokens that repeats sampled tokens. It has fewer tokens if
    `longest` do not fit into the context."""
    prompt, answer, _ = max(rows, key=lambda row: len(row.prompt))
    length = policy.room(prompt, longest)
    tokens = [token for token in answer if token not in policy.eos_ids] or answer
    return Row(prompt, (tokens * -(-length // len(tokens)))[:length])


def total_norm(policy: Policy) -> float:
    """Return the norm of all gradients, on any device; NaN if there are none."""
    norms = [float(p.grad.norm()) for p in policy.trainable_parameters() if p.grad is not None]
    return math.hypot(*norms) if norms else math.nan


def _full_length(name: str, policy: Policy, long: Row, temperature: float) -> list[str]:
    """Compute the gradient of the longest answer.

    Returns:
        A warning if memory is too small, else an empty list.

    Raises:
        Unavailable: It fails for another reason, or the gradient is not finite.
    """
    policy.model.zero_grad(set_to_none=True)
    tokens = len(long.prompt) + len(long.completion)
    try:
        batch = collate([long], policy.pad_id, policy.device)
        with torch.enable_grad():
            found, _ = completion_logprobs(policy, batch, temperature)
            (found.sum() / long.tokens).backward()
    except Exception as error:
        if not is_oom(error):
            raise Unavailable(
                f"{name} cannot be trained on a row of {tokens:,} tokens: {reason(error)}"
            ) from error
    else:
        if not math.isfinite(total_norm(policy)):
            raise Unavailable(
                f"{name} cannot be trained on a row of {tokens:,} tokens: its gradient is not"
                " finite"
            )
        return []
    free_memory()
    return [f"a row of {tokens:,} tokens does not fit into memory"]


def is_here(cfg: PolicyConfig) -> bool:
    """Return True if the model is on this machine already, so that a trial downloads nothing."""
    if not is_on_hub(cfg.model):
        return True
    from huggingface_hub import try_to_load_from_cache

    names = ("model.safetensors", "model.safetensors.index.json")
    return any(
        isinstance(try_to_load_from_cache(cfg.model, name, revision=cfg.revision), str)
        for name in names
    )

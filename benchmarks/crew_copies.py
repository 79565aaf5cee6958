"""Sampling through the crew, token by token, against sampling from a whole int8 copy at its head:
`python -m benchmarks.crew --generation`.

The embedded policy eight layers deep in four stages, all in this process, over streams that are
late by so many milliseconds each way (and carry whatever they are given).

    speed      64 samples of eight questions, by either way, at each distance; and one update
    through the crew, which both need, with rewards that alternate. With `--seeds 0` nothing else
    learning   the same run by either way, from equal weights, at distance 0: `pipeline` samples the
    present policy through all stages,
               `copies` from an int8 copy of what the policy was one step before. Either is
               corrected for the recorded log-probabilities, by `tis`. Held-out reward of the
               trained float32 policy, at equal steps
    refresh    bytes of each copy's refresh, as it would travel, against the weights; once more at
    the learning rate of a large model
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio

from benchmarks import report
from benchmarks.simulator import Arm, Node, Swarm
from benchmarks.tolerance import scored
from swarmnode.config import PolicyConfig, TaskConfig, TrainingConfig
from swarmnode.policy.build_deep import write_deep_model
from swarmnode.policy.generate import GroupSample, SampledCompletion, Sampling, generate
from swarmnode.policy.load import Policy, load_policy
from swarmnode.policy.quantised import build_quantised
from swarmnode.stages.model import LearnRow, StageRuntime
from swarmnode.stages.pipeline import Head, WorkerSettings
from swarmnode.stages.policy_copy import copied_layout, decode_copy, encode_copy, install_copy
from swarmnode.stages.recovery import trained, trained_layout
from swarmnode.stages.wire import ActivationCodec, FrameLimits
from swarmnode.tasks.client import Scorer
from swarmnode.trainer.batch import assemble, own_group
from swarmnode.trainer.update import normalizer
from swarmnode.trainer.update import trained as rows_trained
from tests.support.crew import open_crew
from tests.support.split_models import split_model, whole_state

STAGES, LAYERS = 4, 8
MILLISECONDS = (0, 50)
SLOW = 1e-6
"""A learning rate of whole weights at 7 B."""
CODEC: ActivationCodec = "bfloat16"
"""The product's default when this was measured; int8 since."""
EXAM = 40
"""Held-out questions of each task."""


class Copy:
    """The whole policy in int8, refreshed as members would: through the bytes that would travel."""

    def __init__(self, policy: Policy) -> None:
        base = {name: tensor.detach().clone() for name, tensor in policy.base.state_dict().items()}
        self._base = base.__getitem__
        model = build_quantised(policy.base.config, self._base, policy.dtype, policy.device)
        self.policy = replace(policy, model=model)
        self.plain = sum(p.numel() for p in policy.model.parameters())

    def encoded(self, runtimes: Sequence[StageRuntime]) -> list[bytes]:
        return [
            encode_copy(
                r.spec, trained(r), copied_layout(r.spec, trained_layout(r.model)), self._base
            )
            for r in runtimes
        ]

    def refresh(self, runtimes: Sequence[StageRuntime], bodies: Sequence[bytes]) -> None:
        for runtime, body in zip(runtimes, bodies, strict=True):
            layout = copied_layout(runtime.spec, trained_layout(runtime.model))
            install_copy(self.policy.model, decode_copy(runtime.spec, body, layout, self._base))


@contextlib.asynccontextmanager
async def late_crew(
    runtimes: Sequence[StageRuntime], settings: WorkerSettings, limits: FrameLimits, seconds: float
) -> AsyncIterator[Head]:
    """A crew whose streams are late by `seconds` each way."""
    async with (
        trio.open_nursery() as nursery,
        open_crew(runtimes, settings, limits, far=partial(late, nursery, seconds)) as crew,
    ):
        yield crew.head
        nursery.cancel_scope.cancel()


def late(nursery: trio.Nursery, seconds: float, stream: trio.abc.Stream) -> trio.abc.Stream:
    """`stream`, whose bytes are sent so much later, in their order."""
    return Late(nursery, seconds, stream) if seconds else stream


class Late(trio.abc.Stream):
    def __init__(self, nursery: trio.Nursery, seconds: float, stream: trio.abc.Stream) -> None:
        self._seconds, self._stream = seconds, stream
        self._send, self._receive = trio.open_memory_channel[tuple[float, bytes]](100_000)
        nursery.start_soon(self._carry)

    async def _carry(self) -> None:
        async for due, data in self._receive:
            await trio.sleep_until(due)
            await self._stream.send_all(data)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._send.send((trio.current_time() + self._seconds, bytes(data)))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._stream.aclose()


@dataclass(frozen=True)
class Start:
    """A policy before training, and what a crew of it is made of."""

    policy: Policy
    training: TrainingConfig
    limits: FrameLimits
    settings: WorkerSettings

    def runtimes(self) -> list[StageRuntime]:
        model = self.policy.clone().model
        return [
            StageRuntime(spec, stage)
            for spec, stage in split_model(model, [LAYERS // STAGES] * STAGES)
        ]


def start() -> Start:
    with tempfile.TemporaryDirectory() as directory:
        path = write_deep_model(Path(directory) / "model", LAYERS, middle=True)
        policy = load_policy(PolicyConfig(model=str(path), devices="cpu", threads=1))
    config = policy.base.config
    limits = FrameLimits(hidden=int(config.hidden_size), vocab=int(config.vocab_size), tokens=16384)
    return Start(policy, TrainingConfig(), limits, WorkerSettings(policy.fingerprint, CODEC))


async def through_the_crew(
    head: Head, policy: Policy, prompts: Sequence[str], s: Sampling, seed: int
) -> list[GroupSample]:
    """As `StageEngine.generate`."""
    heads = [policy.encode_prompt(prompt) for prompt in prompts]
    waves = await head.generate(
        heads,
        s.num_generations,
        s.max_tokens,
        s.temperature,
        s.top_p,
        policy.eos_ids,
        random.Random(seed),
    )
    out = []
    for wave in waves:
        done = [
            SampledCompletion(
                ids, logprobs, policy.decode(ids), "eos" if ids[-1] in wave.ends else "length"
            )
            for ids, logprobs in zip(wave.ids, wave.logprobs, strict=True)
        ]
        size = wave.num_generations
        out += [
            GroupSample(prompt, done[q * size : (q + 1) * size])
            for q, prompt in enumerate(wave.prompts)
        ]
    return out


async def learn(
    head: Head, training: TrainingConfig, samples: Sequence[tuple[GroupSample, list[float]]]
) -> bool:
    """One step of all stages, as `CrewPolicy.update`. Whether there was something to learn."""
    rows = assemble([own_group(sample, rewards) for sample, rewards in samples], training.advantage)
    own, _ = rows_trained(rows, training)
    if not own:
        return False
    work = [
        LearnRow(
            *rows.rows[i][:2],
            rows.recorded(i),
            float(rows.advantages[i]),
            float(rows.weights[i]),
            rows.groups[i],
            sampled=True,
        )
        for i in own
    ]
    result = await head.update(work, training, normalizer(rows, training), training.learning_rate)
    return result.refused is None


class Questions(Swarm):
    """A stream of training questions and a held-out exam, the simulator's, for one policy."""

    def __init__(self, policy: Policy, training: TrainingConfig, scorer: Scorer, seed: int) -> None:
        super().__init__(Arm("alone"), [policy], training, scorer, seed, EXAM)
        self.node: Node = self.nodes[0]

    def ask(self, count: int) -> tuple[list[Any], list[str]]:
        refs = [ref for ref, _ in self.node.ask(count, TaskConfig().names)]
        return refs, [q.prompt for q in scored(self.scorer, [(ref, []) for ref in refs])]

    def rewards(
        self, refs: Sequence[Any], samples: Sequence[GroupSample]
    ) -> list[tuple[GroupSample, list[float]]]:
        answers = [
            (ref, [c.text for c in s.completions]) for ref, s in zip(refs, samples, strict=True)
        ]
        return [(s, r.rewards) for s, r in zip(samples, scored(self.scorer, answers), strict=True)]

    def held_out(self) -> float:
        self.evaluate()
        return self.trace.held_out[-1].reward


def sampling(t: TrainingConfig) -> Sampling:
    return Sampling(t.num_generations, t.max_completion_length, t.temperature, t.top_p)


async def learning(
    begin: Start, arm: str, seed: int, steps: int, every: int, scorer: Scorer
) -> dict[str, Any]:
    """Held-out rewards {step: reward} of one arm, and bytes of its refreshes."""
    whole, runtimes, t = begin.policy.clone(), begin.runtimes(), begin.training
    questions, copy = Questions(whole, t, scorer, seed), Copy(begin.policy)
    generator = whole.random_generator(seed)
    held_out, sizes, waiting = {0: questions.held_out()}, [], copy.encoded(runtimes)
    off: list[float] = []
    async with late_crew(runtimes, begin.settings, begin.limits, 0.0) as head:
        for step in range(1, steps + 1):
            refs, prompts = questions.ask(t.groups_per_step)
            if arm == "copies":
                samples = generate(copy.policy, prompts, sampling(t), generator)
                copy.refresh(runtimes, waiting)  # what was on its way while these were sampled
            else:
                samples = await through_the_crew(
                    head, whole, prompts, sampling(t), seed * 100_003 + step
                )
            if step % every == 0:
                off.append(await apart(head, t, samples))
            await learn(head, t, questions.rewards(refs, samples))
            if arm == "copies":
                waiting = copy.encoded(runtimes)
                sizes.append(sum(map(len, waiting)))
            if step % every == 0:
                for runtime in runtimes:
                    load_whole_state_of(runtime, whole)
                held_out[step] = questions.held_out()
    return {
        "arm": arm,
        "seed": seed,
        "held_out": held_out,
        "bytes": sizes,
        "weights": copy.plain,
        "apart": off,
    }


async def apart(head: Head, t: TrainingConfig, samples: Sequence[GroupSample]) -> float:
    """Mean |difference| of what the sampler recorded and what the crew says now, nats per token."""
    rows = [(sample.prompt_ids, c.ids) for sample in samples for c in sample.completions]
    now = await head.score(rows, t.temperature)
    recorded = [c.logprobs for sample in samples for c in sample.completions]
    return statistics.fmean(
        abs(a - b)
        for (ours, _), theirs in zip(now, recorded, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


def load_whole_state_of(runtime: StageRuntime, whole: Policy) -> None:
    """A stage's weights into the whole policy."""
    parameters = dict(whole.model.named_parameters())
    with torch.no_grad():
        for name, tensor in whole_state(runtime.spec, runtime.model).items():
            parameters[name].copy_(tensor)


async def speed(begin: Start, milliseconds: int, repeats: int, scorer: Scorer) -> dict[str, Any]:
    """Seconds of 64 samples by either way, of an update, and of making and taking a refresh."""
    t, runtimes = begin.training, begin.runtimes()
    questions, copy = Questions(begin.policy, t, scorer, 1), Copy(begin.policy)
    found: dict[str, list[float]] = {
        name: [] for name in ("pipeline", "copies", "update", "refresh")
    }
    generator, tokens = begin.policy.random_generator(1), []
    async with late_crew(runtimes, begin.settings, begin.limits, milliseconds / 1000) as head:
        for repeat in range(repeats):
            _, prompts = questions.ask(t.groups_per_step)
            started = time.perf_counter()
            samples = await through_the_crew(head, begin.policy, prompts, sampling(t), repeat)
            found["pipeline"].append(time.perf_counter() - started)
            tokens.append(max(len(c.ids) for s in samples for c in s.completions))
            started = time.perf_counter()
            generate(copy.policy, prompts, sampling(t), generator)
            found["copies"].append(time.perf_counter() - started)
            done = [(s, [float(i % 2) for i in range(t.num_generations)]) for s in samples]
            started = time.perf_counter()
            await learn(head, t, done)
            found["update"].append(time.perf_counter() - started)
            started = time.perf_counter()
            copy.refresh(runtimes, copy.encoded(runtimes))
            found["refresh"].append(time.perf_counter() - started)
    return {
        "milliseconds": milliseconds,
        "samples": t.groups_per_step * t.num_generations,
        "longest": tokens,
        **found,
    }


def speed_rows(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    out = []
    for one in found:
        rate = {way: [one["samples"] / s for s in one[way]] for way in ("pipeline", "copies")}
        some = lambda values, spec=".1f": (
            f"{statistics.median(values):{spec}} [{min(values):{spec}} … {max(values):{spec}}]"
        )
        gain = statistics.median(rate["copies"]) / statistics.median(rate["pipeline"])
        out.append(
            [
                str(one["milliseconds"]),
                some(rate["pipeline"]),
                some(rate["copies"]),
                f"{gain:.1f}",
                some(one["update"], ".2f"),
                some(one["refresh"], ".3f"),
            ]
        )
    return out


def learning_rows(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    out, seeds = [], sorted({one["seed"] for one in found})
    by = {(one["arm"], one["seed"]): one["held_out"] for one in found}
    for step in sorted(next(iter(by.values()))):
        ways = [[by[arm, seed][step] for seed in seeds] for arm in ("pipeline", "copies")]
        differences = [b - a for a, b in zip(*ways, strict=True)]
        out.append([str(step), *(report.spread(values, 3) for values in (*ways, differences))])
    return out


def refresh_rows(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    copies = [one for one in found if one["arm"] == "copies"]
    out = []
    for step in sorted({1, 10, min(100, len(copies[0]["bytes"])), len(copies[0]["bytes"])}):
        sizes = [one["bytes"][step - 1] for one in copies if len(one["bytes"]) >= step]
        if sizes:
            out.append(
                [
                    str(step),
                    f"{statistics.fmean(sizes):,.0f}",
                    f"{statistics.fmean(sizes) / copies[0]['weights']:.3f}",
                ]
            )
    return out


def run(seeds: int, steps: int, out: Path | None, every: int = 20, repeats: int = 5) -> None:
    torch.set_num_threads(1)
    begin = start()
    with Scorer() as scorer:
        speeds = [trio.run(speed, begin, one, repeats, scorer) for one in MILLISECONDS]
        print(report.heading("crew: sampling through the stages, and from a whole int8 copy"))
        headers = [
            "ms, one way",
            "samples/s, pipeline",
            "samples/s, copies",
            "times",
            "s per update",
            "s of CPU per refresh, all stages",
        ]
        print(report.table(headers, speed_rows(speeds)), flush=True)
        if out is not None:
            report.write_json(out, {"speeds": speeds})
        if not seeds:
            return
        found = []
        for seed in range(1, seeds + 1):
            for arm in ("pipeline", "copies"):
                found.append(trio.run(learning, begin, arm, seed, steps, every, scorer))
                held_out, off = found[-1]["held_out"], found[-1]["apart"]
                print(
                    arm,
                    seed,
                    {step: round(one, 3) for step, one in held_out.items()},
                    [round(nats, 4) for nats in off],
                    flush=True,
                )
        slowly = replace(begin, training=begin.training.model_copy(update={"learning_rate": SLOW}))
        slow = trio.run(learning, slowly, "copies", 1, steps, steps, scorer)
    print(
        report.table(
            ["step", "held-out, pipeline", "held-out, copies a step old", "difference"],
            learning_rows(found),
        )
    )
    print()
    rows = [
        [f"{r:g}", *row]
        for r, some in ((begin.training.learning_rate, found), (SLOW, [slow]))
        for row in refresh_rows(some)
    ]
    print(
        report.table(
            ["learning rate", "after step", "bytes of a refresh", "bytes per weight"], rows
        )
    )
    if out is not None:
        report.write_json(out, {"speeds": speeds, "learning": [*found, slow]})

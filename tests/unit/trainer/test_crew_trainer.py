"""Trainers of a crew learn like a trainer of the whole policy, publish groups, and recover from
losses."""

import contextlib
import math
import shutil
import threading
import time
from functools import partial

import pytest
import torch
import trio
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, GPT2Config

from swarmnode.config import Config, PolicyConfig
from swarmnode.errors import DeviceError, EngineGone, Refused, Unavailable
from swarmnode.policy.build_deep import write_deep_model
from swarmnode.policy.engine.protocol import Request
from swarmnode.policy.generate import Sampling
from swarmnode.policy.load import load_policy, trainable
from swarmnode.policy.micro import MicroBatcher
from swarmnode.policy.ways import Row
from swarmnode.process import Progress
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.stages.pipeline import Head
from swarmnode.stages.policy_copy import MAX_AGE
from swarmnode.stages.trainer import CrewPolicy, CrewTrainer, make_trainer
from swarmnode.tasks.client import Scorer
from swarmnode.trainer.batch import TrainingGroup, assemble
from swarmnode.trainer.export import find_copies
from swarmnode.trainer.judge import judge
from swarmnode.trainer.loop import Trainer
from swarmnode.trainer.state import SEQUENCE_MARGIN
from swarmnode.trainer.update import Updater
from swarmnode.wire.messages import RolloutGroup
from swarmnode.wire.tensors import unpack_ids, unpack_logprobs
from tests.support.crew_network import crew_network
from tests.support.exporting import export
from tests.support.waiting import until

pytestmark = pytest.mark.slow

PROMPTS = ["What is 3 + 4?", "Calculate 10 + 8.", "Find the LCM of 6, 9"]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_deep_model(tmp_path_factory.mktemp("model"), layers=4)


def config(directory, model, codec="float32", **sections):
    sections = {"training": {}, "stages": {}, **sections}
    return Config.model_validate(
        {
            "node": {"data_dir": directory},
            "task": {"held_out_per_task": 2},
            "weights": {"rule": "off"},
            **sections,
            "policy": {"model": str(model), "devices": "cpu", **sections.get("policy", {})},
            "training": {"eval_every": 1000, **sections["training"]},
            "stages": {
                "mode": "always",
                "codec": codec,
                **sections["stages"],
            },
        }
    )


class Trainers(list):
    nursery: trio.Nursery


@contextlib.asynccontextmanager
async def crew(tmp_path, configs, layers):
    """(network, trainers) of one running crew, all in this process."""
    directories = [tmp_path / f"node{i}" for i in range(len(configs))]
    async with crew_network(directories, layers) as network, trio.open_nursery() as nursery:
        trainers = Trainers(CrewTrainer(c, Progress()) for c in configs)
        trainers.nursery = nursery
        for trainer in trainers:
            nursery.start_soon(trio.to_thread.run_sync, trainer.run)
        try:
            await until(lambda: network.running, seconds=60)
            yield network, trainers
        finally:
            for trainer in trainers:
                trainer.stop()


def make(tmp_path, model, count=2, **sections):
    return [config(tmp_path / f"node{i}", model, **sections) for i in range(count)]


def whole(model):
    return load_policy(PolicyConfig(model=str(model), devices="cpu"))


def engine_of(trainer):
    """Replace the loop of the head, and return its engine for calls of the test."""
    told = (
        trainer._config.training,
        trainer._model,
        trainer._runner,
        trainer._runner.led_lineage(),
        threading.Event(),
    )
    return CrewPolicy(*told, policy_copy=trainer.policy_copy)


def stage_of(trainer):
    return trainer._runner.stage


def runtime_of(trainer):
    return stage_of(trainer).runtime


async def in_thread(work, *args):
    return await trio.to_thread.run_sync(lambda: work(*args))


class Idle:
    """Replacement of the loop for a head that starts no work of its own."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(CrewTrainer, "_lead", lambda self, crew, scorer: self._stop.wait())


async def test_crew_learns_publishes_and_resumes(tmp_path, model):
    configs = make(tmp_path, model, 3, training={"max_steps": 24, "eval_every": 24})
    async with crew(tmp_path, configs, [1, 2, 1]) as (network, _):
        head = network.nodes[0]
        await until(lambda: head.reports and head.reports[-1].phase == "draining", seconds=90)
    last = head.reports[-1]
    assert last.step == 24
    assert last.reward_held_out > last.reward_held_out_start + 0.02
    assert not any(node.published or node.reports for node in network.nodes[1:])
    policy = whole(model)
    assert {hello.model for node in network.nodes for hello in node.hellos} == {policy.fingerprint}
    assert {hello.tokenizer for node in network.nodes for hello in node.hellos} == {
        policy.tokenizer_hash
    }
    assert [group.policy_version for group in head.published] == sorted(
        group.policy_version for group in head.published
    )

    # the whole crew restarts from its journals and repeats no question
    again = make(tmp_path, model, 3, training={"max_steps": 26})
    async with crew(tmp_path, again, [1, 2, 1]) as (network, _):
        await until(
            lambda: network.nodes[0].reports and network.nodes[0].reports[-1].phase == "draining",
            seconds=60,
        )
        assert [node.sources for node in network.nodes] == [["checkpoint"]] * 3
        assert network.started_at[0][1] == last.policy_version, (
            "steps with nothing to learn are none of the crew's"
        )
        assert network.nodes[0].reports[0].step == 24
        repeated = {g.sequence for g in network.nodes[0].published} & {
            g.sequence for g in head.published
        }
        assert not repeated
        assert (
            min(g.sequence for g in network.nodes[0].published)
            >= max(g.sequence for g in head.published) + SEQUENCE_MARGIN
        )


async def test_crew_step_equals_whole_policy_step(tmp_path, model, monkeypatch):
    Idle(monkeypatch)
    configs = make(tmp_path, model, 4)
    policy = whole(model)
    cfg = configs[0].training
    generator = torch.Generator().manual_seed(5)
    prompts = [policy.encode_prompt(p) for p in PROMPTS]
    groups = []
    for i, peer in enumerate(["", "", "someone"]):
        rows = [
            Row(prompts[i], torch.randint(4, 100, (n,), generator=generator).tolist())
            for n in (3, 1, 5, 2)
        ]
        old = [[-4.0] * len(c) for _, c, *_ in rows]
        weights, sampler = [1.0, 0.9, 1.0, 0.8], [] if peer else old
        groups.append(
            TrainingGroup(rows, old, [1.0, 0.0, 0.0, 1.0], weights, peer, sampler_logprobs=sampler)
        )
    rows = assemble(groups, "grpo")
    updater = Updater(policy, cfg, MicroBatcher(16384))
    async with crew(tmp_path, configs, [1, 1, 1, 1]) as (_, trainers):
        engine = engine_of(trainers[0])
        for _ in range(2):
            expected = updater.update(rows)
            got = await in_thread(engine.update, rows)
            assert got.stepped
            assert got.loss == pytest.approx(expected.loss, abs=1e-5)
            assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        scored = await in_thread(engine.score, rows.rows, 1.0)
        ours = MicroBatcher(16384).score_with_entropy(policy, rows.rows, 1.0)
        for (a, b), (c, d) in zip(scored, ours, strict=True):
            assert a == pytest.approx(c, abs=1e-4)
            assert b == pytest.approx(d, abs=1e-3)
        state = {}
        for trainer in trainers:
            runtime = runtime_of(trainer)
            state |= {
                runtime.spec.whole_name(n): p.detach() for n, p in runtime.model.named_parameters()
            }
        for name, tensor in trainable(policy.model).items():
            assert torch.allclose(state[name], tensor, atol=1e-4), name


def some_rows(policy, seed):
    generator = torch.Generator().manual_seed(seed)
    prompts = [policy.encode_prompt(p) for p in PROMPTS[:2]]
    groups = []
    for prompt in prompts:
        rows = [
            Row(prompt, torch.randint(4, 100, (n,), generator=generator).tolist())
            for n in (3, 1, 5, 2)
        ]
        groups.append(
            TrainingGroup(
                rows, [[-4.0] * len(c) for _, c, *_ in rows], [1.0, 0.0, 0.0, 1.0], [1.0] * 4
            )
        )
    return assemble(groups, "grpo")


async def test_small_member_reduces_the_micro_batch(tmp_path, model, monkeypatch):
    Idle(monkeypatch)
    configs = make(tmp_path, model, 3)
    policy = whole(model)
    updater = Updater(policy, configs[0].training, MicroBatcher(16384))
    async with crew(tmp_path, configs, [1, 2, 1]) as (_, trainers):
        engine, short = engine_of(trainers[0]), runtime_of(trainers[1])
        least = 40

        def limited(real):
            def run(batch, *args):
                if batch.padded_tokens > least:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return real(batch, *args)

            return run

        monkeypatch.setattr(short, "forward", limited(short.forward))
        monkeypatch.setattr(short, "backward", limited(short.backward))
        rows = some_rows(policy, 0)
        assert MicroBatcher(16384).cut([len(p) + len(c) for p, c, *_ in rows.rows]) > least
        expected, got = updater.update(rows), await in_thread(engine.update, rows)
        assert got.stepped
        assert got.loss == pytest.approx(expected.loss, abs=1e-5)
        assert engine.statistics().micro_batch_tokens < 16384
        retries = engine.statistics().oom_retries
        assert 1 <= retries <= 3
        assert (await in_thread(engine.update, some_rows(policy, 1))).stepped
        assert engine.statistics().oom_retries == retries, "what has been learnt is kept"
        least = max(len(p) + len(c) for p, c, *_ in rows.rows)
        assert len(await in_thread(engine.score, rows.rows, 1.0)) == len(rows.rows)
        assert engine.statistics().oom_retries > retries, "what is only scored is cut likewise"


async def test_number_of_pieces_of_a_step_is_bounded(tmp_path, model, monkeypatch):
    """If a member runs out of memory at the smallest micro-batch, the step is skipped and every
    trainer continues."""
    Idle(monkeypatch)
    monkeypatch.setattr("swarmnode.stages.trainer.FIRST_TOKENS", 12)
    for module in (
        "swarmnode.stages.trainer.MAX_MICRO_BATCHES",
        "swarmnode.stages.wire.MAX_MICRO_BATCHES",
    ):
        monkeypatch.setattr(module, 4)
    policy = whole(model)
    async with crew(tmp_path, make(tmp_path, model, 3), [1, 2, 1]) as (_, trainers):
        engine, short = engine_of(trainers[0]), runtime_of(trainers[1])
        assert (await in_thread(engine.update, some_rows(policy, 0))).stepped

        def fails(*_):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(short, "forward", fails)
        assert not (await in_thread(engine.update, some_rows(policy, 1))).stepped


async def test_slow_stage_starts_with_small_micro_batches(tmp_path, model, monkeypatch):
    """No deadline expires on work that only takes long."""
    Idle(monkeypatch)
    monkeypatch.setattr("swarmnode.stages.trainer.HEAD_SECONDS", 1.5)
    monkeypatch.setattr("swarmnode.stages.trainer.FIRST_TOKENS", 30)
    policy = whole(model)
    async with crew(tmp_path, make(tmp_path, model, 3), [1, 2, 1]) as (network, trainers):
        engine, slow = engine_of(trainers[0]), runtime_of(trainers[1])
        real = slow.forward

        def forward(batch, *args):
            time.sleep(0.02 * batch.padded_tokens)
            return real(batch, *args)

        monkeypatch.setattr(slow, "forward", forward)
        sizes = []
        for seed in range(3):
            assert (await in_thread(engine.update, some_rows(policy, seed))).stepped
            sizes.append(engine.statistics().micro_batch_tokens)
        assert sizes == [60, 120, 240], "what went well is doubled"
        assert engine.statistics().oom_retries == 0
        assert not any(node.faults for node in network.nodes)


async def test_new_member_restarts_the_speed_measurement(tmp_path, model, monkeypatch):
    """A new member may be slower than the one before it."""
    Idle(monkeypatch)
    monkeypatch.setattr("swarmnode.stages.trainer.FIRST_TOKENS", 30)
    policy = whole(model)
    async with crew(tmp_path, make(tmp_path, model, 2), [2, 2]) as (_, trainers):
        engine, runner = engine_of(trainers[0]), trainers[0]._runner
        for seed in range(3):
            assert (await in_thread(engine.update, some_rows(policy, seed))).stepped
        grown = engine.statistics().micro_batch_tokens
        assert grown > 60
        members = runner.members()
        assert len(members) == 2
        with monkeypatch.context() as other:
            other.setattr(runner, "members", lambda: (members[0], "somebody else"))
            assert engine.statistics().micro_batch_tokens == 30
        assert engine.statistics().micro_batch_tokens == 30, "and neither are those from before"


async def test_long_completions_of_several_waves_form_one_group(tmp_path, model, monkeypatch):
    Idle(monkeypatch)
    monkeypatch.setattr("swarmnode.stages.trainer.MAX_TOKENS", 100)
    async with crew(tmp_path, make(tmp_path, model, 2), [2, 2]) as (_, trainers):
        engine = engine_of(trainers[0])
        with capture_logs() as said:
            groups = await in_thread(
                engine.generate, PROMPTS[:2], Sampling(8, 8, 5.0, 1.0), engine.random_generator(1)
            )
            monkeypatch.setattr("swarmnode.stages.trainer.SLOW_TOKEN_SECONDS", 0.0)
            for _ in range(2):
                await in_thread(
                    engine.generate, PROMPTS[:1], Sampling(1, 4), engine.random_generator(1)
                )
        advice = [line["remedy"] for line in said if "remedy" in line]
        assert advice == ['stages.policy_copy = "memory"'], "once, if homes are far apart"
        with pytest.raises(
            DeviceError, match=r"a question of .* tokens, and a crew computes 100 at a time"
        ):
            await in_thread(
                engine.generate, ["12 " * 60], Sampling(8, 8, 1.0, 1.0), engine.random_generator(1)
            )
    assert [len(group.completions) for group in groups] == [8, 8]
    assert [group.prompt_ids for group in groups] == [
        whole(model).encode_prompt(prompt) for prompt in PROMPTS[:2]
    ]
    assert len({tuple(c.ids) for c in groups[0].completions}) > 4, "each wave draws by itself"


@pytest.mark.parametrize("source", ["", "checkpoint", "neighbour"])
async def test_lost_stage_does_not_change_the_result(tmp_path, model, monkeypatch, source):
    """Two adjacent stages lost together are restored exactly, from their own checkpoints or from
    their neighbours'."""
    Idle(monkeypatch)
    configs = make(tmp_path, model, 4, stages={"checkpoint_every": 1}, weights={"rule": "noloco"})
    policy = whole(model)
    updater = Updater(policy, configs[0].training, MicroBatcher(16384))
    async with crew(tmp_path, configs, [1, 1, 1, 1]) as (network, trainers):
        engine = engine_of(trainers[0])
        for step in range(6):
            if step == 3 and source:
                outer = [trainer._averaging.tensors() for trainer in trainers]
                assert all(
                    t._averaging.probe._exchange is t._recovery.exchange is not None
                    for t in trainers
                ), "averages can be judged"
                for stage in (1, 2):
                    trainers[stage].stop()
                await until(lambda: not any(network.nodes[stage].connected for stage in (1, 2)))
                for stage in (1, 2):
                    if source == "neighbour":
                        shutil.rmtree(tmp_path / f"node{stage}" / "trainer" / "stages")
                    network.nodes[stage].pid = 0  # another process
                    trainers[stage] = again = CrewTrainer(configs[stage], Progress())
                    trainers.nursery.start_soon(trio.to_thread.run_sync, again.run)
                await until(lambda: network.running, seconds=40)
                assert [n.sources for n in network.nodes] == [[], [source], [source], []]
                for before, trainer in list(zip(outer, trainers, strict=True))[1:3]:
                    # initial slow weights, or the present weights where the slow ones were lost
                    now = trainer._averaging.tensors()
                    assert all(torch.equal(t, now[name]) for name, t in before.items()) == (
                        source == "checkpoint"
                    )
            rows = some_rows(policy, step)
            expected = updater.update(rows)
            got = await in_thread(engine.update, rows)
            assert got.stepped
            assert got.loss == pytest.approx(expected.loss, abs=1e-4)
            # a disk that is still busy with the step before skips one
            if source == "checkpoint":
                await until(
                    lambda step=step: all(step + 1 in own_steps(t) for t in trainers), seconds=60
                )
            if source and step < 3:  # likewise while a checkpoint is on its way to a neighbour
                await until(
                    lambda step=step: all(
                        sorted(t._recovery.exchange.sharing.stored_steps.values()) == [step + 1] * 2
                        for t in trainers
                    ),
                    seconds=60,
                )
        state = {}
        for trainer in trainers:
            runtime = runtime_of(trainer)
            state |= {
                runtime.spec.whole_name(n): p.detach() for n, p in runtime.model.named_parameters()
            }
        for name, tensor in trainable(policy.model).items():
            assert torch.allclose(state[name], tensor, atol=2e-4), name


def own_steps(trainer):
    return [copy.step for copy in trainer._recovery.held_blocks() if copy.where == "disk"]


def trained_copies(directory):
    """Return True if every stage has a copy after at least one step."""
    found = find_copies(directory)
    return found is not None and not found.missing and all(found.steps.values())


async def test_member_with_the_whole_policy_can_export_it(tmp_path, model):
    configs = make(tmp_path, model, 4, stages={"checkpoint_every": 1})
    keeper = 1
    configs[keeper] = config(
        tmp_path / f"node{keeper}", model, stages={"checkpoint_every": 1, "policy_copy": "disk"}
    )
    async with crew(tmp_path, configs, [1, 1, 1, 1]):
        await until(lambda: trained_copies(tmp_path / f"node{keeper}" / "trainer"), seconds=60)
    told = export(configs[keeper], tmp_path / "out", merge=False)
    assert len(told.stages) == 4
    assert min(told.stages) >= 1
    learnt = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert learnt.keys() == before.keys()
    moved = {name for name, tensor in learnt.items() if not torch.equal(tensor, before[name])}
    assert all(any(f".layers.{stage}." in name for name in moved) for stage in range(4))
    with pytest.raises(Unavailable, match="no checkpoint of"):
        export(configs[0], tmp_path / "other", merge=False)


async def test_crew_recovers_the_adapter_of_a_lost_stage(tmp_path, model, monkeypatch):
    Idle(monkeypatch)
    adapter = {"lora": {"r": 4, "lora_alpha": 8}}
    settings = {
        "policy": adapter,
        "weights": {"rule": "noloco"},
        "stages": {"checkpoint_every": 1},
        "training": {"learning_rate": 1e-2},
    }
    configs = make(tmp_path, model, 3, **settings)
    async with crew(tmp_path, configs, [1, 2, 1]) as (network, trainers):
        engine = engine_of(trainers[0])
        policy = whole(model)
        for step in range(2):
            assert (await in_thread(engine.update, some_rows(policy, step))).stepped
        parts = lambda: {
            f"{t._runner.stage.index} {n}": p.detach().clone()
            for t in trainers
            for n, p in runtime_of(t).model.named_parameters()
            if p.requires_grad
        }
        before = parts()
        assert before
        assert all("lora_B" in name for name in before), "A is the same everywhere and frozen"
        assert all(float(t.abs().max()) > 0 for t in before.values())
        await until(lambda: all(n.status.checkpoint_step == 2 for n in network.nodes), seconds=20)
        trainers[1].stop()
        await until(lambda: not network.nodes[1].connected)
        shutil.rmtree(tmp_path / "node1" / "trainer" / "stages")
        network.nodes[1].pid = 0
        trainers[1] = CrewTrainer(configs[1], Progress())
        trainers.nursery.start_soon(trio.to_thread.run_sync, trainers[1].run)
        await until(lambda: network.running, seconds=40)
        assert network.nodes[1].sources == ["neighbour"]
        after = parts()
        assert all(torch.equal(before[name], after[name]) for name in before)
        hello = network.nodes[1].hellos[-1]
        assert hello.replica is None or all(
            "layers.1." in t.name or "layers.2." in t.name for t in hello.replica.layout
        )


def as_received(published, policy):
    """Return a published group as another node receives it."""
    with Scorer() as scorer:
        prompts = [scorer.prompt(own.task) for own in published]
    told = lambda own: (
        own.task,
        policy.fingerprint,
        policy.tokenizer_hash,
        own.policy_version,
        0,
        own.sequence,
        own.sampling,
    )
    return [
        ExternalGroup(
            bytes(32),
            "12D3KooWpeer",
            RolloutGroup(*told(own), own.completions),
            prompt,
            own.rewards,
            0,
        )
        for own, prompt in zip(published, prompts, strict=True)
    ]


async def test_head_accepts_groups_of_a_member_with_a_policy_copy(tmp_path, model, monkeypatch):
    Idle(monkeypatch)
    configs = make(tmp_path, model, 3, training={"groups_per_step": 6})
    configs[1] = config(
        tmp_path / "node1", model, stages={"policy_copy": "memory"}, training={"groups_per_step": 6}
    )
    policy = whole(model)
    async with crew(tmp_path, configs, [1, 2, 1]) as (network, trainers):
        engine, member = engine_of(trainers[0]), network.nodes[1]
        for step in range(4):
            if step:
                assert (await in_thread(engine.update, some_rows(policy, step))).stepped
            before = len(member.published)
            await until(lambda before=before: len(member.published) > before, seconds=60)
        published = list(member.published)  # the trainer continues to publish
        judged = await in_thread(judge, as_received(published, policy), policy, engine.score, 1.0)
        assert [outcome for _, outcome in judged.outcomes] == ["used"] * len(published)
        versions = [group.policy_version for group in published]
        assert versions == sorted(versions)
        assert set(versions) <= {0, 1, 2, 3}
        assert len(published) <= 8, "a third of six groups at each step"
        trainers[1].stop()
        await until(lambda: not member.connected)
        said = [group.sequence for group in member.published]
        member.pid = 0  # another process
        trainers[1] = CrewTrainer(configs[1], Progress())
        trainers.nursery.start_soon(trio.to_thread.run_sync, trainers[1].run)
        await until(lambda: len(member.published) > len(said), seconds=60)
        copy, disk = (
            trainers[1].policy_copy,
            lambda *_: (_ for _ in ()).throw(OSError("no space left")),
        )
        monkeypatch.setattr("swarmnode.trainer.state.write", disk)
        assert (await in_thread(engine.update, some_rows(policy, 9))).stepped
        await until(lambda: trainers[1].policy_copy is None, seconds=60)
        assert copy.status_fields(0) == {}, "its memory is free"
        assert (await in_thread(engine.update, some_rows(policy, 10))).stepped, "its stage goes on"
    assert len(said) == len(set(said))
    assert (
        min(group.sequence for group in member.published[len(said) :])
        >= max(said) + SEQUENCE_MARGIN
    )
    assert not network.nodes[2].published, "it has no copy"


async def test_whole_node_accepts_groups_of_a_quantised_crew(tmp_path, model):
    configs = make(tmp_path, model, 2, codec="int8", training={"max_steps": 1})
    async with crew(tmp_path, configs, [2, 2]) as (network, _):
        await until(lambda: len(network.nodes[0].published) >= 4, seconds=60)
        policy = whole(model)
        groups = as_received(network.nodes[0].published[:4], policy)
        for own in network.nodes[0].published[:4]:
            for completion in own.completions:
                logprobs = unpack_logprobs(completion.logprobs)
                assert len(logprobs) == len(unpack_ids(completion.token_ids)) == completion.tokens
                assert math.isclose(math.fsum(logprobs.tolist()), completion.logprob, abs_tol=1e-4)
                assert policy.decode(unpack_ids(completion.token_ids).tolist()) == completion.text
        judged = judge(groups, policy, partial(MicroBatcher(16384).score_with_entropy, policy), 1.0)
        assert [outcome for _, outcome in judged.outcomes] == ["used"] * 4


async def test_calls_outlive_a_crew_but_not_its_lineage(tmp_path, model, monkeypatch):
    Idle(monkeypatch)
    async with crew(tmp_path, make(tmp_path, model), [2, 2]) as (network, trainers):
        engine = engine_of(trainers[0])
        results = []

        async def ask():
            results.append(
                await in_thread(
                    engine.generate, PROMPTS * 8, Sampling(4, 8), torch.Generator().manual_seed(1)
                )
            )

        expected = await in_thread(
            engine.generate, PROMPTS * 8, Sampling(4, 8), torch.Generator().manual_seed(1)
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: trainers[0]._runner.head().open_waves)
            network.end("for a test")
        assert network.formed == 2
        ids = lambda groups: [[c.ids for c in g.completions] for g in groups]
        assert ids(results[0]) == ids(expected), "begun again, and the same tokens drawn"
        network.lineage = b"\x09" * 32
        network.end("for a test")
        with pytest.raises(EngineGone):
            await in_thread(engine.score, [([5, 6], [7])], 1.0)


@pytest.mark.parametrize("rank", [0, 4])
async def test_policy_copy_of_the_head_outlives_a_member(tmp_path, model, monkeypatch, rank):
    Idle(monkeypatch)
    policy = {"lora": {"r": rank, "lora_alpha": 2 * rank}} if rank else {}
    shared = {"policy": policy, "training": {"learning_rate": 1e-2 if rank else 1e-3}}
    configs = make(tmp_path, model, 3, stages={"checkpoint_every": 1}, **shared)
    configs[0] = config(
        tmp_path / "node0", model, stages={"checkpoint_every": 1, "policy_copy": "memory"}, **shared
    )
    text, sampling = whole(model), Sampling(4, 8)
    async with crew(tmp_path, configs, [1, 2, 1]) as (network, trainers):
        engine, head = engine_of(trainers[0]), network.nodes[0]
        generation = engine.generation(sampling, torch.Generator().manual_seed(1))
        taken, through_stages, generate = [], [], Head.generate
        monkeypatch.setattr(
            Head, "generate", lambda *args: through_stages.append(args) or generate(*args)
        )

        def sample():
            for number, prompt in enumerate(PROMPTS):
                generation.submit(Request(number, prompt))
            return [done.sample for done in generation.finished(0)]

        async def learnt(times):
            for _ in range(times):
                assert (await in_thread(engine.update, some_rows(text, len(taken)))).stepped
                taken.append(1)

        async def followed():
            """Groups that a copy of the present step has sampled."""
            with trio.fail_after(60):
                while True:
                    samples = await in_thread(sample)
                    if trainers[0].policy_copy.status_fields(len(taken))["copy_age_steps"] == 0:
                        return samples

        async def apart(samples):
            """Return the mean difference in nats per token between recorded log-probabilities and
            the crew's."""
            rows = [(one.prompt_ids, c.ids) for one in samples for c in one.completions]
            scored = await in_thread(engine.score, rows, 1.0)
            recorded = [c.logprobs for one in samples for c in one.completions]
            both = [
                (x, y)
                for (a, _), b in zip(scored, recorded, strict=True)
                for x, y in zip(a, b, strict=True)
            ]
            return sum(abs(x - y) for x, y in both) / len(both)

        first = await in_thread(sample)
        assert 0 < await apart(first) < 0.05, "int8"
        await learnt(3)
        moved = await apart(first)
        assert await apart(await followed()) < min(0.05, moved / 2)
        await until(lambda: head.status.copy_age_steps == 0 and head.status.copy_bytes)
        evaluated = [
            await in_thread(engine.generate, PROMPTS, sampling, engine.random_generator(5))
            for _ in range(2)
        ]
        assert evaluated[0] == evaluated[1], "an evaluation draws alike each time"
        assert not through_stages, "no token went through the crew"

        trainers[1].stop()
        await until(lambda: not network.nodes[1].connected)
        network.nodes[1].pid = 0  # another process
        trainers[1] = CrewTrainer(configs[1], Progress())
        trainers.nursery.start_soon(trio.to_thread.run_sync, trainers[1].run)
        await until(lambda: network.running, seconds=40)
        await learnt(2)
        assert await apart(await followed()) < 0.05
        assert not through_stages

        await learnt(MAX_AGE + 1)
        assert await apart(await in_thread(sample)) < 1e-4, "too old: the stages sample"
        assert len(through_stages) == 1
        assert 0 < await apart(await followed()) < 0.05


def test_a_copy_is_planned_beside_the_stage(tmp_path, model):
    with pytest.raises(DeviceError, match="policy_copy"):
        CrewTrainer(
            config(tmp_path, model, stages={"policy_copy": "memory", "capacity": 2**20}), Progress()
        ).run()


def test_only_too_large_models_need_a_crew(tmp_path, model):
    fits = config(tmp_path, model, stages={"mode": "auto"})
    assert isinstance(make_trainer(fits, Progress()), Trainer)
    few = {"groups_per_step": 2}
    small = config(tmp_path, model, training=few, stages={"mode": "auto", "capacity": 3 * 2**20})
    with capture_logs() as lines:
        assert isinstance(make_trainer(small, Progress()), CrewTrainer)
        assert not lines
        several = {"policy": small.policy.model_copy(update={"devices": "2"})}
        make_trainer(small.model_copy(update=several), Progress())
    assert [line["detail"] for line in lines] == ["a member of a crew uses cpu alone"]
    assert isinstance(
        make_trainer(
            config(tmp_path, model, stages={"mode": "off", "capacity": 3 * 2**20}), Progress()
        ),
        Trainer,
    )
    assert isinstance(make_trainer(config(tmp_path, model), Progress()), CrewTrainer)


def test_impossible_settings_of_a_crew_fail_at_start(tmp_path, model):
    with pytest.raises(Refused, match="beta"):
        CrewTrainer(config(tmp_path, model, training={"beta": 0.1}), Progress()).run()
    with pytest.raises(DeviceError, match="one layer alone"):
        make_trainer(
            config(tmp_path, model, stages={"mode": "auto", "capacity": 2**20}), Progress()
        )
    other = tmp_path / "gpt2"
    GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64).save_pretrained(other)
    with pytest.raises(DeviceError, match="gpt2"):
        make_trainer(
            config(tmp_path, other, stages={"mode": "auto", "capacity": 2**16}), Progress()
        )

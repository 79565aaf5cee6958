"""Trainers of a crew learn like a trainer of the whole policy, publish groups, and recover from
losses."""

import contextlib
import math
import threading
from functools import partial

import pytest
import torch
import trio
from structlog.testing import capture_logs
from transformers import GPT2Config

from swarmnode.config import Config, PolicyConfig
from swarmnode.errors import DeviceError, Refused
from swarmnode.policy.build_deep import write_deep_model
from swarmnode.policy.engine.protocol import Request
from swarmnode.policy.generate import Sampling
from swarmnode.policy.load import load_policy, trainable
from swarmnode.policy.micro import MicroBatcher
from swarmnode.policy.ways import Row
from swarmnode.process import Progress
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.rollouts.trainer.batch import TrainingGroup, assemble
from swarmnode.rollouts.trainer.judge import judge
from swarmnode.stages.trainer.crew_policy import CrewPolicy
from swarmnode.stages.trainer.crew_trainer import CrewTrainer, make_trainer
from swarmnode.stages.trainer.head import Head
from swarmnode.stages.trainer.policy_copy import MAX_AGE
from swarmnode.tasks.client import Scorer
from swarmnode.trainer.loop import Trainer
from swarmnode.trainer.state import SEQUENCE_MARGIN
from swarmnode.trainer.update import Updater
from swarmnode.wire.messages import RolloutGroup
from swarmnode.wire.tensors import unpack_ids, unpack_logprobs
from tests.support.crew_network import crew_network
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
            "stages": {"mode": "always", "codec": codec, **sections["stages"]},
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
        sampler, weights = [[-4.0] * len(c) for _, c, *_ in rows], [1.0, 0.9, 1.0, 0.8]
        groups.append(TrainingGroup(rows, sampler, [1.0, 0.0, 0.0, 1.0], weights, peer))
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


async def test_new_member_restarts_the_speed_measurement(tmp_path, model, monkeypatch):
    """A new member may be slower than the one before it."""
    Idle(monkeypatch)
    monkeypatch.setattr("swarmnode.stages.trainer.crew_policy.FIRST_TOKENS", 30)
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


@pytest.mark.parametrize("rank", [4])
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
        await until(lambda: network.running, seconds=120)
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

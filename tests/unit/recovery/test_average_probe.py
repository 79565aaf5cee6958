"""The probe of an average with another crew's stage."""

import copy

import pytest
import torch
import trio
from peft import LoraConfig, get_peft_model

from swarmnode.config import TrainingConfig
from swarmnode.policy.logprobs import token_logprobs
from swarmnode.stages.trainer import stage_averaging
from swarmnode.stages.trainer.local_stage import run_one
from swarmnode.stages.trainer.pipeline import WorkerSettings
from swarmnode.stages.trainer.stage_averaging import AverageProbe, _with_tensors
from swarmnode.stages.trainer.stage_checkpoints import RecoverySettings, read_work, trained
from tests.support.lost_stages import quiet, rows_of

SETTINGS = WorkerSettings("float32")
CFG = TrainingConfig(per_device_train_tokens=1024)


@pytest.fixture
def fleet(models, make_fleet, tmp_path):
    def build(model=None):
        model, settings = model or copy.deepcopy(models["llama"]), RecoverySettings(seconds=30.0)
        return make_fleet(model, [1, 1, 1, 1], tmp_path / "crew", SETTINGS, settings)

    return build


async def learn(crew, seed, count=24, rate=1e-3):
    assert (await crew.head.update(rows_of(seed, count), CFG, 30.0, rate)).refused is None
    await quiet()


def tensors(station, noise=0.0):
    """Return (own tensors of the layers, the same with relative `noise`), named as in the whole
    model."""
    generator = torch.Generator().manual_seed(5)
    own = {n: p.detach().clone() for n, p in trained(station.runtime).items() if ".layers." in n}
    far = {
        n: t + noise * t.std() * torch.randn(t.shape, generator=generator) for n, t in own.items()
    }
    return tuple({station.spec.whole_name(n): t for n, t in some.items()} for some in (own, far))


async def verdict(fleet, stage, mine, mean, step_seconds=0.0):
    """Return the losses (before, after); None without a verdict, False if no probe started."""
    probe, told, done = AverageProbe(), [], trio.Event()
    probe.step_seconds = step_seconds
    probe.open(fleet.peers[stage])
    if not probe.measure(mine, mean, lambda losses: (told.append(losses), done.set())):
        return False
    with trio.fail_after(60):
        await done.wait()
    return told[0] and (told[0].before, told[0].after)


@torch.no_grad()
def whole_loss(fleet, seed):
    """Return the loss of the better completions, by the unsplit model with all stages' weights."""
    model = copy.deepcopy(fleet.model)
    model.load_state_dict(
        {
            s.spec.whole_name(n): p
            for s in fleet.stations
            for n, p in s.runtime.model.named_parameters()
        },
        strict=False,
    )
    rows = [(r.prompt_ids, r.completion_ids) for r in rows_of(seed, 24) if r.advantage > 0]
    total = count = 0
    for prompt, completion in rows:
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[
            0, len(prompt) - 1 : -1
        ]
        chosen, _ = token_logprobs(logits, torch.tensor(completion), 1.0)
        total, count = total - float(chosen.sum()), count + len(completion)
    return total / count


async def test_verdict_at_the_head_is_the_loss_of_the_policy(fleet):
    one = fleet()
    async with one.up() as crew:
        await learn(crew, 1)
        mine, mean = tensors(one.stations[0], 0.3)
        before, after = await verdict(one, 0, mine, mean)
        assert before == pytest.approx(whole_loss(one, 1), abs=1e-4)
        with torch.no_grad():
            for name, p in trained(one.stations[0].runtime).items():
                p.copy_(mean.get(one.stations[0].spec.whole_name(name), p))
        assert after == pytest.approx(whole_loss(one, 1), abs=1e-4)
        assert abs(after - before) > 0.01


@pytest.mark.parametrize("stage", range(4))
async def test_every_stage_judges_averages_without_changes(fleet, stage):
    one = fleet()
    async with one.up() as crew:
        for _ in range(4):
            await learn(crew, 1, rate=1e-2)  # so that there is something to unlearn
        weights = one.weights()
        mine, same = tensors(one.stations[stage])
        before, after = await verdict(one, stage, mine, same)
        assert before == after
        negative = {name: -t for name, t in mine.items()}
        assert (await verdict(one, stage, mine, negative))[1] > before + 0.1
        assert (await verdict(one, stage, mine, {n: t * float("nan") for n, t in mine.items()}))[
            1
        ] == float("inf")
        assert all(torch.equal(t, one.weights()[name]) for name, t in weights.items())
        await learn(crew, 2)  # and it trains on


async def test_no_probe_without_inputs_or_crew(fleet):
    one = fleet()
    async with one.up() as crew:
        mine, mean = tensors(one.stations[1])
        assert await verdict(one, 1, mine, mean) is False
        # 4 completions are better than their group, which is too few, so all of them count
        await learn(crew, 1, 12)
        assert await verdict(one, 1, mine, mean)
        await learn(crew, 2, 12)
        assert await verdict(one, 1, mine, mean)
        closed = AverageProbe()
        closed.open(one.peers[1])
        closed.close()
        assert not closed.measure(mine, mean, lambda losses: None)


async def test_deadline_of_a_verdict_grows_with_the_steps(fleet, monkeypatch):
    """At 7 B the activations of four micro-batches cross home lines, which the crew's own fill, six
    times."""
    monkeypatch.setattr(stage_averaging, "VERDICT_SECONDS", (0.2, 3.0))
    one = fleet()
    async with one.up() as crew:
        await learn(crew, 1)
        mine, mean = tensors(one.stations[1])
        run_at = one.peers[1].fetch.run_at

        async def slowly(*args):
            await trio.sleep(0.3)
            return await run_at(*args)

        monkeypatch.setattr(one.peers[1].fetch, "run_at", slowly)
        assert await verdict(one, 1, mine, mean) is None
        assert await verdict(one, 1, mine, mean, step_seconds=10.0)


async def test_no_verdict_out_of_memory_or_of_weights_that_are_not_finite(fleet, monkeypatch):
    one = fleet()
    async with one.up() as crew:
        await learn(crew, 1)
        mine, mean = tensors(one.stations[1])

        def full(*args):
            raise torch.OutOfMemoryError("CUDA out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(stage_averaging, "_with_tensors", full)
            assert await verdict(one, 1, mine, mean) is None
        assert await verdict(one, 1, mine, mean)
        infinite = {n: t * float("inf") for n, t in mine.items()}
        assert await verdict(one, 1, infinite, mean) is None
        one.peers[1].channel.ended[3] = "closed"
        assert await verdict(one, 1, mine, mean) is None, "without the later stages"


async def test_replaced_adapter_weights_change_the_output(fleet, models):
    torch.manual_seed(1)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    one = fleet(get_peft_model(copy.deepcopy(models["llama"]), lora))
    async with one.up() as crew:
        await learn(crew, 1)
        station, peer = one.stations[1], one.peers[1]
        edge = peer.stage.recorder.inputs[0]
        run = lambda runtime: run_one(
            runtime, read_work(edge, peer.stage.limits), edge.body, "float32"
        )
        own, before = (
            {
                station.spec.whole_name(n): p.detach().clone()
                for n, p in trained(station.runtime).items()
            },
            run(station.runtime),
        )
        other = {name: t + 0.1 for name, t in own.items()}
        assert run(_with_tensors(station.runtime, own)) == before
        changed = run(_with_tensors(station.runtime, other))
        assert changed != before
        assert run(station.runtime) == before
        with torch.no_grad():
            for name, p in trained(station.runtime).items():
                p.copy_(other[station.spec.whole_name(name)])
        assert run(station.runtime) == changed

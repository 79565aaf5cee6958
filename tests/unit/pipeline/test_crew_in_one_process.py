"""A crew in one process is the unsplit policy: its step, its tokens, its log-probabilities; and it
takes a step together or not at all."""

import random
from dataclasses import replace

import pytest
import torch
import trio
from peft import LoraConfig, get_peft_model

from swarmnode.config import TrainingConfig
from swarmnode.errors import DeviceError, PeerError
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import trainable
from swarmnode.policy.logprobs import score
from swarmnode.policy.micro import MicroBatcher
from swarmnode.rl.objectives import Objective
from swarmnode.stages.stage_frames import CommitFrame, ProposeFrame
from swarmnode.stages.trainer.head import WorkRefused, cut_waves
from swarmnode.stages.trainer.pipeline import Observer, WorkerSettings
from swarmnode.trainer.update import Updater
from tests.support.crew_rows import ENDS, EXACT, HEADS, crew_of, fails, flat, grpo, together
from tests.support.lost_stages import quiet

PROMPTS = ["What is 3 + 4?", "Calculate 10 + 8.", "12", "Find the LCM of 6, 9"]


def normalizer(rows, cfg):
    return Objective.of(cfg).normalizer([len(row.completion_ids) for row in rows])


def with_adapter(policy):
    torch.manual_seed(1)
    lora = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return replace(policy, model=get_peft_model(policy.model, lora).eval())


@pytest.mark.parametrize(
    ("kind", "layers", "loss_type", "tokens"),
    [
        ("adapter", [2, 2], "dapo", 4096),
        ("embedded", [1, 1], "dapo", 64),
        ("llama-tied", [1, 2, 1], "dapo", 64),
        ("llama", [1, 1, 1, 1], "grpo", 64),
        ("qwen2", [2, 2], "dr_grpo", 4096),
        ("phi3", [1, 2, 1], "dapo", 64),
    ],
)
async def test_two_grpo_steps_are_those_of_the_unsplit_trainer(
    policy, kind, layers, loss_type, tokens
):
    whole = with_adapter(policy("llama-tied")) if kind == "adapter" else policy(kind)
    cfg = TrainingConfig(loss_type=loss_type, per_device_train_tokens=tokens)
    assembled, rows = grpo(whole, noise=1.0)  # beyond the correction's cap
    start = {name: t.detach().clone() for name, t in trainable(whole.model).items()}
    async with crew_of(whole.model, layers) as crew:
        updater = Updater(whole, cfg, MicroBatcher(tokens))
        for _ in range(2):
            expected = updater.update(assembled)
            got = await crew.head.update(rows, cfg, normalizer(rows, cfg), cfg.learning_rate)
            assert got.refused is None
            assert got.loss == pytest.approx(expected.loss, abs=1e-5)
            assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
            assert got.entropy == pytest.approx(expected.entropy, abs=1e-4)
            assert expected.effective_own < 0.9
            assert got.effective < 0.95
        mine = together(crew)
        assert mine.keys() == start.keys()
        for name, tensor in trainable(whole.model).items():
            assert torch.allclose(mine[name], tensor, atol=1e-4), name
        moved = sum(float((mine[name] - start[name]).abs().sum()) for name in start)
        off = sum(
            float((mine[name] - tensor.detach()).abs().sum())
            for name, tensor in trainable(whole.model).items()
        )
        # a step is 3e-4 for every weight: near it in sum, not only within a tolerance
        assert off < 1e-2 * moved
        assert all(member.participant.step == 2 for member in crew.members)
        if kind == "adapter":
            assert all(member.runtime.embedding() is None for member in crew.members), "frozen"


async def test_both_ends_of_a_tied_embedding_stay_one_tensor(policy):
    whole = policy("qwen3")
    cfg = TrainingConfig(learning_rate=1e-2)
    _, rows = grpo(whole)
    async with crew_of(whole.model, [1, 2, 1], WorkerSettings("int8")) as crew:
        for _ in range(3):
            assert (await crew.head.update(rows, cfg, 10.0, 1e-2)).refused is None
        ends = [crew.members[i].runtime.embedding() for i in (0, 2)]
        assert torch.equal(*ends)
        assert not torch.equal(ends[0], whole.model.get_input_embeddings().weight)


def texts(waves):
    return [ids for wave in waves for ids in wave.ids]


@pytest.mark.parametrize("layers", [[2], [1, 1]])
async def test_greedy_tokens_are_those_of_generate(embedded, layers):
    expected = generate(embedded, PROMPTS, Sampling(2, 8, 0.0), embedded.random_generator(0))
    heads = [embedded.encode_prompt(p) for p in PROMPTS]
    async with crew_of(embedded.model, layers) as crew:
        waves = await crew.head.generate(heads, 2, 8, 0.0, 1.0, embedded.eos_ids, random.Random(0))
        assert texts(waves) == [c.ids for g in expected for c in g.completions]
        recorded = [x for wave in waves for row in wave.logprobs for x in row]
        assert recorded == pytest.approx(
            [x for g in expected for c in g.completions for x in c.logprobs], abs=1e-4
        )
        await quiet()
        assert all(not member.runtime.caches for member in crew.members)


async def sampled(model, layers):
    async with crew_of(model, layers) as crew:
        return await crew.head.generate(HEADS, 3, 6, 0.9, 0.95, ENDS, random.Random(5))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "phi3", "smollm3"])
async def test_sampled_token_does_not_depend_on_other_completions(models, kind):
    """The first of two stages draws what one of two other splits draws; waves of the same prompts
    have the same seeds."""
    assert texts(await sampled(models[kind], [2, 2])) == texts(await sampled(models[kind], [3, 1]))


async def test_as_many_waves_as_stages_are_in_flight(models):
    most = 0
    async with crew_of(models["llama"], [1, 1, 1, 1]) as crew:
        async with trio.open_nursery() as nursery:

            async def watch():
                nonlocal most
                while True:
                    most = max(most, len(crew.head.open_waves))
                    await trio.lowlevel.checkpoint()

            nursery.start_soon(watch)
            waves = await crew.head.generate(HEADS, 2, 6, 1.0, 1.0, frozenset(), random.Random(5))
            nursery.cancel_scope.cancel()
    assert most >= 3  # six prompts in waves of two are three
    assert [p for wave in waves for p in wave.prompts] == HEADS


async def test_refused_wave_is_repeated_in_smaller_waves(models):
    undisturbed = texts(await sampled(models["llama-tied"], [1, 2, 1]))
    async with crew_of(models["llama-tied"], [1, 2, 1]) as crew:
        body = crew.members[1]
        original = body.runtime.prefill

        def small(wave, prompts, x):
            if prompts.ids.shape[0] * prompts.num_generations > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return original(wave, prompts, x)

        body.runtime.prefill = small
        generate = lambda tokens: crew.head.generate(
            HEADS[:2], 3, 6, 0.9, 0.95, ENDS, random.Random(5), tokens
        )
        with pytest.raises(WorkRefused) as caught:
            await crew.head.generate(HEADS, 4, 6, 0.9, 0.95, ENDS, random.Random(5))
        assert (caught.value.device, caught.value.divisible) == (True, True)
        assert not crew.head.open_waves
        assert [len(wave.ids) for wave in await generate(3 * (max(map(len, HEADS)) + 6))] == [3, 3]
        body.runtime.prefill = original
        waves = await crew.head.generate(HEADS, 3, 6, 0.9, 0.95, ENDS, random.Random(5))
        assert texts(waves) == undisturbed


@pytest.mark.parametrize(("codec", "far"), [("float32", 1e-4), ("bfloat16", 0.02), ("int8", 0.05)])
async def test_recorded_logprobs_equal_those_of_training(models, policy, codec, far):
    """The importance ratio of a fresh rollout is 1, whatever the codec; against the unsplit policy
    it is off by the codec's rounding."""
    settings = WorkerSettings(codec)
    async with crew_of(models["llama"], [1, 1, 1, 1], settings) as crew:
        waves = await crew.head.generate(HEADS, 3, 6, 1.0, 1.0, ENDS, random.Random(5))
        rows = [(wave.prompts[i // 3], ids) for wave in waves for i, ids in enumerate(wave.ids)]
        recorded = torch.tensor([x for wave in waves for row in wave.logprobs for x in row])
        scored = torch.tensor(
            [x for logprobs, _ in await crew.head.score(rows, 1.0) for x in logprobs]
        )
    whole = torch.tensor([x for row in score(policy("llama"), rows, 1.0) for x in row])
    assert float((recorded - scored).abs().max()) < 1e-3
    assert float((recorded - whole).abs().max()) < far
    if codec != "float32":  # a sampler with another codec than the trainer's would differ by this
        assert float((recorded - whole).abs().max()) > 2e-3


async def all_dropped(crew):
    await quiet()
    return all(p.grad is None for m in crew.members for p in m.runtime.parameters())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ],
)
@pytest.mark.parametrize(("stage", "method"), [(1, "forward"), (1, "backward"), (2, "learn")])
async def test_device_error_drops_the_step_in_all_stages(models, policy, stage, method, error):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 2, 1]) as crew:
        member, start = crew.members[stage], flat(crew)
        with fails(member.runtime, method, error):
            assert (await crew.head.update(rows, TrainingConfig(), 10.0, 1e-3)).refused == "device"
            assert await all_dropped(crew)
        assert member.refusals["device"] >= 1
        assert torch.equal(flat(crew), start)
        assert (await crew.head.update(rows, TrainingConfig(), 10.0, 1e-3)).refused is None


async def test_unsent_embedding_gradient_refuses_the_step(models, policy):
    _, rows = grpo(policy("llama-tied"))
    async with crew_of(models["llama-tied"], [2, 2]) as crew:
        with fails(crew.members[1].tied, "begin", torch.OutOfMemoryError("CUDA out of memory")):
            assert (await crew.head.update(rows, TrainingConfig(), 10.0, 1e-3)).refused == "device"
        assert await all_dropped(crew)
        assert (await crew.head.update(rows, TrainingConfig(), 10.0, 1e-3)).refused is None


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("no such thing"),
        KeyError("x"),
        NotImplementedError(),
        torch.AcceleratorError("lost"),
    ],
)
async def test_program_errors_and_a_lost_device_are_raised(models, error):
    with pytest.RaisesGroup(type(error), flatten_subgroups=True):
        async with crew_of(models["llama"], [2, 2]) as crew:
            with fails(crew.members[1].runtime, "score", error):
                await crew.head.score([([5, 6], [7, 8])], 1.0)


async def test_half_of_a_step_is_a_stage_that_is_lost(models, policy):
    _, rows = grpo(policy("llama"))
    with pytest.RaisesGroup(DeviceError, flatten_subgroups=True):
        async with crew_of(models["llama"], [2, 2]) as crew:
            with fails(
                crew.members[1].optimizer.adam, "step", torch.OutOfMemoryError("CUDA out of memory")
            ):
                await crew.head.update(rows, TrainingConfig(), 10.0, 1e-3)


class NoRoom(Observer):
    def on_step_in_thread(self, worker):
        raise self.error


class Counts(Observer):
    steps = 0

    def on_step_in_thread(self, worker):
        self.steps += 1


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("mat1 and mat2")],
)
async def test_step_is_taken_although_an_observer_runs_out_of_memory(
    models, policy, error, autojump_clock
):
    _, rows = grpo(policy("llama"))
    ends = []
    for disturbed in (False, True):
        async with crew_of(models["llama"], [2, 2]) as crew:
            member, no_room, after = crew.members[1], NoRoom(), Counts()
            no_room.error = error
            member.observers = [no_room, after] if disturbed else [after]
            for _ in range(2):
                assert (await crew.head.update(rows, TrainingConfig(), 10.0, 1e-3)).refused is None
                assert all(p.grad is None for p in member.runtime.parameters())
            assert (after.steps, member.refusals["device"]) == (2, 2 * disturbed)
            ends.append(flat(crew))
    assert torch.equal(*ends)


async def test_learning_rate_is_bounded_by_the_own_node(models, policy):
    _, rows = grpo(policy("llama"))
    settings = replace(EXACT, learning_rate=1.1e-3)
    async with crew_of(models["llama"], [2, 2], settings) as crew:
        member = crew.members[1]
        member.optimizer.lr_scale.factor = 1.1
        for rate, taken, refused in ((1e-3, 1.1e-3, {}), (5.0, 1.1e-3, {"bounds": 1})):
            assert (await crew.head.update(rows, TrainingConfig(), 10.0, rate)).refused is None
            assert [group["lr"] for group in member.optimizer.adam.param_groups] == [
                pytest.approx(taken)
            ]
            assert member.refusals == refused


@pytest.mark.parametrize("stage", [1, 2])
async def test_lost_stage_ends_the_call_without_a_step(models, policy, stage):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 2, 1]) as crew:
        original = crew.members[stage].handle

        async def dies(sender, frame, body):
            if isinstance(frame, ProposeFrame):
                for (a, b), stream in crew.streams.items():
                    if stage in (a, b):
                        await stream.aclose()
                return
            await original(sender, frame, body)

        crew.members[stage].handle = dies
        with pytest.raises(PeerError, match=f"stage {stage} is gone"):
            await crew.head.update(rows, TrainingConfig(), 10.0, 1e-3)
        with pytest.raises(PeerError, match="gone"):
            await crew.head.generate(HEADS, 2, 4, 1.0, 1.0, ENDS, random.Random(0))
        assert all(m.participant.step == 0 for m in crew.members)


async def test_checkfree_weight_is_the_raw_gradient_of_the_layers(models, policy, monkeypatch):
    monkeypatch.setattr("swarmnode.stages.trainer.head.MAX_GRAD_NORM", 1e-3)  # clips
    whole = policy("llama-tied")
    _, rows = grpo(whole)
    norms = {}
    for layers in ([4], [1, 2, 1]):
        async with crew_of(whole.model, layers) as crew:
            result = await crew.head.update(rows, TrainingConfig(), 10.0, 1e-3)
            norms[len(layers)] = [m.optimizer.squared_norm for m in crew.members]
    assert sum(norms[3]) == pytest.approx(norms[1][0], rel=1e-4)
    assert min(norms[3]) > 1e-2  # not what clipping left
    assert sum(norms[3]) < result.grad_norm**2  # embedding and norm belong to no layer


async def test_prepared_stage_commits_without_its_neighbour(models, policy):
    _, rows = grpo(policy("llama"))
    ends = []
    for neighbour_goes in (False, True):
        async with crew_of(models["llama"], [1, 2, 1]) as crew:
            original = crew.members[1].handle

            async def handle(
                sender, frame, body, crew=crew, original=original, goes=neighbour_goes
            ):
                if isinstance(frame, CommitFrame) and goes:
                    crew.members[1].handle_stream_end(2, "closed")
                await original(sender, frame, body)

            crew.members[1].handle = handle
            assert (await crew.head.update(rows, TrainingConfig(), 10.0, 1e-3)).refused is None
            ends.append(flat(crew))
    assert torch.equal(*ends)


async def test_each_position_and_completion_has_its_own_draw(policy):
    model = policy("llama").model
    with torch.no_grad():
        # all tokens are equally likely, so a repetition comes from the generator
        model.lm_head.weight.zero_()
    async with crew_of(model, [2, 2]) as crew:
        waves = await crew.head.generate(
            [[5, 6], [7, 8]], 2, 8, 1.0, 1.0, frozenset(), random.Random(5)
        )
    drawn = texts(waves)
    assert len({tuple(ids) for ids in drawn}) == 4
    assert all(len(set(ids)) > 4 for ids in drawn)


def test_number_and_size_of_waves():
    short, long = [1] * 10, [1] * 200
    assert cut_waves([short] * 8, 4, 20, 4, 10_000) == [
        ([0, 1], 4),
        ([2, 3], 4),
        ([4, 5], 4),
        ([6, 7], 4),
    ]
    assert cut_waves([short] * 3, 4, 20, 1, 250) == [([0, 1], 4), ([2], 4)]
    assert cut_waves([short, long, short], 4, 300, 1, 1300) == [
        ([0], 4),
        ([1], 2),
        ([1], 2),
        ([2], 4),
    ]
    assert cut_waves([long], 8, 4000, 4, 16_384) == [([0], 3), ([0], 3), ([0], 2)]
    with pytest.raises(ValueError, match="one completion needs 320"):
        cut_waves([long], 8, 120, 4, 300)

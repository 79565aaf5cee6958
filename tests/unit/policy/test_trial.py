"""A trial finds methods that do not work with a model, and models that cannot be trained."""

import json
import math
from dataclasses import replace

import pytest
import torch

from swarmnode.config import Config, PolicyConfig, TrainingConfig, WeightsConfig
from swarmnode.doctor import checks, probes
from swarmnode.doctor.checks import DeviceFacts
from swarmnode.errors import Unavailable
from swarmnode.policy import logprobs
from swarmnode.policy import trial as trial_module
from swarmnode.policy.decode import pads
from swarmnode.policy.engine.protocol import Request
from swarmnode.policy.engine.selector import select_engine
from swarmnode.policy.examine import examine
from swarmnode.policy.generate import Sampling
from swarmnode.policy.load import load_policy
from swarmnode.policy.logprobs import collate, completion_logprobs, score
from swarmnode.policy.micro import MicroBatcher
from swarmnode.policy.text import PromptTooLong
from swarmnode.policy.trial import long_row, try_loaded, try_once
from swarmnode.policy.ways import Row, trial_rows
from swarmnode.process import Progress
from swarmnode.tasks.client import Scored
from swarmnode.trainer.engine import make_whole_policy
from swarmnode.trainer.loop import Trainer
from swarmnode.trainer.sampler import Sampler
from swarmnode.trainer.state import Counters
from tests.support.gaps import gaps, sampled_by
from tests.support.model_zoo import LEARNED_POSITIONS, LONG_ROPE_FROM, build

PROMPTS = ["What is 3 + 4?", "Calculate 12 + 25 - 3."]
TRAINING = TrainingConfig(max_completion_length=24)


@pytest.fixture(scope="module")
def opened(tmp_path_factory, embedded):
    """kind → (settings, loaded policy), not to be changed."""
    made = {}

    def open_kind(kind):
        if kind not in made:
            directory = build(kind, tmp_path_factory.mktemp(kind), embedded.tokenizer)
            cfg = PolicyConfig(model=str(directory), devices="cpu")
            made[kind] = cfg, load_policy(cfg)
        return made[kind]

    return open_kind


# --- the model's context


@pytest.mark.parametrize("engine", ["lockstep", "continuous"])
@pytest.mark.parametrize(
    ("kind", "context"), [("gpt2", LEARNED_POSITIONS), ("phi3-longrope", LONG_ROPE_FROM)]
)
def test_answers_end_where_the_context_does(opened, kind, context, engine):
    _, policy = opened(kind)
    policy = replace(policy, eos_ids=frozenset({10**6}))
    groups = sampled_by(engine, policy, PROMPTS, Sampling(2, 200))
    lengths = {len(g.prompt_ids) + len(c.ids) for g in groups for c in g.completions}
    assert lengths == {context}
    assert {c.finish for g in groups for c in g.completions} == {"length"}


def test_short_row_does_not_depend_on_a_long_one(opened):
    """Long-rope uses other frequencies for a whole pass if one of its rows is long."""
    _, policy = opened("phi3-longrope")
    long = long_row(policy, [Row([5, 9, 20], [30, 31, 40])], 1000)
    assert len(long.prompt) + len(long.completion) == LONG_ROPE_FROM, (
        "the longest row that there is"
    )
    short = ([5, 9, 20], [30, 31, 40])
    together = score(policy, [long, short], 1.0)[1]
    assert together == pytest.approx(score(policy, [short], 1.0)[0], abs=1e-4)


def test_a_trial_warns_of_answers_that_do_not_fit(opened):
    cfg, policy = opened("gpt2")
    trial = try_loaded(cfg, policy, TrainingConfig(max_completion_length=200))
    assert any("max_completion_length" in warning for warning in trial.warnings)
    assert try_loaded(cfg, policy, TrainingConfig(max_completion_length=8)).warnings == []
    facts = DeviceFacts(trial=str(trial), trial_warnings=trial.warnings)
    assert checks.check_trial(facts).level == "warn"


# --- a passed trial is not repeated


@pytest.fixture
def counted(monkeypatch):
    """Trials that ran, by answer length."""
    ran, run = [], trial_module.try_loaded

    def count(cfg, policy, training, *callbacks):
        ran.append(training.max_completion_length)
        return run(cfg, policy, training, *callbacks)

    monkeypatch.setattr(trial_module, "try_loaded", count)
    return ran


def test_a_passed_trial_is_recorded_and_not_repeated(opened, counted, tmp_path):
    cfg, policy = opened("gpt2")
    path = tmp_path / "trainer" / "trial.json"
    first = try_once(cfg, replace(policy, obstacles={}), TRAINING, path)
    again = replace(policy, obstacles={}, measured={})
    second = try_once(cfg, again, TRAINING, path)
    assert counted == [24]
    assert replace(second, seconds=first.seconds) == first
    assert "at an earlier start" in str(second)
    assert again.obstacles["one pass"] == "", "its methods are known"
    assert "written-out step" in "".join(first.refused)
    assert [e.name for e in path.parent.iterdir()] == ["trial.json"]


def test_a_changed_setting_or_a_damaged_record_repeats_the_trial(opened, counted, tmp_path):
    cfg, policy = opened("gpt2")
    path = tmp_path / "trial.json"
    shorter = TrainingConfig(max_completion_length=8)
    another = cfg.model_copy(update={"dtype": "float32"})
    for settings, training in ((cfg, TRAINING), (cfg, shorter), (another, shorter)):
        try_once(settings, policy, training, path)
    path.write_bytes(path.read_bytes()[:-9])
    try_once(another, policy, shorter, path)
    try_once(another, policy, shorter, path)
    assert counted == [24, 8, 8, 8]


def test_a_trial_with_a_warning_is_repeated(opened, counted, tmp_path):
    cfg, policy = opened("gpt2")
    for _ in range(2):
        assert try_once(
            cfg, policy, TrainingConfig(max_completion_length=200), tmp_path / "trial.json"
        ).warnings
    assert counted == [200, 200]


class Asks:
    """A scorer whose questions are too long, except for one in `every`; 0 means no exception."""

    def __init__(self, every):
        self.asked, self.every = 0, every

    def score_many(self, items):
        out = []
        for _, texts in items:
            self.asked += not texts
            long = "Calculate " + " + ".join(["12"] * 40)
            prompt = PROMPTS[0] if self.every and self.asked % self.every == 0 else long
            out.append(Scored(prompt, [float(i % 2) for i in range(len(texts))]))
        return out


def sampler_of(opened, every):
    cfg, policy = opened("gpt2")
    training = TrainingConfig(num_generations=2, max_completion_length=8)
    counters = Counters(peer="12D3KooWme", swarm="00" * 32)
    config = Config(policy=cfg, training=training, weights=WeightsConfig(rule="off"))
    engine = make_whole_policy(config, policy.clone(), counters, lambda message: None)
    rng = policy.random_generator(0)
    return Sampler(training, ["rg/gcd"], engine, Asks(every), rng, counters)


def test_a_question_longer_than_the_context_is_not_asked(opened):
    experience = sampler_of(opened, every=3)(3)
    assert len(experience.groups) == 3
    assert set(experience.prompts) == {PROMPTS[0]}


def test_a_trainer_whose_questions_are_all_too_long_ends(opened):
    with pytest.raises(Unavailable, match="context of 64 tokens"):
        sampler_of(opened, every=0)(3)


@pytest.mark.parametrize("option", ["lockstep", "continuous"])
def test_an_engine_refuses_a_prompt_without_room(opened, option):
    _, policy = opened("gpt2")
    engine = select_engine(
        policy, MicroBatcher(4096), [option], Sampling(2, 8), policy.random_generator(0)
    )
    with pytest.raises(PromptTooLong, match="context of 64"):
        engine.submit(Request(0, "9" * LEARNED_POSITIONS))
    engine.submit(Request(1, PROMPTS[0]))
    done = []
    while not done:
        done = engine.finished(0)
    assert [one.number for one in done] == [1]


# --- ways


@pytest.mark.parametrize("kind", ["falcon-alibi", "bloom", "gpt-neo", "mistral", "lfm2"])
def test_masks_of_ours_are_not_for_every_model(opened, kind, monkeypatch):
    _, policy = opened(kind)
    monkeypatch.setattr(logprobs, "ONE_PASS_ELSEWHERE", 10**6)
    monkeypatch.setattr(logprobs, "PACKED_GAIN_ELSEWHERE", 0.0)
    monkeypatch.setattr(logprobs.Batch, "padded_tokens", 10**6)
    rows = [([5, 9, 20], [30, 31, 40, 41]), ([5, 9, 20], [30]), ([7], [40, 12])]
    expected = [score(policy, [row], 1.0)[0] for row in rows]
    for found, alone in zip(score(policy, rows, 1.0), expected, strict=True):
        assert found == pytest.approx(alone, abs=1e-4)


def ignores_mask(policy, monkeypatch, four=False):
    """Have the model drop a mask, of two or of four dimensions."""
    forward = type(policy.base).forward

    def without(self, *args, attention_mask=None, **kwargs):
        drop = attention_mask is not None and (attention_mask.ndim == 4) == four
        mask = None if drop else attention_mask
        return forward(self, *args, attention_mask=mask, **kwargs)

    monkeypatch.setattr(type(policy.base), "forward", without)


def test_model_that_ignores_masks_runs_without_padding(tmp_path, embedded, monkeypatch):
    cfg = PolicyConfig(model=str(build("qwen2", tmp_path, embedded.tokenizer)), devices="cpu")
    ignores_mask(load_policy(cfg), monkeypatch)
    policy = load_policy(cfg)
    assert not pads(policy)
    groups = sampled_by("lockstep", policy, PROMPTS, Sampling(3, 12))
    assert gaps(policy, groups, alone=True).max() < 1e-3
    try_loaded(cfg, policy, TRAINING)


def test_a_way_without_a_finite_gradient_is_not_used(opened):
    """The padding token has a zero embedding, and Gemma 3n divides by the norm of embeddings."""
    cfg, policy = opened("gemma3n")
    embeddings = policy.base.get_input_embeddings().weight
    zero = int((~embeddings.any(1)).nonzero()[0])
    padded = replace(policy, pad_id=zero, obstacles={})
    rows = [([5, 9, 20], [30, 31, 40]), ([7], [40])]
    assert "two passes" in " ".join(try_loaded(cfg, padded, TRAINING).refused)
    for some in (padded, policy):
        some.model.zero_grad()
        chosen, _ = completion_logprobs(some, collate(rows, some.pad_id), 1.0)
        chosen.sum().backward()
        norms = [float(p.grad.norm()) for p in some.trainable_parameters() if p.grad is not None]
        assert 0 < math.hypot(*norms) < math.inf
    policy.model.zero_grad(set_to_none=True)


def wrong_values(outputs):
    return outputs * 1.5


def wrong_gradient(outputs):
    """The same values, with a gradient of twice the size."""
    return 2 * outputs - outputs.detach()


def raises(outputs):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize("harm", [wrong_values, wrong_gradient, raises])
def test_only_the_next_method_is_tried_after_a_failure(opened, monkeypatch, harm):
    cfg, policy = opened("gpt2")
    policy = replace(policy, obstacles={})
    original = logprobs._PASSES["one pass"]
    monkeypatch.setitem(logprobs._PASSES, "one pass", lambda *given: harm(original(*given)))
    trial = try_loaded(cfg, policy, TRAINING)
    assert any(line.startswith("one pass") for line in trial.refused)
    assert policy.obstacles["two passes"] == ""
    assert not policy.obstacles.keys() & {"packed", "recomputed"}


def test_a_method_is_tried_in_the_middle_of_an_update(opened):
    """The trial leaves the gradients of earlier micro-batches as they are."""
    _, policy = opened("gpt2")
    batch = collate([([5, 9, 20], [30, 31, 40]), ([7], [40])], policy.pad_id)
    policy = replace(policy, obstacles={})

    def gradients(tries):
        for _ in range(2):
            if tries:
                policy.obstacles.clear()
            completion_logprobs(policy, batch, 1.0)[0].sum().backward()
        found = [p.grad for p in policy.trainable_parameters()]
        policy.model.zero_grad(set_to_none=True)
        return found

    torch.testing.assert_close(gradients(tries=True), gradients(tries=False), rtol=0, atol=0)
    assert policy.obstacles.keys() >= {"one pass"}


@pytest.mark.parametrize("way", ["one pass", "packed"])
def test_a_window_longer_than_the_trial_is_found(opened, way):
    _, policy = opened("gpt-neo")
    window, wide = 48, replace(policy.clone(), obstacles={})
    longest = max(len(row.prompt) + len(row.completion) for row in trial_rows(wide))
    assert longest < window < logprobs.ONE_PASS_ELSEWHERE
    local = wide.base.transformer.h[1].attn.attention
    past = torch.ones_like(local.bias).tril()
    local.bias.copy_(past & ~past.tril(-window))
    assert not logprobs.takes_way(wide, way)
    assert logprobs.takes_way(wide, "two passes")


def test_a_trial_leaves_no_trace(embedded):
    policy = embedded.clone()
    before = [p.detach().clone() for p in policy.trainable_parameters()]
    state = torch.get_rng_state()
    try_loaded(PolicyConfig(), policy, TRAINING)
    assert all(p.grad is None for p in policy.model.parameters())
    assert all(map(torch.equal, before, policy.trainable_parameters()))
    assert torch.equal(state, torch.get_rng_state())


# --- models that cannot be trained


def nan_gradient(policy, monkeypatch):
    policy.trainable_parameters()[0].register_hook(lambda gradient: gradient * math.nan)


def broken_forward(policy, monkeypatch):
    def forward(*args, **kwargs):
        raise AttributeError("no attribute 'gate'\nat all")

    monkeypatch.setattr(policy.base, "forward", forward)


def drops_longer_rows(policy, monkeypatch):
    forward = policy.base.forward

    def limited(input_ids, **kwargs):
        if input_ids.shape[1] > 40:
            raise IndexError("index out of range in self")
        return forward(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(policy.base, "forward", limited)


def detached(policy, monkeypatch):
    forward = policy.base.forward

    def without_gradient(**kwargs):
        output = forward(**kwargs)
        output.logits = output.logits.detach()
        return output

    monkeypatch.setattr(policy.base, "forward", without_gradient)


@pytest.mark.parametrize("harm", [nan_gradient, broken_forward, drops_longer_rows, detached])
def test_a_model_that_cannot_train_is_refused(embedded, monkeypatch, harm):
    policy = replace(embedded.clone(), obstacles={})
    harm(policy, monkeypatch)
    training = TrainingConfig(max_completion_length=64)
    with pytest.raises(Unavailable, match="'embedded'") as refused:
        try_loaded(PolicyConfig(), policy, training)
    assert "\n" not in str(refused.value)


def test_doctor_and_trainer_report_why_a_model_cannot_train(tmp_path, embedded):
    model = build("mamba", tmp_path / "mamba", embedded.tokenizer)
    config = Config.model_validate(
        {"node": {"data_dir": tmp_path / "data"}, "policy": {"model": str(model), "devices": "cpu"}}
    )
    facts = probes.device(config, trial=True)
    assert checks.check_device(facts).level == "ok"
    found = checks.check_model(facts)
    assert (found.level, found.exit_code) == ("fail", 69)
    assert "cannot be trained" in found.text
    with pytest.raises(Unavailable, match="cannot be trained"):
        Trainer(config, Progress()).run()


def test_doctor_survives_any_error_of_a_model(monkeypatch):
    def spoilt(*args):
        raise AttributeError("conv_states")

    monkeypatch.setattr("swarmnode.policy.examine.try_policy", spoilt)
    told = examine(PolicyConfig(devices="cpu"), trial=True)
    assert told["error_code"] == 69
    assert "conv_states" in told["error"]
    assert json.dumps(told)

"""An update equals the formulas: against a gradient written out row by row, and against TRL's
steps.

The correction for the sampler, weights, temperature and the gradient clip all affect this batch: a
test checks that omitting any of them gives another gradient.
"""

import copy
from dataclasses import replace

import pytest
import torch

from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.policy.load import load_policy, trainable
from swarmnode.policy.logprobs import score
from swarmnode.policy.micro import MicroBatcher
from swarmnode.policy.ways import Row
from swarmnode.rl.corrections import CAP
from swarmnode.rollouts.trainer.batch import Rows
from swarmnode.trainer.update import Updater
from tests.support.fakes.policy import write_tiny_policy

PAD, LENGTH = 0, 7
TEMPERATURE = 0.7
CLIP = 0.05
RATE = 3e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_policy(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def policy(folder):
    return load_policy(PolicyConfig(model=str(folder), devices="cpu"))


def by_hand(model, prompt, completion, temperature):
    """(T,) log-probabilities, from one plain forward pass."""
    logits = (
        model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
        / temperature
    )
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


@pytest.fixture(scope="module")
def rows(policy):
    """Return two groups of four; the second is a peer's. The sampling policy is so different that
    the cap of the correction is met."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda count: torch.randint(2, 32, (count,), generator=generator).tolist()
    prompts = [draw(3), draw(5)]
    chosen = [(prompts[i // 4], draw(length)) for i, length in enumerate([7, 1, 4, 2, 6, 7, 3, 5])]
    with torch.no_grad():
        now = [by_hand(policy.model, *row, TEMPERATURE) for row in chosen]
    sampler = [
        (values + torch.randn(len(values), generator=generator) * 1.2).tolist() for values in now
    ]
    worth = torch.tensor([1.5, -0.5, -0.9, 0.7, -1.2, 0.4, 1.1, -0.8])
    return Rows(
        [Row(*row) for row in chosen],
        sampler,
        worth,
        torch.tensor([1.0] * 4 + [0.3, 0.9, 0.1, 1.0]),
        [0] * 4 + [1] * 4,
        [False] * 4 + [True] * 4,
    )


@pytest.fixture(autouse=True)
def _clipped_to_little(monkeypatch):
    monkeypatch.setattr("swarmnode.trainer.update.MAX_GRAD_NORM", CLIP)


def exact(policy, rows, loss_type="dapo", without=()):
    """Return the flat gradient, clipped to CLIP. Every sum is written as in the papers."""
    model = copy.deepcopy(policy.model)
    terms, ratios = [], []
    for (prompt, completion, _), sampler, advantage, weight in zip(
        rows.rows, rows.sampler_logprobs, rows.advantages, rows.weights, strict=True
    ):
        temperature = 1.0 if "temperature" in without else TEMPERATURE
        logprobs = by_hand(model, prompt, completion, temperature)
        ratios.append(torch.exp(logprobs.detach() - torch.tensor(sampler)))
        each = logprobs * advantage
        each = each if "correction" in without else each * ratios[-1].clamp(max=CAP)
        terms.append(-each * (1.0 if "weights" in without else weight))
    assert float(torch.cat(ratios).max()) > CAP, "the cap has to matter"
    if loss_type == "dapo":
        loss = torch.cat(terms).sum() / sum(map(len, terms))
    elif loss_type == "grpo":
        loss = sum(term.mean() for term in terms) / len(terms)
    else:
        loss = torch.cat(terms).sum() / (len(terms) * LENGTH)
    gradient = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, list(trainable(model).values()))]
    )
    norm = float(gradient.norm())
    assert norm > 4 * CLIP, "the clip has to matter"
    return gradient if "clip" in without else gradient * CLIP / norm


def taken(policy, rows, tokens=16384, **keys):
    """Return the gradient that the optimizer receives."""
    mine = policy.clone()
    cfg = TrainingConfig(temperature=TEMPERATURE, max_completion_length=LENGTH, **keys)
    updater = Updater(mine, cfg, MicroBatcher(tokens))
    seen = []
    updater.optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            torch.cat([p.grad.flatten().clone() for p in mine.trainable_parameters()])
        )
    )
    assert updater.update(rows).stepped
    return seen[0]


@pytest.mark.parametrize("tokens", [16384, 24])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_the_gradient_of_an_update_is_the_exact_one(policy, rows, loss_type, tokens):
    expected = exact(policy, rows, loss_type)
    assert torch.allclose(
        taken(policy, rows, tokens, loss_type=loss_type),
        expected,
        atol=1e-5 * float(expected.abs().max()) + 1e-7,
    )


@pytest.mark.parametrize("part", ["correction", "weights", "temperature", "clip"])
def test_exact_gradient_depends_on_every_part(policy, rows, part):
    expected, other = exact(policy, rows), exact(policy, rows, without=(part,))
    assert float((expected - other).norm() / expected.norm()) > 0.02


def trls(folder, tmp_path, **settings):
    """TRL's trainer of the same model."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = trl.GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=LENGTH,
        temperature=TEMPERATURE,
        disable_dropout=True,
        beta=0.0,
        gradient_checkpointing=False,
        **settings,
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["w2 w3"] * 8}),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def four_steps(mine, trainer, batch, rows, cfg):
    """Take four steps on the same rows, here and with TRL. TRL has no old log-probabilities, as for
    a batch that gives one step."""
    updater = Updater(mine, cfg, MicroBatcher(16384))
    optimizer = torch.optim.AdamW(
        trainer.model.parameters(), lr=cfg.learning_rate, weight_decay=0.0
    )
    start = [p.detach().clone() for p in mine.model.parameters()]
    for _ in range(4):
        updater.update(replace(rows, sampler_logprobs=score(mine, rows.rows, TEMPERATURE)))
        optimizer.zero_grad()
        trainer.compute_loss(trainer.model, batch).backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), CLIP)
        optimizer.step()
    theirs = dict(trainer.model.named_parameters())
    for name, parameter in trainable(mine.model).items():
        assert torch.allclose(parameter, theirs[name], atol=1e-4), name
    moved = [
        float((p.detach() - q).abs().max())
        for p, q in zip(mine.model.parameters(), start, strict=True)
    ]
    assert max(moved) > 3 * cfg.learning_rate


@pytest.mark.parametrize("cut", [(), (1, 6)], ids=["whole", "mask_truncated"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_four_steps_on_one_batch_are_trls(policy, rows, folder, loss_type, cut, tmp_path):
    # TRL has no other weights
    rows = replace(
        rows, weights=torch.tensor([float(i not in cut) for i in range(8)]), masked=frozenset(cut)
    )
    cfg = TrainingConfig(
        temperature=TEMPERATURE,
        loss_type=loss_type,
        max_completion_length=LENGTH,
        learning_rate=RATE,
    )
    trainer = trls(folder, tmp_path, loss_type=loss_type)
    width = max(len(prompt) for prompt, _, *_ in rows.rows)
    ids, mask = torch.zeros(2, 8, LENGTH, dtype=torch.long)
    for i, (_, completion, _) in enumerate(rows.rows):
        ids[i, : len(completion)], mask[i, : len(completion)] = (
            torch.tensor(completion),
            int(i not in cut),
        )
    batch = {
        "prompt_ids": torch.tensor([[PAD] * (width - len(p)) + p for p, _, *_ in rows.rows]),
        "prompt_mask": torch.tensor(
            [[0] * (width - len(p)) + [1] * len(p) for p, _, *_ in rows.rows]
        ),
        "completion_ids": ids,
        "completion_mask": mask,
        "num_items_in_batch": mask.sum(),
        "advantages": rows.advantages,
    }
    four_steps(policy.clone(), trainer, batch, rows, cfg)


def test_effective_shares_are_reported_by_source(policy, rows):
    cfg = TrainingConfig(temperature=TEMPERATURE, max_completion_length=LENGTH)
    near = replace(rows, sampler_logprobs=score(policy, rows.rows, TEMPERATURE))
    same = Updater(policy.clone(), cfg, MicroBatcher(16384)).update(near)
    assert same.effective_own == pytest.approx(1.0)
    lengths = torch.tensor([float(len(completion)) for _, completion, *_ in rows.rows[4:]])
    weights = rows.weights[4:]
    expected = (weights * lengths).sum() ** 2 / (lengths.sum() * (weights.square() * lengths).sum())
    assert same.effective_external == pytest.approx(float(expected))
    off = Updater(policy.clone(), cfg, MicroBatcher(24)).update(rows)
    assert 0.2 < off.effective_own < 0.95
    alone = replace(rows, weights=torch.tensor([1.0] * 4 + [0.0] * 4))
    assert (
        Updater(policy.clone(), cfg, MicroBatcher(16384)).update(alone).effective_external is None
    )

"""Ranks and spread layers with CUDA memory; skipped without a device. One GPU suffices.

Two ranks share it through gloo, since NCCL allows one rank per GPU; one rank tests NCCL itself.
Layers are spread over CPU and GPU.
"""

import copy
import functools

import pytest
import torch
from accelerate import dispatch_model

from swarmnode.config import PolicyConfig
from swarmnode.policy.device import cards, training_devices
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy
from swarmnode.policy.model import Policy
from swarmnode.rollouts.trainer.batch import assemble
from swarmnode.trainer import rank_pool, rank_process
from swarmnode.trainer.engine import card_uses, make_whole_policy
from swarmnode.trainer.rank_pool import RankPool
from swarmnode.trainer.ranks import DataParallelPolicy
from swarmnode.trainer.state import Counters
from tests.support.updates import PROMPTS, weights
from tests.unit.trainer.test_ranks import configured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CARD = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _after():
    yield
    load_policy(PolicyConfig(devices="cpu"))  # accelerate's precision and device are global


def by_gloo():
    real = rank_process.dist.init_process_group
    rank_process.dist.init_process_group = lambda backend, **keys: real("gloo", **keys)


def gloo_rank(*arguments):
    by_gloo()
    rank_process.run_rank(*arguments)


@pytest.mark.parametrize("rank", [0, 4])
def test_two_ranks_on_one_gpu_equal_one_rank(rank, groups, monkeypatch):
    monkeypatch.setattr(
        rank_pool.dist,
        "init_process_group",
        lambda backend, real=rank_pool.dist.init_process_group, **keys: real("gloo", **keys),
    )
    adapter = {"dtype": "float32", "lora": {"r": rank}}
    config = configured("cuda:0", policy=adapter)
    policy = load_policy(config.policy)
    alone = policy.clone()
    send = lambda message: None
    one = make_whole_policy(config, alone, Counters(), send)
    pool = RankPool(config, [CARD, CARD], entry=gloo_rank)
    try:
        make = functools.partial(DataParallelPolicy, pool)
        both = make_whole_policy(config, policy, Counters(), send, make=make)
        for _ in range(4):
            expected = one.update(assemble(groups, "grpo"))
            found = both.update(assemble(groups, "grpo"))
            assert found.loss == pytest.approx(expected.loss, abs=1e-4)
        assert float((weights(policy) - weights(alone)).abs().max()) < 1e-5
        greedy = Sampling(2, 8, temperature=0.0)
        ids = lambda engine: [
            [c.ids for c in one.completions]
            for one in engine.generate(PROMPTS, greedy, engine.random_generator(0))
        ]
        assert ids(both) == ids(one)
        assert [card.device for card in both.statistics().cards] == ["cuda:0", "cuda:0"]
    finally:
        pool.close()


def test_nccl_sums_broadcasts_and_is_waited_for(tmp_path):
    rank_process.join(CARD, str(tmp_path / "store"), 0, 1)
    dist = rank_process.dist
    try:
        tensors = [torch.full((n,), 2.0, device=CARD) for n in (3, 5)]
        for collective in (
            lambda flat: dist.all_reduce(flat, async_op=True),
            lambda flat: dist.broadcast(flat, 0, async_op=True),
        ):
            rank_process.in_buckets(tensors, collective)
        assert [t.tolist() for t in tensors] == [[2.0] * 3, [2.0] * 5]
    finally:
        dist.destroy_process_group()


def test_cards_are_named_with_their_memory():
    (first, *_) = found = cards()
    assert first.device == "cuda:0"
    assert 0 < first.free_bytes <= first.total_bytes
    assert first.name in str(first)
    chosen, left_out = training_devices(PolicyConfig(devices="cuda"), [CARD], found, 1)
    assert (chosen, left_out) == ([CARD], [])


@pytest.mark.parametrize("rank", [0, 4])
def test_layers_on_two_devices_compute_what_one_does(rank, groups):
    config = configured("cpu", policy={"lora": {"r": rank}})
    policy = load_policy(config.policy)
    base = policy.base
    layers = base.model.layers
    spread = {
        name: 0 if name == "model.layers.1" or name == "model.norm" else "cpu"
        for name in ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
        + [f"model.layers.{i}" for i in range(len(layers))]
    }
    there = Policy(**{**policy.__dict__, "model": copy.deepcopy(policy.model), "obstacles": {}})
    dispatch_model(there.base, spread, main_device="cpu", force_hooks=True)
    assert there.is_spread
    assert {p.device.type for p in there.model.parameters()} == {"cpu", "cuda"}
    assert [card.device for card in card_uses(there)] == ["cuda:0"]
    greedy = Sampling(2, 8, temperature=0.0)
    answers = [
        [
            c.ids
            for one in generate(each, PROMPTS, greedy, each.random_generator(0))
            for c in one.completions
        ]
        for each in (policy, there)
    ]
    assert answers[0] == answers[1]
    send = lambda message: None
    engines = [make_whole_policy(config, each, Counters(), send) for each in (policy, there)]
    rows = [row for group in groups for row in group.rows]
    for (a, _), (b, _) in zip(*(engine.score(rows, 1.0) for engine in engines), strict=True):
        assert a == pytest.approx(b, abs=1e-3)
    for _ in range(4):
        _, found = (engine.update(assemble(groups, "grpo")) for engine in engines)
        assert found.stepped
        assert not found.refused
    assert float((weights(policy) - weights(there)).abs().max()) < 1e-4

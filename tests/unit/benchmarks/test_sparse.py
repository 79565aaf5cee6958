"""The codec that no node runs: what of a tensor travels, in how many bytes, and that nothing else
is lost."""

import pytest
import torch

from benchmarks.sparse import BLOCK, DECAY, ErrorFeedback, sparse, sparse_bytes


def test_the_largest_of_every_block_arrive_with_their_signs():
    flat = torch.randn(2 * BLOCK + 100, generator=torch.Generator().manual_seed(0))
    arrived = sparse(flat)
    for start, kept in ((0, 64), (BLOCK, 64), (2 * BLOCK, 2)):
        block, there = flat[start : start + BLOCK], arrived[start : start + BLOCK]
        assert set(there.nonzero().flatten().tolist()) == set(
            block.abs().topk(kept).indices.tolist()
        )
        assert (there.sign() == block.sign())[there != 0].all()
        assert len(there.abs().unique()) == 3  # two magnitudes and none
        assert float(there.abs().sum()) == pytest.approx(
            float(block[there != 0].abs().sum()), rel=2**-8
        )


def test_a_block_takes_116_bytes_a_36th_of_int8():
    assert sparse_bytes(BLOCK) == (64 * (12 + 2) + 2 * 16) / 8 == 116
    assert sparse_bytes(BLOCK + 1) == 116 + (14 + 32) / 8
    assert BLOCK * (1 + 4 / 256) / sparse_bytes(BLOCK) == pytest.approx(36, abs=0.2)


def test_what_was_not_sent_is_left_and_decays():
    rng = torch.Generator().manual_seed(1)
    shapes = {"a": (70, 70), "b": (40,)}
    feedback = ErrorFeedback({n: torch.zeros(s) for n, s in shapes.items()})
    held = {n: torch.zeros(s) for n, s in shapes.items()}
    for _ in range(5):
        learnt = {n: torch.randn(s, generator=rng) for n, s in shapes.items()}
        feedback.add(learnt)
        sent = feedback.send(list(shapes))
        for n in shapes:
            held[n] = DECAY * held[n] + learnt[n] - sent[n]
            torch.testing.assert_close(feedback.left[n], held[n])
    feedback.clear(["a"])
    assert not feedback.left["a"].any()
    assert feedback.left["b"].any()

"""Micro-batches keep the bound, and a shortage of memory only repeats work."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.errors import DeviceError
from swarmnode.policy import micro
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.logprobs import score
from swarmnode.policy.micro import CALM_PASSES, MicroBatcher, RowTooLarge, is_oom, micro_batches

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB."
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=60)


@given(lengths, st.integers(1, 400), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_every_row_once_and_within_the_bound(rows, bound, size):
    groups = [i // size for i in range(len(rows))]
    batches = micro_batches(rows, bound, groups)
    assert sorted(i for b in batches for i in b) == list(range(len(rows)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(rows[i] for i in batch) <= bound


@given(lengths, st.integers(1, 400), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_a_group_that_fits_stays_whole(rows, bound, size):
    groups = [i // size for i in range(len(rows))]
    where = {i: n for n, batch in enumerate(micro_batches(rows, bound, groups)) for i in batch}
    for g in set(groups):
        members = [i for i in range(len(rows)) if groups[i] == g]
        if len(members) * max(rows[i] for i in members) <= bound:
            assert len({where[i] for i in members}) == 1


def test_short_rows_do_not_pay_for_long_ones():
    batches = micro_batches([50, 2, 50, 2, 50, 2], 150)
    assert sorted(map(sorted, batches)) == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(CUDA), True),
        (RuntimeError("MPS backend out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate"), True),
        (RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("out of memory"), False),
        (KeyError("x"), False),
    ],
)
def test_out_of_memory_is_recognised(error, expected):
    assert is_oom(error) is expected


def limited(limit, rows, seen=None):
    """Simulate a device with room for at most `limit` padded tokens."""

    def work(indices):
        padded = len(indices) * max(rows[i] for i in indices)
        if seen is not None:
            seen.append(padded)
        if padded > limit:
            raise torch.OutOfMemoryError(CUDA)
        return indices

    return work


def test_the_bound_is_halved_until_it_fits_and_stays():
    rows = [10] * 32
    batcher = MicroBatcher(16384)
    done = batcher.run(rows, limited(50, rows))
    assert sorted(i for indices, _ in done for i in indices) == list(range(32))
    assert batcher.statistics().tokens == batcher.tokens == 40  # 320 → 160 → 80 → 40
    assert batcher.statistics().oom_retries == 3
    seen = []
    batcher.run(rows, limited(50, rows, seen))
    assert max(seen) == 40
    assert batcher.statistics().oom_retries == 3


def test_finished_micro_batches_are_not_repeated():
    rows = [10] * 32
    seen = []
    MicroBatcher(160).run(rows, limited(80, rows, seen))
    assert seen[0] == 160
    assert sum(seen[1:]) == 320
    done = MicroBatcher(160).run([1] * 8 + [20] * 8, limited(80, [1] * 8 + [20] * 8, seen := []))
    assert seen[:2] == [8, 160]
    assert sum(padded == 8 for padded in seen) == 1
    assert sorted(i for indices, _ in done for i in indices) == list(range(16))


def passes(batcher, rows, count, limit=10**9):
    for _ in range(count):
        batcher.run(rows, limited(limit, rows))


def test_bound_recovers_after_a_shortage():
    rows = [10] * 32
    batcher = MicroBatcher(320)
    passes(batcher, rows, 1, limit=100)
    assert batcher.tokens == 80
    passes(batcher, [10] * 2, 3 * CALM_PASSES)
    assert batcher.tokens == 80, "passes far below the bound do not raise it"
    passes(batcher, rows, CALM_PASSES)
    assert batcher.tokens == 100
    passes(batcher, rows, 7 * CALM_PASSES)
    assert batcher.tokens == 320


def test_failed_raise_is_tried_again():
    rows = [10] * 32
    batcher = MicroBatcher(320)
    passes(batcher, rows, 1 + CALM_PASSES + 1, limit=90)  # 80, then 100, which fails
    assert batcher.tokens == 50
    passes(batcher, rows, CALM_PASSES, limit=90)
    assert batcher.tokens == 62


def test_too_large_row_is_named_and_not_retried():
    rows = [10, 200, 10]
    batcher = MicroBatcher(16384)
    with pytest.raises(RowTooLarge) as raised:
        batcher.run(rows, limited(100, rows))
    assert raised.value.row == 1
    with pytest.raises(RowTooLarge):
        batcher.run(rows, limited(100, rows, seen := []))
    assert seen == []
    assert batcher.run([10, 10], limited(100, [10, 10]))


def test_one_row_too_many_is_a_device_error():
    with pytest.raises(DeviceError, match="with 10 tokens"):
        MicroBatcher(100).run([10] * 4, limited(5, [10] * 4))


def test_other_errors_pass():
    def work(indices):
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        MicroBatcher(100).run([10], work)


def test_nothing_is_repeated_where_gradients_were_added():
    batcher, seen = MicroBatcher(160), []
    with pytest.raises(MemoryError):
        batcher.run_once([1] * 8 + [20] * 8, limited(80, [1] * 8 + [20] * 8, seen))
    assert seen == [8, 160]
    assert batcher.tokens == 80
    assert batcher.run_once([20] * 8, limited(80, [20] * 8)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_scoring_in_pieces_equals_scoring_at_once(embedded):
    rows = [([5] * (1 + i % 4), [30 + i, 1]) for i in range(9)]
    expected = score(embedded, rows, 1.0)
    got = MicroBatcher(8).score(embedded, rows, 1.0)
    assert got == [pytest.approx(row, abs=1e-5) for row in expected]


def test_generation_in_pieces_keeps_the_order_of_the_prompts(embedded, monkeypatch):
    prompts = [f"Calculate {n} + 8." for n in range(9)]
    pieces = []

    def limited_generate(policy, part, sampling, generator, alive):
        pieces.append(len(part))
        if len(part) > 4:
            raise torch.OutOfMemoryError(CUDA)
        return generate(policy, part, sampling, generator)

    monkeypatch.setattr(micro, "generate", limited_generate)
    groups = MicroBatcher(16384).generate(
        embedded, prompts, Sampling(2, 4), embedded.random_generator(0)
    )
    assert [g.prompt_ids for g in groups] == [embedded.encode_prompt(p) for p in prompts]
    assert pieces[0] == 9
    assert len(pieces) > 2


def test_unknown_capacity_starts_small_and_doubles():
    batcher = MicroBatcher(1000, first=40)
    rows = [10] * 64
    sizes = [batcher.tokens]
    for _ in range(2):
        passes(batcher, rows, 1)
        sizes.append(batcher.tokens)
    assert sizes == [40, 80, 160]
    passes(batcher, [10] * 3, 3)
    assert batcher.tokens == 160, "passes far below the bound do not raise it"
    passes(batcher, rows, 2, limit=200)  # 160, then 320, which fails
    assert batcher.tokens == 160
    passes(batcher, rows, CALM_PASSES - 2, limit=200)
    assert batcher.tokens == 160, "after a shortage it recovers slowly"
    assert MicroBatcher(30, first=40).tokens == 30

"""Rows of a step: advantages per group, and which tokens have a gradient."""

from dataclasses import replace

import pytest

from swarmnode.policy.ways import Row
from swarmnode.rollouts.trainer.batch import (
    TrainingGroup,
    assemble,
    own_group,
    silent_share,
)


def test_assembled_rows_keep_groups_together(sample):
    useful = own_group(sample, [1.0, 0.0, 0.0, 0.0])
    assert useful.was_cut == [c.finish == "length" for c in sample.completions]
    silent = own_group(sample, [0.0] * 4)
    theirs = replace(useful, peer="p")
    rows = assemble([useful, silent, theirs], "dr_grpo")
    assert rows.groups == [0] * 4 + [1] * 4 + [2] * 4
    assert rows.external == [False] * 8 + [True] * 4
    signal = [0.75, -0.25, -0.25, -0.25]
    assert rows.advantages.tolist() == [*signal, *[0.0] * 4, *signal]
    assert rows.informative(external=False) == [0, 1, 2, 3]
    assert rows.informative(external=True) == [8, 9, 10, 11]
    assert silent_share([useful, silent]) == 0.5
    assert silent_share([]) is None


def test_groups_of_different_size_share_a_batch(sample):
    small = own_group(sample, [1.0, 0.0, 0.0, 0.0])
    pair = own_group(type(sample)(sample.prompt_ids, sample.completions[:2]), [1.0, 0.0])
    rows = assemble([small, pair], "dr_grpo")
    assert rows.advantages.tolist() == [0.75, -0.25, -0.25, -0.25, 0.5, -0.5]


def test_truncated_completions_can_be_masked(sample):
    useful = own_group(sample, [1.0, 1.0, 0.0, 0.0])
    ended = replace(useful, was_cut=[False] * 4)
    cut = replace(useful, was_cut=[False, True, False, False])
    theirs = replace(cut, peer="p")
    rows = assemble([ended, cut, theirs], "dr_grpo", mask_cut=True)
    assert rows.masked == {5, 9}
    assert rows.weights.tolist() == [1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1]
    assert rows.advantages.tolist() == [0.5, 0.5, -0.5, -0.5] * 3


def test_peer_group_is_learnt_up_to_an_improbable_token(sample):
    own = own_group(sample, [1.0, 1.0, 0.0, 0.0])
    lengths = [row.tokens for row in own.rows]
    theirs = replace(own, peer="p", learnt=[1, 0, lengths[2], lengths[3]])
    rows = assemble([own, theirs], "dr_grpo")
    assert rows.informative(external=True) == [4]
    assert rows.rows[4] == own.rows[0].first(1)
    assert rows.sampler_logprobs[4] == own.sampler_logprobs[0][:1]
    assert [rows.length(i) for i in range(8)] == lengths * 2, "the denominator stays"
    assert rows.advantages[4:].tolist() == rows.advantages[:4].tolist()
    assert rows.weights.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_partial_completion_weighs_its_share_of_the_length(sample):
    group = own_group(sample, [1.0, 0.0, 0.0, 0.0])
    whole = len(group.rows[0][1])
    theirs = replace(group, peer="p", learnt=[1, 1, 1, 1])
    weights = assemble([theirs], "dr_grpo", per_sequence=True).weights.tolist()
    assert weights == pytest.approx([1 / whole, 0, 0, 0])


def test_only_sampled_tokens_of_a_peers_episode_count(sample):
    """Text between two actions is not trained on and does not count as length."""
    group = own_group(sample, [1.0, 0.0, 0.0, 0.0])
    ids, sampled = [30, 1, 40, 41, 31, 1], [True, True, False, False, True, True]
    rows = [Row(group.rows[0].prompt, ids, sampled)] * 2
    old = [[-0.5, -0.1, 0.0, 0.0, -0.5, -0.1]] * 2
    theirs = TrainingGroup(rows, old, [1.0, 0.0], [1.0] * 2, "p", learnt=[5, 5])
    found = assemble([theirs], "dr_grpo", per_sequence=True)
    assert found.rows[0] == Row(rows[0].prompt, ids[:5], sampled[:5])
    assert found.weights.tolist() == [0.75, 0.0]
    assert found.length(0) == 4

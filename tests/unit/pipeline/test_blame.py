"""Which stage keeps a crew from learning: found when it spoils step after step, and nobody else is
blamed for it."""

import pytest

from swarmnode.stages.head import (
    ABSURD,
    IMPATIENCE,
    LEAST,
    PATIENCE,
    REDEEMED,
    SLOWNESS,
    Blame,
    Verdict,
)


def test_who_refuses_every_step_is_blamed_after_a_bound():
    blame = Blame(3)
    for _ in range(PATIENCE - 1):
        assert blame.refused({1}, "not_finite") is None
    assert blame.refused({1}, "not_finite") == Verdict(
        (1,), "refused step after step: not_finite", 0.0
    )


def test_who_refuses_now_and_then_is_not():
    blame = Blame(3)
    for _ in range(4 * PATIENCE):
        assert blame.refused({1}, "rows") is None
        assert [blame.taken({}) for _ in range(REDEEMED)] == [None] * REDEEMED


@pytest.mark.parametrize(("bad", "taken"), [((1, 2), 0), ((0, 1, 2), 0), ((1, 2), 1)])
def test_those_that_spoil_in_turn_do_not_clear_each_other(bad, taken):
    """taken: steps between any two that are spoilt."""
    blame, verdicts = Blame(4), []
    blame.taken({})
    for stage in bad * (PATIENCE * (1 if not taken else REDEEMED)):
        verdicts.append(blame.silent({stage}))
        verdicts += [blame.taken({}) for _ in range(taken)]
    assert next(verdict[0] for verdict in verdicts if verdict) == (bad[0],)


@pytest.mark.parametrize(
    "spoil", [lambda blame: blame.refused({1}, "frame"), lambda blame: blame.silent({1})]
)
@pytest.mark.parametrize(("spoils", "of"), [(4, 5), (1, 2), (1, 3)])
def test_who_lets_a_step_pass_between_those_that_it_spoils_is_found_all_the_same(spoil, spoils, of):
    """Each refusal halves the crew's micro-batches, and each silence is a deadline: one step that
    is taken must not buy another."""
    blame = Blame(3)
    blame.taken({})
    verdicts = [
        spoil(blame) if step % of < spoils else blame.taken({}) for step in range(20 * PATIENCE)
    ]
    assert next(verdict[0] for verdict in verdicts if verdict) == (1,)


def test_of_two_who_contradict_each_other_the_one_that_does_so_beside_others_too_is_blamed_alone():
    blame = Blame(4)
    blame.taken({})
    pairs = [{1, 2}, {1, 2}, {2, 3}, {2, 3}, {2, 3}]
    assert [blame.silent(pair) for pair in pairs] == [None] * 4 + [
        Verdict((2,), "no answer again and again", 0.0, beside=(1, 3))
    ]
    assert Blame(4).silent(set()) is None


def test_where_it_is_always_the_same_two_both_are():
    blame = Blame(4)
    assert [blame.silent({1, 2}) for _ in range(IMPATIENCE)][-1] == Verdict(
        (1, 2), "no answer again and again", 0.0
    )


def test_who_computes_is_waited_for_while_there_can_be_less_to_compute_and_then_no_longer():
    blame = Blame(3)
    found = Verdict((1,), "too slow again and again", 0.0)
    assert [blame.slow({1}, smallest=False) for _ in range(SLOWNESS)] == [None] * (SLOWNESS - 1) + [
        found
    ]
    assert Blame(3).slow({1}, smallest=True) == found


def test_a_crew_that_has_never_worked_is_given_up_sooner():
    blame = Blame(3)
    assert [blame.silent({1}) for _ in range(IMPATIENCE)] == [None] * (IMPATIENCE - 1) + [
        Verdict((1,), "no answer again and again", 0.0)
    ]
    assert IMPATIENCE < PATIENCE


def norms(absurd=()):
    return {stage: 2.0 * (ABSURD * 1.1 if stage in absurd else 1) for stage in range(3)}


def test_a_norm_that_takes_everybody_else_s_part_of_the_step_away_is_blamed():
    blame = Blame(3)
    for _ in range(LEAST):
        assert blame.taken(norms()) is None
    verdicts = [blame.taken(norms({1})) for _ in range(PATIENCE)]
    assert verdicts[:-1] == [None] * (PATIENCE - 1)
    assert verdicts[-1] == Verdict((1,), "an absurd norm step after step", 0.0)


def test_a_norm_that_was_always_absurd_is_blamed_too():
    blame = Blame(3)
    verdicts = [blame.taken({0: 2.0, 1: 1e100, 2: 0.5}) for _ in range(PATIENCE)]
    assert verdicts == [None] * (PATIENCE - 1) + [
        Verdict((1,), "an absurd norm step after step", 0.0)
    ]


def test_who_has_the_head_or_learns_alone_is_not_absurd():
    blame = Blame(3)
    for _ in range(3 * PATIENCE):
        assert blame.taken({0: 1e5, 1: 1.0, 2: 2.0}) is None
        assert blame.taken({0: 1.0, 1: 0.0, 2: 0.0}) is None
    for _ in range(3 * PATIENCE):
        assert Blame(2).taken({0: 1.0, 1: 1e-20}) is None


@pytest.mark.parametrize("absurd", [{0, 1, 2}, {0, 1}, set()])
def test_a_batch_that_is_hard_for_several_is_nobody_s_fault(absurd):
    blame = Blame(3)
    for _ in range(LEAST):
        blame.taken(norms())
    assert [blame.taken(norms(absurd)) for _ in range(3 * PATIENCE)] == [None] * (3 * PATIENCE)


def test_a_verdict_says_for_how_long_steps_were_spoilt_among_those_that_were_taken():
    now = 0.0
    blame = Blame(3, lambda: now)
    for seconds in range(100):
        now = float(seconds)
        blame.taken({})
    verdicts = []
    for _ in range(5 * PATIENCE * REDEEMED):
        now += 10.0
        verdicts.append(blame.refused({1}, "rows"))
        now += 1.0
        blame.taken({})
    found = next(number for number, verdict in enumerate(verdicts) if verdict)
    assert verdicts[found].seconds == 10.0 + 11.0 * found
    assert blame.verdict.seconds == verdicts[found].seconds

"""A peer's group is trained on with its weight, or refused; it never raises an exception."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from swarmnode.errors import EngineGone
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.logprobs import score
from swarmnode.policy.micro import MicroBatcher
from swarmnode.rl.corrections import LEAST_PROBABILITY
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.rollouts.trainer.batch import TrainingGroup
from swarmnode.rollouts.trainer.judge import (
    CHECKS,
    ExternalChecks,
    Judgement,
    judge,
    judge_until_full,
)
from swarmnode.rollouts.trainer.quota import TokenQuota
from swarmnode.rollouts.trainer.rescore import ScoringBudget
from swarmnode.tasks.frames import Scored, ScorerFailed
from swarmnode.wire.messages import Completion, RolloutGroup, SamplingParams, TaskRef
from swarmnode.wire.tensors import pack_ids, pack_logprobs
from tests.support.groups import external_group
from tests.support.updates import GCD_PROMPT


@pytest.fixture(scope="module")
def policy(embedded):
    return embedded


def external(
    policy,
    sample,
    *,
    texts=None,
    packed=True,
    shift=0.0,
    model=None,
    tokenizer=None,
    rewards=(1.0, 0.0, 0.0, 0.0),
    temperature=1.0,
):
    """Return a sample as a peer's group. packed: False for a group without token ids. shift: added
    to the log-probability of each token."""
    completions = [
        Completion(
            text,
            len(c.ids),
            min(0.0, math.fsum(c.logprobs) + shift * len(c.ids)),
            c.finish,
            pack_ids(c.ids) if packed else b"",
            pack_logprobs([x + shift for x in c.logprobs]) if packed else b"",
        )
        for c, text in zip(
            sample.completions, texts or [c.text for c in sample.completions], strict=True
        )
    ]
    made_by = model or policy.fingerprint, tokenizer or policy.tokenizer_hash
    sampling = SamplingParams(temperature, 1.0, 8)
    group = RolloutGroup(TaskRef("rg/gcd", "v", 0, 0), *made_by, 0, 0, 0, sampling, completions)
    return ExternalGroup(b"c" * 32, "12D3KooWpeer", group, GCD_PROMPT, list(rewards), 0)


def judged(policy, group, checks=CHECKS):
    return judge(
        [group], policy, partial(MicroBatcher(4096).score_with_entropy, policy), 1.0, checks
    )


def outcome(*args):
    ((_, found),) = judged(*args).outcomes
    return found


def test_honest_group_has_full_weight_and_the_sender_s_ids(policy, sample):
    judgement = judged(policy, external(policy, sample))
    assert [outcome for _, outcome in judgement.outcomes] == ["used"]
    (group,) = judgement.accepted
    assert [row.completion for row in group.rows] == [c.ids for c in sample.completions]
    assert group.weights == pytest.approx([1.0] * 4, abs=1e-4)
    for ours, theirs in zip(group.sampler_logprobs, sample.completions, strict=True):
        assert ours == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.parametrize("shift", [-2.0, 0.1, 2.0])
def test_reported_logprobs_do_not_change_a_weight(policy, sample, shift):
    (accepted,) = judged(policy, external(policy, sample, shift=shift)).accepted
    assert accepted.weights == [1.0] * 4


def test_invented_text_with_true_logprobs_is_surprising(policy, sample):
    """A peer that reports correct log-probabilities of a text that it invented."""
    made_up = [policy.tokenize_completion(text, "eos") for text in ("zQ9", "Kx7", "qZ4", "Wv3")]
    logprobs = score(policy, [(sample.prompt_ids, ids) for ids in made_up], 1.0)
    completions = [
        type(sample.completions[0])(ids, lps, policy.decode(ids), "eos")
        for ids, lps in zip(made_up, logprobs, strict=True)
    ]
    forged = external(policy, type(sample)(sample.prompt_ids, completions))
    assert outcome(policy, forged) == "surprise"
    blind = ExternalChecks(surprise_tolerance=100.0, burst_slack=1000.0, least_probability=0)
    assert outcome(policy, forged, blind) == "used", "the spot check alone believes it"


def test_ids_must_spell_the_rewarded_text(policy, sample):
    texts = [c.text for c in sample.completions]
    texts[2] = texts[2] + "7"
    judgement = judged(policy, external(policy, sample, texts=texts))
    assert judgement.accepted == []
    assert [outcome for _, outcome in judgement.outcomes] == ["forged_ids"]


def test_another_tokenizer_s_group_is_read_as_text(policy, sample):
    judgement = judged(policy, external(policy, sample, tokenizer=b"x" * 32, model=b"y" * 32))
    assert [outcome for _, outcome in judgement.outcomes] == ["used"]
    for (_, ids, _), completion in zip(judgement.accepted[0].rows, sample.completions, strict=True):
        assert policy.decode(ids) == completion.text


def test_text_that_our_tokenizer_cannot_spell_is_untokenizable(policy, sample):
    texts = ["漢字", *[c.text for c in sample.completions][1:]]
    group = external(policy, sample, texts=texts, packed=False, tokenizer=b"x" * 32)
    assert outcome(policy, group) == "untokenizable"


def made_up(policy, sample, texts=("zQ9~", "Kx7{", "qZ4|", "Wv3}")):
    """Return an invented text in the form of a sample, with the log-probabilities of a confident
    sender."""
    completions = []
    for text in texts:
        ids = policy.tokenize_completion(text, "eos")
        completions.append(type(sample.completions[0])(ids, [-0.3] * len(ids), text, "eos"))
    return type(sample)(sample.prompt_ids, completions)


@pytest.mark.parametrize(
    ("claims", "refused"),
    [
        ({}, "surprise"),
        ({"packed": False}, "no_ids"),
        ({"packed": False, "tokenizer": b"x" * 32}, "surprise"),
        ({"packed": False, "model": b"y" * 32}, "surprise"),
        ({"model": b"y" * 32}, "surprise"),
        ({"model": b"y" * 32, "tokenizer": b"x" * 32}, "surprise"),
        ({"temperature": 2.0}, "surprise"),
        ({"temperature": 0.5}, "surprise"),
        ({"temperature": 100.0}, "temperature"),
        ({"temperature": 0.001}, "temperature"),
    ],
)
def test_invented_text_is_refused_for_all_claims(policy, sample, claims, refused):
    assert outcome(policy, external(policy, made_up(policy, sample), **claims)) == refused


def test_rejects_false_log_probabilities_of_honest_text(policy, sample):
    """Without log-probabilities of single tokens, their sum is compared."""
    for claims in (
        {},
        {"tokenizer": b"x" * 32},
        {"model": b"y" * 32},
        {"model": b"y" * 32, "packed": False},
    ):
        group = external(policy, sample, shift=-5.0, **claims)
        assert outcome(policy, group) == "spot_check"


def test_invented_best_completion_refuses_the_group(policy, sample):
    diluted = type(sample)(
        sample.prompt_ids,
        [*made_up(policy, sample, ["#<answer>2</answer>"]).completions, *(4 * sample.completions)],
    )
    group = external(policy, diluted, rewards=(1.0, *[0.0] * 16), model=b"y" * 32)
    assert outcome(policy, group) == "surprise"


def test_invented_worse_completion_has_weight_0(policy, sample):
    diluted = type(sample)(
        sample.prompt_ids,
        [*(4 * sample.completions), *made_up(policy, sample, ["#<answer>5</answer>"]).completions],
    )
    judgement = judged(
        policy, external(policy, diluted, rewards=(1.0, *[0.0] * 16), model=b"y" * 32)
    )
    assert [outcome for _, outcome in judgement.outcomes] == ["used"]
    assert judgement.accepted[0].weights[-1] == 0.0
    assert min(judgement.accepted[0].weights[:-1]) > 0.7


def test_a_lucky_right_answer_survives(policy, sample):
    """The least likely of two thousand completions of the own policy is the only rewarded one."""
    (many,) = generate(policy, [GCD_PROMPT], Sampling(2000, 8), policy.random_generator(5))
    luckiest = min(
        (c for c in many.completions if not policy.hides(c.ids)),
        key=lambda c: math.fsum(c.logprobs),
    )
    assert math.fsum(luckiest.logprobs) < -10
    lucky = type(sample)(sample.prompt_ids, [luckiest, *many.completions[:7]])
    judgement = judged(policy, external(policy, lucky, rewards=(1.0, *[0.0] * 7)))
    assert [outcome for _, outcome in judgement.outcomes] == ["used"]
    assert judgement.accepted[0].weights[0] > 0.5


def test_special_tokens_hidden_in_ids_are_refused(policy, sample):
    """Such tokens have no text, so the answer is right, and the policy would learn the tokens."""
    hidden = sample.completions[0]
    pad = policy.tokenizer.pad_token_id
    ids = [hidden.ids[0], pad, *hidden.ids[1:]]
    assert policy.decode(ids) == hidden.text
    tricked = type(hidden)(ids, [-1.0] * len(ids), hidden.text, hidden.finish)
    group = external(policy, type(sample)(sample.prompt_ids, [tricked, *sample.completions[1:]]))
    assert outcome(policy, group) == "special_ids"


def test_spelled_special_token_is_trained_on(policy, sample):
    """Models that open channels or call tools need these tokens."""
    mark = policy.tokenizer.convert_tokens_to_ids("<reply>")
    assert policy.tokenizer.added_tokens_decoder[mark].special
    ids = [[mark, *c.ids[:1], mark, *c.ids[1:]] for c in sample.completions]
    scores = score(policy, [(sample.prompt_ids, each) for each in ids], 1.0)
    marked = [
        replace(c, ids=each, logprobs=scored, text=policy.decode(each))
        for c, each, scored in zip(sample.completions, ids, scores, strict=True)
    ]
    assert all(c.text.count("<reply>") == 2 for c in marked)
    loose = ExternalChecks(surprise_tolerance=100.0, burst_slack=1000.0, least_probability=0)
    group = external(policy, replace(sample, completions=marked))
    judgement = judged(policy, group, loose)
    assert [outcome for _, outcome in judgement.outcomes] == ["used"]
    assert [row.completion for row in judgement.accepted[0].rows] == ids


def test_a_special_token_that_the_text_hides_is_forged(policy, sample):
    mark = policy.tokenizer.convert_tokens_to_ids("<reply>")
    first = sample.completions[0]
    tricked = replace(first, ids=[mark, *first.ids], logprobs=[-1.0, *first.logprobs])
    group = external(policy, replace(sample, completions=[tricked, *sample.completions[1:]]))
    assert outcome(policy, group) == "forged_ids"


def test_group_that_does_not_fit_is_refused_alone(policy, sample):
    long = policy.tokenize_completion("1" * 150, "length")
    tricked = type(sample)(
        sample.prompt_ids,
        [type(sample.completions[0])(long, [-1.0] * 150, "1" * 150, "length")] * 4,
    )
    batcher = MicroBatcher(4096)
    real = batcher.run

    def run(lengths, work, *rest):
        def limited(rows):
            if len(rows) * max(lengths[r] for r in rows) > 150:
                raise torch.OutOfMemoryError("simulated")
            return work(rows)

        return real(lengths, limited, *rest)

    batcher.run = run
    groups = [external(policy, sample), external(policy, tricked), external(policy, sample)]
    judgement = judge(groups, policy, partial(batcher.score_with_entropy, policy), 1.0)
    assert [outcome for _, outcome in judgement.outcomes] == ["used", "too_large", "used"]
    assert len(judgement.accepted) == 2


@pytest.mark.parametrize("tokenizer", [None, b"x" * 32])
def test_a_group_longer_than_our_context_is_refused(policy, sample, tokenizer):
    """An honest peer with a longer context may send a row beyond this model's learned positions."""
    room = policy.context - len(sample.prompt_ids)
    groups = []
    for length in (room + 1, room):
        ids = policy.tokenize_completion("1" * length, "length")
        one = type(sample.completions[0])(ids, [-1.0] * length, "1" * length, "length")
        whole = replace(sample, completions=[*sample.completions[:3], one])
        groups.append(external(policy, whole, tokenizer=tokenizer, model=b"y" * 32))
    scorer = partial(MicroBatcher(4096).score_with_entropy, policy)
    judgement = judge([*groups, external(policy, sample)], policy, scorer, 1.0)
    outcomes = {id(group): outcome for group, outcome in judgement.outcomes}
    assert outcomes[id(groups[0])] == "too_long"
    assert outcomes[id(groups[1])] != "too_long"
    assert judgement.outcomes[-1][1] == "used"
    assert str(room + 1 + len(sample.prompt_ids)) in judgement.details["too_long"]


class Panic(BaseException):
    """A panic of a Rust library, which is not an Exception."""


@pytest.mark.parametrize("error", [RuntimeError("a kernel says no"), Panic("x")])
def test_an_exception_while_scoring_costs_its_group(policy, sample, error):
    longer = [replace(c, ids=[*c.ids[:-1], *c.ids[-2:]]) for c in sample.completions]
    longer = [replace(c, text=policy.decode(c.ids), logprobs=[-1.0] * len(c.ids)) for c in longer]
    poison = external(policy, replace(sample, completions=longer), tokenizer=b"x" * 32)
    answer = policy.tokenize_completion(longer[0].text, longer[0].finish)

    def score_rows(rows, temperature):
        if any(row.completion == answer for row in rows):
            raise error
        return MicroBatcher(4096).score_with_entropy(policy, rows, temperature)

    groups = [external(policy, sample), poison, external(policy, sample)]

    judgement = judge(groups, policy, score_rows, 1.0)
    assert [outcome for _, outcome in judgement.outcomes] == ["used", "failed", "used"]
    assert len(judgement.accepted) == 2
    assert judgement.details["failed"]


def test_the_detail_of_a_reason_is_of_its_first_group(policy, sample):
    def score_rows(rows, temperature):
        raise RuntimeError(f"failed for {len(rows)} rows")

    fewer = replace(sample, completions=sample.completions[:3])
    groups = [external(policy, sample), external(policy, fewer, rewards=[0.0, 0.0, 1.0])]
    judgement = judge(groups, policy, score_rows, 1.0)
    assert [outcome for _, outcome in judgement.outcomes] == ["failed", "failed"]
    assert "4 rows" in judgement.details["failed"]


def test_an_exception_while_reading_costs_its_group(policy, sample):
    groups = [external(policy, sample, tokenizer=b"x" * 32), external(policy, sample)]

    def panic(text, finish):
        raise Panic("invalid range")

    fragile = policy.clone()
    object.__setattr__(fragile, "tokenize_completion", panic)
    assert outcome(fragile, groups[0]) == "failed"
    assert outcome(fragile, groups[1]) == "used"


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_not_numbers_cost_their_group(policy, sample, place, value):
    groups = [external(policy, sample), external(policy, sample)]

    def score_rows(rows, temperature):
        found = MicroBatcher(4096).score_with_entropy(policy, rows, temperature)
        found[5][place][0] = value
        return found

    judgement = judge(groups, policy, score_rows, 1.0)
    assert [outcome for _, outcome in judgement.outcomes] == ["used", "no_gradient"]


def test_lost_engine_does_not_refuse_a_group(policy, sample):
    def score_rows(rows, temperature):
        raise EngineGone("another node is the head now")

    with pytest.raises(EngineGone):
        judge([external(policy, sample)], policy, score_rows, 1.0)


def test_ids_outside_the_vocabulary_are_untokenizable(policy, sample):
    group = external(policy, sample)
    bad = Completion("x", 1, -1.0, "length", pack_ids([policy.vocab_size]), pack_logprobs([-1.0]))
    group.group.completions[0] = bad
    assert outcome(policy, group) == "untokenizable"


def test_logprobs_are_compared_at_the_sender_s_temperature(policy):
    cool = generate(policy, [GCD_PROMPT], Sampling(4, 8, 0.5), policy.random_generator(2))[0]
    group = external(policy, cool, temperature=0.5)
    strict = ExternalChecks(spot_check_tolerance=0.001)
    assert outcome(policy, group, strict) == "used"
    wrong = external(policy, cool, temperature=2.0)
    assert outcome(policy, wrong, strict) == "spot_check"


def refusing(liars, batches):
    """A judge by peer name that records the number of groups of each call."""

    def judged(groups):
        batches.append(len(groups))
        judgement = Judgement()
        for group in groups:
            honest = group.peer not in liars
            judgement.outcomes.append((group, "used" if honest else "surprise"))
            if honest:
                judgement.accepted.append(
                    TrainingGroup([], [], group.rewards, [1.0, 1.0], group.peer)
                )
        return judgement

    return judged


@pytest.mark.parametrize(
    ("there", "drawn", "asked", "accepted"),
    [
        ("axbxcx", "dyef", [5], "abcdef"),  # refused groups outnumber the reserve
        ("axbxcx", "xdxx", [5], "abcd"),  # no second time, so a step is not delayed
        ("axbxcdef", "", [], "abcdef"),
        ("abc", "", [], "abc"),  # no peer has more
    ],
)
def test_refused_groups_are_replaced_once(there, drawn, asked, accepted):
    counts = []

    def more(count):
        counts.append(count)
        return [external_group(peer, 20 + number) for number, peer in enumerate(drawn)]

    groups = [external_group(peer, number) for number, peer in enumerate(there)]
    judgement, _ = judge_until_full(groups, 6, refusing({"x", "y"}, []), more)
    assert counts == asked
    assert "".join(group.peer for group in judgement.accepted) == accepted


def test_full_step_returns_groups_that_were_not_judged():
    groups = [external_group(peer, number) for number, peer in enumerate("abcdefgh")]
    batches = []
    judgement, left = judge_until_full(groups, 6, refusing(set(), batches))
    assert len(judgement.accepted) == 6
    assert left == groups[6:]
    assert batches == [6]


def test_one_peer_fills_at_most_half_of_a_step():
    groups = [external_group("a", number) for number in range(5)] + [external_group("b", 9)]
    judgement, left = judge_until_full(groups, 6, refusing(set(), []))
    assert [group.peer for group in judgement.accepted] == list("aaab")
    assert left == groups[3:5]


def test_without_room_nothing_is_judged():
    groups = [external_group("a", 1)]
    assert judge_until_full(groups, 0, refusing(set(), [])) == (Judgement(), groups)


def test_improbable_tokens_are_not_learnt(policy, sample):
    answer = sample.completions[0]
    ids = [*answer.ids[:-1], *policy.tokenize_completion("zQ", "length"), answer.ids[-1]]
    (logprobs,) = score(policy, [(sample.prompt_ids, ids)], 1.0)
    probable = [lp >= math.log(LEAST_PROBABILITY) for lp in logprobs]
    assert not all(probable[len(answer.ids) - 1 :])
    marked = replace(answer, ids=ids, logprobs=logprobs, text=policy.decode(ids))
    group = external(policy, replace(sample, completions=[marked, *sample.completions[1:]]))
    loose = ExternalChecks(surprise_tolerance=100.0, burst_slack=1000.0)
    (accepted,) = judged(policy, group, loose).accepted
    assert accepted.rows[0].sampled == probable
    assert accepted.learnt[0] == len(ids), "tokens behind it are learned"
    assert judged(policy, group, replace(loose, least_probability=0)).accepted[0].learnt == []


def test_a_group_of_improbable_tokens_is_refused(policy, sample):
    ids = policy.tokenize_completion("Z", "length")
    (logprobs,) = score(policy, [(sample.prompt_ids, ids)], 1.0)
    assert max(logprobs) < math.log(LEAST_PROBABILITY)
    only = replace(sample.completions[0], ids=ids, logprobs=logprobs, text="Z", finish="length")
    group = external(policy, replace(sample, completions=[only, *sample.completions[1:]]))
    loose = ExternalChecks(surprise_tolerance=100.0, burst_slack=1000.0)
    assert outcome(policy, group, loose) == "improbable"


def test_peers_marks_are_not_learnt(policy, sample):
    group = external(policy, sample)
    quota, score_rows = TokenQuota(), partial(MicroBatcher(4096).score_with_entropy, policy)
    for _ in range(200):
        quota.own("rg/gcd", [999])
    judgements = [judge([group], policy, score_rows, 1.0, quota=quota) for _ in range(12)]
    assert judgements[0].accepted[0].learnt[0] == len(sample.completions[0].ids)
    assert [outcome for _, outcome in judgements[-1].outcomes] == ["drift"]
    named = judgements[-1].details["drift"]
    assert named.endswith("to rg/gcd, this node in 0 %")
    token = named.removeprefix("peers write '").partition("'")[0]
    assert any(token in completion.text for completion in sample.completions)


def test_unneeded_ending_is_not_learnt(policy, sample):
    lengths = [len(c.ids) for c in sample.completions]
    whole = max(lengths)
    best = lengths.index(whole)
    group = external(policy, sample, rewards=[float(i == best) for i in range(4)])
    score_rows = partial(MicroBatcher(4096).score_with_entropy, policy)
    always = lambda items: [Scored("?", [1.0] * len(texts)) for _, texts in items]
    never = lambda items: [Scored("?", [0.0] * len(texts)) for _, texts in items]
    broken = lambda items: [ScorerFailed("gone")] * len(items)
    learnt = lambda rescore: judge([group], policy, score_rows, 1.0, rescore=rescore)
    assert learnt(never).accepted[0].learnt[best] == whole
    assert learnt(always).accepted[0].learnt[best] < whole - 1
    assert [outcome for _, outcome in learnt(broken).outcomes] == ["failed"]


def test_a_peer_that_costs_the_scorer_too_much_is_refused(policy, sample):
    group = external(policy, sample, rewards=[0.0, 0.0, 0.0, 1.0])
    score_rows = partial(MicroBatcher(4096).score_with_entropy, policy)
    now = iter(range(0, 1000, 9))
    budget = ScoringBudget(lambda: float(next(now)))
    scorer = lambda items, reveal: [Scored("?", [0.0] * len(texts)) for _, texts in items]
    judged = [
        judge([group], policy, score_rows, 1.0, rescore=scorer, budget=budget) for _ in range(2)
    ]
    assert [each.outcomes[0][1] for each in judged] == ["used", "failed"]
    assert "verifier" in judged[1].details["failed"]

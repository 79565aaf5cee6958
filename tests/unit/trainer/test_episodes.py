"""Episodes: only sampled tokens are trained on, a turn continues from the tokens before it, and a
peer's episode is rebuilt from its actions."""

import contextlib
import copy
import importlib.resources
import json
from collections import Counter
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import msgspec
import pytest
import structlog
import torch

from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.drops import TrainerDrops
from swarmnode.errors import Unavailable
from swarmnode.policy.engine.continuous import Continuous
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.engine.protocol import FinishedRequest, Request
from swarmnode.policy.generate import GroupSample, SampledCompletion, Sampling, generate
from swarmnode.policy.load import load_policy
from swarmnode.policy.logprobs import collate, logprobs_by, score, score_with_entropy
from swarmnode.policy.micro import MicroBatcher
from swarmnode.policy.text import TOOL, Chat, around_observations, shows_tools
from swarmnode.policy.ways import Row
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.rollouts.trainer.batch import assemble, episode_row, own_group
from swarmnode.rollouts.trainer.judge import judge
from swarmnode.tasks.frames import Episode, Scored, ScorerFailed
from swarmnode.tool_prompt import FORM, FirstText, describe, split
from swarmnode.trainer import episodes as module
from swarmnode.trainer import sampler as sampler_module
from swarmnode.trainer.episodes import Episodes, PlayedEpisode, answer_all, check_template
from swarmnode.trainer.sampler import Sampler
from swarmnode.trainer.state import Counters
from swarmnode.trainer.update import normalizer
from swarmnode.wire.messages import RolloutGroup, SamplingParams, TaskRef
from swarmnode.wire.tensors import unpack_ids

TURNS = 3
REF = TaskRef("own:walk", "v", 0, 0)
PROMPT = "12"
QWEN2 = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not keep %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS_THINKING_BEFORE_A_USER = STRIPS_THINKING.replace(
    "and not keep", "and messages[loop.index0:] | selectattr('role', 'eq', 'user') | list"
)
CALL = (
    '<tool_call>{"name": "{{ c.function.name }}", "arguments":'
    " {{ c.function.arguments | tojson }}}</tool_call>"
)
SHOWN = "{% for t in tools or [] %}<tool> {{ t.function.name }}\n{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}" + CALL + "{% endfor %}<|im_end|>"
WITH_TOOLS = SHOWN + QWEN2.replace("<|im_end|>", CALLS)


@pytest.fixture(scope="module")
def policy():
    """The embedded policy without a chat template, so that observations stand between line breaks.
    Its answers end after some tokens for any question. No answer has another special token, because
    an answer with one would not be shared."""
    policy = load_policy(PolicyConfig())
    tokenizer = copy.deepcopy(policy.tokenizer)
    tokenizer.chat_template = None
    likelier = torch.zeros(policy.base.get_output_embeddings().weight.shape[0])
    likelier[tokenizer.all_special_ids] = -1000.0
    likelier[policy.eos_id] = 100.0
    policy.base.get_output_embeddings().register_forward_hook(
        lambda module, inputs, logits: (logits / 4).clamp(-1, 1) + likelier / 33
    )
    return replace(policy, tokenizer=tokenizer, obstacles={})


@pytest.fixture(autouse=True)
def tasks(monkeypatch):
    known = {REF.id: SimpleNamespace(turns=TURNS)}
    monkeypatch.setattr(module, "TASKS", known)
    monkeypatch.setattr(sampler_module, "TASKS", known)
    numbers = count()
    monkeypatch.setattr(sampler_module, "next_question", lambda *_: (next(numbers), REF))


class Walk:
    """An environment that ends after the third action, or after an empty one; the reward of an
    episode is the share of its actions that are not empty."""

    def __init__(self, fails=(), prompt=PROMPT):
        self.calls, self.fails, self.prompt = 0, fails, prompt

    def score_many(self, items):
        self.calls += 1
        return [
            ScorerFailed("died")
            if self.calls in self.fails and number == 0
            else self.scored(episodes)
            for number, (_, episodes) in enumerate(items)
        ]

    def scored(self, episodes):
        played = [
            Episode(
                [f"saw {len(action)}." for action in actions],
                len(actions) == TURNS or "" in actions,
            )
            for actions in episodes
        ]
        rewards = [
            sum(map(bool, actions)) / TURNS if each.done else 0.0
            for actions, each in zip(episodes, played, strict=True)
        ]
        return Scored(self.prompt, rewards, episodes=played)


def continuous(policy, generations=4, tokens=6, batch=16384):
    sampling = Sampling(generations, tokens)
    return Continuous(policy, MicroBatcher(batch), sampling, policy.random_generator(3))


def lockstep(policy, generations=4, tokens=6):
    rng, sampling = policy.random_generator(3), Sampling(generations, tokens)
    return Lockstep(
        lambda prompts, count: generate(policy, prompts, sampling.with_generations(count), rng)
    )


def finished(episodes, engine, number=0):
    episodes.begin(number, REF, PROMPT)
    while engine.statistics().unfinished:
        done, failed = episodes.play(engine.finished(5), 5)
        if done or failed:
            return done, failed
    raise AssertionError("no group")


def sampler_of(policy, engine, scorer, drops=None, generations=4):
    cfg = TrainingConfig(num_generations=generations, max_completion_length=6)
    return Sampler(
        cfg,
        [REF.id],
        SimpleNamespace(text=policy, generation=lambda sampling, rng: engine),
        scorer,
        policy.random_generator(0),
        Counters(policy_version=5),
        drops,
    )


# ---- between two actions ------------------------------------------------------------------------


def template(policy, text):
    tokenizer = copy.deepcopy(policy.tokenizer)
    tokenizer.chat_template = text
    return tokenizer


def test_observation_is_rendered_as_a_user_turn(policy):
    assert around_observations(template(policy, QWEN2)) == (
        "<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
    )


def test_template_that_strips_thinking_is_refused(policy):
    tokenizer = template(policy, STRIPS_THINKING)
    with pytest.raises(Unavailable, match=r"policy\.chat"):
        around_observations(tokenizer)
    around_observations(tokenizer, Chat(arguments=(("keep", True),)))


def test_special_tokens_in_an_observation_stay_text(policy):
    eos = policy.tokenizer.eos_token
    ids = policy.observation_ids(f"a{eos}b", policy.eos_id)
    assert policy.eos_id not in ids
    assert policy.decode(ids) == f"\na{eos}b\n"


def test_a_template_that_writes_calls_so_shows_the_tools(policy):
    text = replace(policy, tokenizer=template(policy, WITH_TOOLS))
    prompt = describe("What is 3 + 4?", [TOOL])
    assert shows_tools(text.tokenizer)
    assert text.has_tools(prompt)
    assert not text.has_tools("What is 3 + 4?")
    assert text.tokenizer.decode(text.encode_prompt(prompt)) == (
        "<tool> look_at\n<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert around_observations(text.tokenizer, tools=True) == (
        "<|im_end|>\n<|im_start|>tool\n",
        "<|im_end|>\n<|im_start|>assistant\n",
    )


OTHERS = {
    "shows no tools": QWEN2,
    "writes another form": WITH_TOOLS.replace("<tool_call>", "[CALL]"),
    "names arguments otherwise": WITH_TOOLS.replace('"arguments"', '"parameters"'),
    "writes no calls": SHOWN + QWEN2,
    "refuses results": WITH_TOOLS.replace(
        "{% for m in", "{% if messages[2] %}{{ raise_exception('no') }}{% endif %}{% for m in"
    ),
    "changes earlier turns": SHOWN + STRIPS_THINKING.replace("<|im_end|>", CALLS),
    "no template": None,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_without_such_a_template_the_tools_are_text(policy, kind):
    text = replace(policy, tokenizer=template(policy, OTHERS[kind]))
    prompt = describe("What is 3 + 4?", [TOOL])
    assert not text.has_tools(prompt)
    shown = text.tokenizer.decode(text.encode_prompt(prompt))
    assert "What is 3 + 4?\nYou can call functions" in shown
    assert '{"name": "look_at", "description"' in shown


RULES = describe("What?", []).removeprefix("What?")


@pytest.mark.parametrize(
    "text",
    [
        "What is 3 + 4?",
        f"What?{RULES}",
        f"What?{RULES}not JSON",
        f'What?{RULES}{{"name": 3}}',
        f"What?{RULES}" + "[" * 100_000,
        f'{RULES}{{"name": "f"}}'.removeprefix("\n"),
    ],
)
def test_a_text_that_names_no_tools_is_itself(text):
    assert split(text) == FirstText(text)


@pytest.mark.parametrize("form", [FORM, '{"fields": {"tool_calls": {"open": "<"}}}'])
def test_first_text_is_split_into_tools_and_question(form):
    found = split(describe("What?\nNow.", [TOOL, TOOL], form))
    assert found == FirstText("What?\nNow.", form, (TOOL, TOOL))


def test_first_text_of_a_task_decides_about_the_template(policy, monkeypatch):
    monkeypatch.setattr(module, "task_version", lambda name: "v")
    strips = SHOWN + STRIPS_THINKING_BEFORE_A_USER.replace("<|im_end|>", CALLS)
    text = replace(policy, tokenizer=template(policy, strips))
    with structlog.testing.capture_logs() as logs:
        check_template(text, Walk(prompt=describe("What?", [TOOL])), [REF.id])
    assert [(line["task"], line["shown_in"]) for line in logs] == [(REF.id, "chat template")]
    with pytest.raises(Unavailable, match="changes earlier turns"):
        check_template(text, Walk(), [REF.id])
    scorer = Walk(prompt=describe("What?", [TOOL], '{"fields": {}}'))
    with pytest.raises(
        Unavailable, match=r"changes .* tools of own:walk: set .* response_template"
    ):
        check_template(text, scorer, [REF.id])
    check_template(text, SimpleNamespace(score_many=lambda items: [ScorerFailed("died")]), [])


def test_the_form_of_another_model_is_not_compiled(policy):
    """A response template of another model may hang the process that compiles it."""
    tokenizer = template(policy, WITH_TOOLS.replace("<tool_call>", "[CALL]"))
    form = {
        "start_anchor": "x",
        "fields": {
            "tool_calls": {
                "open": "[CALL]",
                "close": "<",
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
                "repeats": True,
            }
        },
    }
    text = replace(policy, tokenizer=tokenizer)
    prompt = describe("What?", [TOOL], json.dumps(form))
    assert not text.has_tools(prompt)
    tokenizer = template(policy, tokenizer.chat_template)
    tokenizer.response_template = form
    assert replace(policy, tokenizer=tokenizer).has_tools(prompt)


@pytest.mark.parametrize(
    ("name", "shows", "with_own", "plain"),
    [
        ("qwen2_5", True, True, True),
        ("qwen3", True, True, False),
        ("qwen3_instruct_2507", True, True, True),
        ("qwen3_6", False, True, False),
        ("llama3_1", False, True, True),
        ("gemma3", False, False, True),
        ("gptoss", False, False, False),
    ],
)
def test_templates_of_real_models(policy, name, shows, with_own, plain):
    """`with_own`: where the task names the form of this model's calls. `plain`: without tools,
    whether earlier turns stay. Qwen3 keeps its thinking between tools."""
    trl = pytest.importorskip("trl")
    folder = importlib.resources.files(trl) / "chat_templates"
    tokenizer = template(policy, (folder / f"{name}.jinja").read_text())
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
    assert shows_tools(tokenizer) is shows
    with contextlib.suppress(ValueError):  # it knows none
        trl.chat_template_utils.add_response_schema(tokenizer)
    shows_tools.cache_clear()
    form = json.dumps(tokenizer.response_template)
    assert shows_tools(tokenizer, Chat(), form) is with_own
    if plain:
        around_observations(tokenizer)
    else:
        with pytest.raises(Unavailable, match="changes earlier turns"):
            around_observations(tokenizer)


def test_template_that_opens_the_thought_is_tested(policy):
    trl = pytest.importorskip("trl")
    folder = importlib.resources.files(trl) / "chat_templates"
    tokenizer = template(policy, (folder / "qwen3_6.jinja").read_text())
    before, after = around_observations(tokenizer, Chat(arguments=(("preserve_thinking", True),)))
    assert before == "<|im_end|>\n<|im_start|>user\n"
    assert after == "<|im_end|>\n<|im_start|>assistant\n<think>\n"


# ---- trained tokens -------------------------------------------------------------------------

MASKED = Row([5, 9, 20], [30, 31, 1, 40, 41, 33, 1], [True] * 3 + [False] * 2 + [True] * 2)
PLAIN = Row([5, 9, 20], [30, 31, 1, 40, 41, 33, 1])


@pytest.mark.parametrize("way", ["one pass", "packed", "two passes", "row by row", "recomputed"])
def test_only_sampled_ids_are_scored(policy, way):
    rows = [MASKED, PLAIN, Row([7], [40, 12])]
    chosen, spread = logprobs_by(way, policy, collate(rows, 0), 1.0)
    mask = torch.tensor(MASKED.sampled)
    for values in (chosen, spread):
        assert values[0][mask].tolist() == pytest.approx(values[1][mask].tolist(), abs=1e-5)
        assert not values[0][~mask].any()
    assert chosen[1].all()


def test_an_id_that_was_not_sampled_has_no_gradient(policy):
    """The gradient is the same as if those ids were part of longer prompts."""
    policy = policy.clone()
    longer = Row(MASKED.prompt + MASKED.completion[:5], MASKED.completion[5:])
    found = []
    for rows in ([MASKED], [Row(MASKED.prompt, MASKED.completion[:3]), longer]):
        chosen, _ = logprobs_by("one pass", policy, collate(rows, 0), 1.0)
        found.append(torch.autograd.grad(chosen.sum(), policy.trainable_parameters()))
    for mine, expected in zip(*found, strict=True):
        assert torch.allclose(mine, expected, atol=1e-4)
    sample = GroupSample(
        MASKED.prompt,
        [
            SampledCompletion(MASKED.completion, [-1.0] * 7, "", "eos", sampled=MASKED.sampled),
            SampledCompletion([30, 1], [-1.0] * 2, "", "eos"),
        ],
    )
    rows = assemble([own_group(sample, [1.0, 0.0])], "grpo")
    assert normalizer(rows, TrainingConfig(loss_type="dapo")) == 5 + 2
    assert MASKED.at_sampled([1, 2, 3, 4, 5, 6, 7]) == [1, 2, 3, 6, 7]


# ---- from turn to turn ---------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [16384, 60])
def test_a_turn_goes_on_from_the_tokens_before_it(policy, batch):
    """The engine keeps rows between turns, or prefills them again if only some rows fit."""
    engine = continuous(policy, batch=batch)
    episodes = Episodes(engine, policy, Walk())
    ((group,), failed) = finished(episodes, engine)
    assert not failed
    for episode in group.sample.completions:
        row = Row(group.sample.prompt_ids, episode.ids, episode.sampled)
        again = episode_row(
            policy, row.prompt, [turn.ids for turn in episode.turns], episode.observations
        )
        assert again.completion == row.completion
        assert list(again.sampled) == list(row.sampled)
        assert row.at_sampled(episode.logprobs) == [x for t in episode.turns for x in t.logprobs]
        assert episode.logprobs == pytest.approx(score(policy, [row], 1.0)[0], abs=1e-4)
    assert any(len(episode.turns) > 1 for episode in group.sample.completions)
    assert not engine._kept
    assert not engine.statistics().unfinished


def test_a_kept_row_is_not_run_again(policy, monkeypatch):
    from swarmnode.policy.engine import continuous as engine_module

    runs = []
    real = engine_module.prefill

    def counted(policy, rows, known=()):
        known = list(known)
        have = map(len, known or [[]] * len(rows))
        runs.extend(zip(map(len, rows), have, strict=True))
        return real(policy, rows, known)

    monkeypatch.setattr(engine_module, "prefill", counted)
    engine = continuous(policy)
    ((group,), _) = finished(Episodes(engine, policy, Walk()), engine)
    later = [(length, known) for length, known in runs if known]
    assert len(later) == sum(len(e.turns) - 1 for e in group.sample.completions)
    assert all(length - known < 12 for length, known in later)


def test_rows_of_another_request_are_not_followed(policy):
    engine = continuous(policy, generations=1)
    engine.submit(Request(0, "12", continues=True))
    while not (done := engine.finished(0)):
        pass
    engine.submit(Request(1, [7, 8, 9], 1, follows=done[0].number))
    while not (done := engine.finished(0)):
        pass
    (one,) = done[0].sample.completions
    assert one.logprobs == pytest.approx(score(policy, [Row([7, 8, 9], one.ids)], 1.0)[0], abs=1e-4)


def test_a_cut_action_is_not_given_to_the_environment(policy):
    engine = Lockstep(
        lambda prompts, count: [
            GroupSample(
                [2, 3], [SampledCompletion([30, 31], [-1.0, -1.0], "ab", "length")] * (count or 2)
            )
            for _ in prompts
        ]
    )
    ((group,), _) = finished(Episodes(engine, policy, Walk()), engine)
    episode = group.sample.completions[0]
    assert (episode.finish, episode.actions, episode.observations) == ("length", [], [])


def test_an_episode_ends_where_the_context_is_full(policy):
    small = replace(policy, context=len(policy.encode_prompt(PROMPT)) + 9)
    engine = continuous(small, generations=8, tokens=6)
    ((group,), _) = finished(Episodes(engine, small, Walk()), engine)
    for episode in group.sample.completions:
        assert len(group.sample.prompt_ids) + len(episode.ids) <= small.context
        ended = Walk().scored([episode.actions]).episodes[0].done
        assert episode.context_full or episode.finish == "length" or ended
    assert any(episode.context_full for episode in group.sample.completions)


def test_failed_environment_ends_only_its_group(policy):
    engine = continuous(policy)
    drops = TrainerDrops()
    experience = sampler_of(policy, engine, Walk(fails=(2,)), drops)(2)
    assert len(experience.groups) == 2
    assert +Counter(drops.group.statistics().dropped) == {"not_scored": 1}
    assert not engine._kept


@pytest.mark.parametrize("engine", [lockstep, continuous])
def test_the_sampler_trains_on_episodes_and_publishes_actions_only(policy, engine):
    experience = sampler_of(policy, engine(policy), Walk())(2)
    assert len(experience.groups) == len(experience.messages) == 2
    assert experience.played.episodes >= 8
    assert experience.lags == [0, 0]
    for group, message, observations in zip(
        experience.groups, experience.messages, experience.observations, strict=True
    ):
        for row, completion, seen in zip(
            group.rows, message.completions, observations, strict=True
        ):
            assert unpack_ids(completion.token_ids).tolist() == row.at_sampled(row.completion)
            assert completion.tokens == row.tokens == sum(t.tokens for t in completion.turns)
            assert len(seen) == len(completion.turns) - (completion.finish == "length")
            assert len(completion.text.encode()) == sum(t.text_bytes for t in completion.turns)
    assert experience.tokens == sum(row.tokens for g in experience.groups for row in g.rows)


def test_oldest_token_determines_an_episode_s_age(policy):
    engine = continuous(policy, generations=8)
    episodes = Episodes(engine, policy, Walk())
    episodes.begin(0, REF, PROMPT)
    version = 3
    while not (done := engine.finished(version)):
        pass
    episodes.play(done, version)
    assert episodes.oldest == 3
    while engine.statistics().unfinished:
        done, _ = episodes.play(engine.finished(4), 4)
        assert episodes.oldest in (3, None)
    (group,) = done
    assert {v for e in group.sample.completions for v in e.versions} == {3, 4}


def test_held_out_episodes_are_played_to_their_ends(policy):
    questions = [(REF, PROMPT), (REF, "3")]
    found = answer_all(lockstep(policy, generations=2), policy, Walk(), questions)
    assert [len(group.completions) for group in found] == [2, 2]
    for group in found:
        for episode in group.completions:
            assert isinstance(episode, PlayedEpisode)
            assert episode.finish == "length" or Walk().scored([episode.actions]).episodes[0].done


# ---- a peer's ------------------------------------------------------------------------------------


def published_by(policy, scorer):
    experience = sampler_of(policy, continuous(policy), scorer)(1)
    return experience.groups[0], experience.messages[0], experience.observations[0]


def external(policy, message, observations, tokenizer=None, prompt=PROMPT):
    group = RolloutGroup(
        REF,
        policy.fingerprint,
        tokenizer or policy.tokenizer_hash,
        5,
        1,
        1_000,
        SamplingParams(1.0, 1.0, 6),
        message.completions,
    )
    rewards = [float(i == 0) for i in range(len(message.completions))]
    return ExternalGroup(b"c" * 32, "peer", group, prompt, rewards, 0, observations=observations)


def judged(policy, group):
    return judge([group], policy, lambda rows, t: score_with_entropy(policy, rows, t), 1.0)


@pytest.mark.parametrize("tools", [False, True])
def test_a_peers_episode_is_rebuilt_from_its_actions(policy, tools):
    scorer = Walk()
    if tools:
        policy = replace(policy, tokenizer=template(policy, WITH_TOOLS))
        scorer = Walk(prompt=describe("What is 3 + 4?", [TOOL]))
    own, message, observations = published_by(policy, scorer)
    if tools:
        assert "<tool> look_at" in policy.tokenizer.decode(own.rows[0].prompt)
        assert any("tool\nsaw" in policy.tokenizer.decode(row.completion) for row in own.rows)
    judgement = judged(policy, external(policy, message, observations, prompt=scorer.prompt))
    assert [outcome for _, outcome in judgement.outcomes] == ["used"]
    (group,) = judgement.accepted
    assert [(row.prompt, row.completion) for row in group.rows] == [
        (row.prompt, row.completion) for row in own.rows
    ]
    for row in group.rows:
        assert len(row.sampled) == len(row.completion)
    for judged_here, recorded in zip(group.sampler_logprobs, own.sampler_logprobs, strict=True):
        assert judged_here == pytest.approx(recorded, abs=1e-4)


def test_episode_of_another_tokenizer_is_read_as_text(policy):
    _, message, observations = published_by(policy, Walk())
    judgement = judged(policy, external(policy, message, observations, tokenizer=b"x" * 32))
    assert [outcome for _, outcome in judgement.outcomes] == ["used"]


def test_ids_that_end_a_turn_elsewhere_are_forged(policy):
    """The whole text is the same, but the end of one action is at the start of the next."""
    _, message, observations = published_by(policy, Walk())
    place, completion = next(
        (i, c)
        for i, c in enumerate(message.completions)
        if len(c.turns) > 1 and c.turns[1].tokens > 1
    )
    first, second, *others = completion.turns
    moved = [
        msgspec.structs.replace(first, tokens=first.tokens + 1),
        msgspec.structs.replace(second, tokens=second.tokens - 1),
        *others,
    ]
    completions = list(message.completions)
    completions[place] = msgspec.structs.replace(completion, turns=moved)
    forged = msgspec.structs.replace(message, completions=completions)
    judgement = judged(policy, external(policy, forged, observations))
    assert Counter(outcome for _, outcome in judgement.outcomes) == {"forged_ids": 1}
    assert not judgement.accepted


def test_requests_outside_episodes_are_returned_unchanged(policy):
    one = FinishedRequest(7, GroupSample([1], [SampledCompletion([2], [-1.0], "a", "eos")]))
    assert Episodes(continuous(policy), policy, Walk()).play([one], 0) == ([one], [])

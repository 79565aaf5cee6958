"""The child of `chat` and `serve`: opens a saved policy and answers several questions at once."""

from __future__ import annotations

import queue
from dataclasses import replace

import pytest
import torch

from swarmnode.config import Config
from swarmnode.errors import DeviceError, Unavailable
from swarmnode.policy import device
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy
from swarmnode.policy.text import Chat
from swarmnode.talk.child import answer, open_policy, serve
from swarmnode.talk.messages import End, Opening, Piece, Question, Stop, Turn, from_child
from swarmnode.trainer import state
from swarmnode.trainer.state import Counters
from swarmnode.weights.trainer.lora import freeze_a

IDS = torch.tensor([[5, 9, 17, 3, 8]])
ADAPTER = {"lora": {"r": 2}}


def configured(data_dir, policy=None, rule="off") -> Config:
    return Config.model_validate(
        {
            "node": {"data_dir": str(data_dir)},
            "policy": {"devices": "cpu", "threads": 1, **(policy or {})},
            "weights": {"rule": rule},
        }
    )


def opening(config: Config, saved: bool = True) -> Opening:
    return Opening(config.model_dump_json(), "chat", saved)


@torch.no_grad()
def saved_policy(config: Config):
    """Save a changed policy as the trainer does, and return it."""
    policy = load_policy(config.policy)
    freeze_a(dict(policy.model.named_parameters()))
    for parameter in policy.trainable_parameters():
        parameter.add_(0.05)
    directory = config.node.data_dir / "trainer"
    directory.mkdir(parents=True)
    owner = state.owner(policy.fingerprint, state.adapter_shape(config.policy.lora))
    optimizer = torch.optim.AdamW(policy.trainable_parameters())
    taken = state.take(policy.model, optimizer, torch.Generator(), Counters(step=7), owner)
    state.write(directory, taken)
    return policy


@pytest.fixture(scope="module")
def policy():
    return load_policy(Config.model_validate({"policy": {"devices": "cpu", "threads": 1}}).policy)


def question(number=1, text="2+3=", max_tokens=8, seed=3) -> Question:
    return Question(number, [Turn("user", text)], max_tokens, 1.0, 1.0, seed)


@torch.no_grad()
@pytest.mark.parametrize(("settings", "rule"), [({}, "off"), (ADAPTER, "off"), (ADAPTER, "noloco")])
def test_saved_policy_is_the_trained_one(tmp_path, settings, rule) -> None:
    config = configured(tmp_path, settings, rule)
    trained = saved_policy(config)
    opened, step = open_policy(opening(config))
    assert step == 7
    expected = trained.model(input_ids=IDS).logits
    assert torch.allclose(opened.model(input_ids=IDS).logits, expected, atol=1e-4)
    base, step = open_policy(opening(configured(tmp_path), saved=False))
    assert step is None
    assert not torch.allclose(base.model(input_ids=IDS).logits, expected, atol=1e-2)


def test_missing_state_names_the_remedies(tmp_path) -> None:
    with pytest.raises(Unavailable, match=r"no saved policy in .*--before"):
        open_policy(opening(configured(tmp_path)))


def test_policy_must_fit_beside_what_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda _: 2**20)
    with pytest.raises(DeviceError, match=r"to answer, cpu has 0.0 GiB free: stop the node"):
        open_policy(opening(configured(tmp_path), saved=False))


def test_pieces_are_the_text_that_generate_samples(policy) -> None:
    *pieces, end = answer(policy, question())
    prompt = policy.encode_prompt("2+3=")
    (group,) = generate(policy, [prompt], Sampling(1, 8), policy.random_generator(3))
    (sampled,) = group.completions
    assert "".join(piece.text for piece in pieces) == sampled.text
    finish = "stop" if sampled.finish == "eos" else "length"
    assert end == End(1, finish, len(prompt), len(sampled.ids))


def test_a_tiny_temperature_is_greedy(policy) -> None:
    tiny = Question(1, [Turn("user", "2+3=")], 8, 1e-40, 1.0)
    greedy = Question(1, [Turn("user", "2+3=")], 8, 0.0, 1.0)
    assert list(answer(policy, tiny)) == list(answer(policy, greedy))


def test_a_character_of_several_tokens_is_one_piece(policy, monkeypatch) -> None:
    texts = iter(["a", "a\ufffd", "a\ufffd", "aé", "aé"])
    monkeypatch.setattr(type(policy), "decode", lambda *_: next(texts))
    monkeypatch.setattr("swarmnode.talk.child.stream", lambda *_: iter([1, 2, 3, 4]))
    *pieces, end = answer(policy, question())
    assert [piece.text for piece in pieces if piece.text] == ["a", "é"]
    assert end.completion_tokens == 4


def test_a_prompt_beyond_the_context_is_refused(policy) -> None:
    (end,) = answer(policy, question(text="2+3=" * 10_000))
    assert end.finish == ""
    assert "leaves no room for an answer" in end.error


def test_questions_are_answered_in_turn_and_stopped(policy) -> None:
    long = {"text": "2+3=", "max_tokens": 64}
    received = [question(1, **long), question(2, seed=4, **long)]
    sent = []

    def receive(wait):
        if received:
            return received.pop(0)
        if not wait and len(sent) < 3:
            raise queue.Empty
        return None

    with torch.no_grad():
        serve(policy, receive, lambda line: sent.append(from_child(line)))
    assert {part.id for part in sent[:3] if isinstance(part, Piece)} == {1, 2}

    stopped = [question(1, **long), Stop(1), None]
    sent.clear()
    serve(policy, lambda wait: stopped.pop(0), lambda line: sent.append(from_child(line)))
    assert sent == [End(1, "", 0, 0)]


def test_conversation_has_the_models_template(policy) -> None:
    one = policy.encode_turns([{"role": "user", "content": "2+3="}])
    assert one == policy.encode_prompt("2+3=")
    turns = [
        {"role": "user", "content": "2+3="},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "4+4="},
    ]
    text = policy.tokenizer.decode(policy.encode_turns(turns))
    assert text == policy.tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    ends = policy.tokenizer.eos_token
    quoted = policy.encode_turns([{"role": "user", "content": f"say {ends}"}])
    assert quoted.count(policy.eos_id) == one.count(policy.eos_id)


def test_system_prompt_of_the_swarm_or_of_the_conversation(policy, monkeypatch) -> None:
    shows_all = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"
    monkeypatch.setattr(policy.tokenizer, "chat_template", shows_all)
    asked = {"role": "user", "content": "2+3="}
    agreed = replace(policy, chat=Chat("add"))
    shown = lambda *turns: policy.tokenizer.decode(agreed.encode_turns(turns))
    assert shown(asked) == "s:add u:2+3= "
    assert shown({"role": "system", "content": "sum"}, asked) == "s:sum u:2+3= "

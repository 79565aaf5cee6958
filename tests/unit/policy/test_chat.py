"""The conversation around a question: system prompt and template arguments, tested at load and
shared by a swarm."""

from __future__ import annotations

import json
from importlib import resources

import msgspec
import pytest
from transformers import AutoTokenizer

from swarmnode.config import Config, PolicyConfig
from swarmnode.errors import ConfigError, Unavailable
from swarmnode.policy.text import Chat, PolicyText
from swarmnode.swarm import manifest, requirements
from tests.support import manifests

TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<no thoughts>{% endif %}{% endif %}"
)


@pytest.fixture
def tokenizer():
    with resources.as_file(resources.files("swarmnode.policy") / "embedded") as directory:
        loaded = AutoTokenizer.from_pretrained(directory)
    loaded.chat_template = TEMPLATE
    return loaded


def asked(tokenizer, **settings):
    text = PolicyText(tokenizer, b"", b"", 0, frozenset(), 0, 1, chat=Chat.of(settings, tokenizer))
    return tokenizer.decode(text.encode_prompt("3+4?"))


def test_system_prompt_and_arguments_stand_around_every_question(tokenizer) -> None:
    assert asked(tokenizer) == "<user>3+4?\n<assistant>"
    assert asked(tokenizer, system="Be brief.") == "<system>Be brief.\n<user>3+4?\n<assistant>"
    assert asked(tokenizer, system="Be brief.", enable_thinking=False).endswith(
        "<assistant><no thoughts>"
    )
    assert asked(tokenizer, enable_thinking=True) == asked(tokenizer)


def test_settings_of_a_missing_template_are_refused(tokenizer) -> None:
    tokenizer.chat_template = None
    assert asked(tokenizer) == "3+4?"
    with pytest.raises(
        Unavailable, match=r"policy\.chat is set, and policy\.model has no chat template"
    ):
        asked(tokenizer, system="Be brief.")


@pytest.mark.parametrize(
    ("template", "settings", "problem"),
    [
        (
            "{{ raise_exception('System role not supported') }}",
            {"system": "x"},
            "fails with this policy.chat: System role not supported",
        ),
        ("{% if %}", {}, "the chat template of policy.model fails"),
        ("{{ messages[7].content }}", {}, "fails"),
        (
            TEMPLATE,
            {"chat_template": "{{ 7 }}"},
            "chat_template is an argument of apply_chat_template",
        ),
        (
            TEMPLATE,
            {"tokenize": True, "tools": "x"},
            "tokenize, tools is an argument of apply_chat_template",
        ),
    ],
)
def test_failing_template_is_one_line_at_load(tokenizer, template, settings, problem) -> None:
    tokenizer.chat_template = template
    with pytest.raises(Unavailable, match=problem) as raised:
        Chat.of(settings, tokenizer)
    assert "\n" not in str(raised.value)


def founded(chat):
    return manifests.founded(
        config=manifests.CONFIG.model_copy(update={"policy": PolicyConfig(chat=chat)}), models=[]
    )


def test_a_swarm_agrees_on_the_chat_settings() -> None:
    chat = {"system": "Be brief.", "enable_thinking": False}
    opened = founded(chat)
    assert {each.key: json.loads(each.value) for each in opened.manifest.settings}[
        "policy.chat"
    ] == chat
    assert requirements.can_honour(opened.manifest, Config()) == []
    config, changes = manifest.apply_terms(Config(), opened)
    assert config.policy.chat == chat
    assert "policy.chat" in [change.key for change in changes]
    plain = founded({})
    own = Config.model_validate({"policy": {"chat": chat}})
    without = msgspec.structs.replace(plain.manifest, settings=[])
    assert (
        manifest.apply_terms(own, msgspec.structs.replace(plain, manifest=without))[0].policy.chat
        == {}
    )
    assert manifest.apply_terms(own, plain)[0].policy.chat == {}, (
        "members of a swarm without one have none"
    )
    with pytest.raises(ConfigError, match=r"policy\.chat takes \d+ bytes in the manifest, of 1024"):
        founded({"system": "x" * 1100})


def test_a_system_prompt_is_a_text() -> None:
    with pytest.raises(ValueError, match="system, the system prompt, is a text"):
        PolicyConfig(chat={"system": 7})

"""The part of a policy without weights: its tokenizer and its identity. Nodes with a stage hold it
too."""

from __future__ import annotations

import datetime
import functools
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from swarmnode import tool_prompt
from swarmnode.errors import Incompatible, Unavailable

UNUSED_LOGIT = -1e4
"""Logit of an unused id: probability 0 at every temperature up to 100, and finite in 16 bits, so
that entropies are finite."""
SAMPLE_TEXT = (
    "Let's work through it step by step. There are 24 apples; 3/8 of them, i.e. 24 * 3 / 8 = 9,"
    " are green. So 24 - 9 = 15 apples are red, and at $0.35 each they cost 15 * 0.35 = 5.25"
    " dollars.\n\nFirst, note that f(x) = x^2 + 2x + 1 = (x + 1)^2, therefore f(3) = 16. The word"
    ' "backward" spelled backward is "drawkcab".\n<answer>5.25</answer>'
)
"""Typical answer, for measuring the tokenizer's tokens per byte."""


@dataclass(frozen=True)
class Chat:
    """The conversation around a question. All nodes of a swarm use the same."""

    system: str = ""
    arguments: tuple[tuple[str, bool | int | float | str], ...] = ()
    """Arguments of the chat template, by name."""

    @classmethod
    def of(
        cls,
        settings: Mapping[str, bool | int | float | str],
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: frozenset[int] = frozenset(),
    ) -> Chat:
        """Return the conversation of `policy.chat`, after a test of what the template renders.

        Args:
            eos_ids: Tokens at which generation stops. If empty, the end of a turn is not checked.

        Raises:
            Unavailable: The tokenizer has no chat template, or the template fails or loses a part
                of the conversation.
        """
        if not tokenizer.chat_template:
            if settings:
                raise Unavailable(
                    "policy.chat is set, and policy.model has no chat template: use an instruct"
                    " model, or unset it"
                )
            return cls()
        reserved = inspect.signature(tokenizer.apply_chat_template).parameters
        if taken := sorted(name for name in settings if name in reserved):
            raise Unavailable(
                f"policy.chat: {', '.join(taken)} is an argument of apply_chat_template, not of the"
                " template"
            )
        chat = cls(
            str(settings.get("system", "")),
            tuple(sorted((name, value) for name, value in settings.items() if name != "system")),
        )
        try:
            encode_prompt(tokenizer, "What is 3 + 4?", chat)
        except Exception as error:  # a template is a program and may raise anything  # noqa: BLE001
            why = " ".join(str(error).split())[:300] or type(error).__name__
            raise Unavailable(
                f"the chat template of policy.model fails with this policy.chat: {why}"
            ) from None
        if fault := template_fault(tokenizer, chat, eos_ids):
            raise Unavailable(f"the chat template of policy.model {fault}")
        return chat


PROBE = "Which lantern belongs to owl 7,\nif 3 < 4 & \"x\" is 'y'?"
PROBE_SYSTEM = "Otters count in base 12."
PROBE_ANSWER = "The green lantern."
"""Texts with which a chat template is tested. None of them is part of a template."""


def template_fault(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, eos_ids: frozenset[int]
) -> str | None:
    """Return what a chat template loses of a conversation, with the remedy; None if nothing."""
    if _CHANGING.search(_without_clock(tokenizer.get_chat_template())):
        return (
            "shows the date in a computed format or something random, so that nodes would have"
            " different prompts: use a template with strftime_now and a constant format"
        )
    question = {"role": "user", "content": PROBE}
    asked = _render(tokenizer, [question], chat)
    if PROBE not in asked:
        parts = {"role": "user", "content": [{"type": "text", "text": PROBE}]}
        if PROBE in (_try_render(tokenizer, [parts], chat) or ""):
            return (
                "expects a list of content parts and drops a question that is text: use a text"
                " model, or a template that reads message.content as text"
            )
        return "does not show the question as it is: use an instruct model with a working template"
    if chat.system:
        probed = _try_render(tokenizer, [question], replace(chat, system=PROBE_SYSTEM))
        if PROBE_SYSTEM not in (probed or ""):
            return "drops policy.chat.system: unset it, and write its text into the questions"
    for name, value in chat.arguments:
        if not _has_effect(tokenizer, chat, name, value):
            return f"does not depend on the argument {name} of policy.chat: remove it"
    answer = {"role": "assistant", "content": PROBE_ANSWER}
    whole = _try_render(tokenizer, [question, answer], chat, answer=False)
    if whole is None or whole.count(PROBE_ANSWER) != 1:
        return None  # a template for a single question
    before, _, after = whole.partition(PROBE_ANSWER)
    open_end = _try_render(tokenizer, [question], chat, answer=False)
    # Mistral's template needs no generation prompt: an answer follows the question directly.
    if asked == open_end and before.rstrip() != asked.rstrip():
        return (
            "ignores add_generation_prompt, so that the policy would write the start of its turn"
            f" ({before.removeprefix(asked)[:40]!r}): use a template that writes it"
        )
    end = tokenizer(after.strip(), add_special_tokens=False)["input_ids"]
    if eos_ids and end and eos_ids.isdisjoint(end):
        names = ", ".join(sorted(str(tokenizer.decode([each])) for each in eos_ids))
        token = next((each for each in end if each in tokenizer.added_tokens_decoder), None)
        remedy = (
            "use a model whose turns end with a token"
            if token is None
            else f"add that token ({token}) to eos_token_id in generation_config.json"
        )
        return (
            f"ends a turn with {after.strip()[:40]!r}, and generation stops only at {names}:"
            f" {remedy}"
        )
    return None


def _has_effect(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, name: str, value: bool | int | float | str
) -> bool:
    """Return True if an argument changes a conversation.

    An argument may have its default value, so that its absence changes nothing: another value is
    tried as well. It may affect only earlier thoughts, or only tools.
    """
    other: bool | float | str
    if isinstance(value, str):
        other = f"{value}1"
    else:
        other = not value if isinstance(value, bool) else value + 1
    rest = tuple(each for each in chat.arguments if each[0] != name)
    question = {"role": "user", "content": PROBE}
    thought = {"role": "assistant", "content": f"<think>\nGreen.\n</think>\n\n{PROBE_ANSWER}"}
    return any(
        _try_render(tokenizer, turns, chat, tools)
        != _try_render(tokenizer, turns, replace(chat, arguments=arguments), tools)
        for turns, tools in (
            ([question], []),
            ([question, thought, question], []),
            ([question], [TOOL]),
        )
        for arguments in (rest, (*rest, (name, other)))
    )


def _try_render(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[dict[str, Any]],
    chat: Chat,
    tools: Sequence[dict[str, Any]] = (),
    answer: bool = True,
) -> str | None:
    """Return `_render`; None if the template refuses such a conversation."""
    try:
        return _render(tokenizer, turns, chat, tools, answer)
    except Exception:  # a template is a program and may raise anything  # noqa: BLE001
        return None


class PromptTooLong(Unavailable):
    """Raised for a question that leaves no room for an answer in the model's context."""


@dataclass(frozen=True)
class PolicyText:
    """Text to token ids and back."""

    tokenizer: PreTrainedTokenizerBase
    fingerprint: bytes
    """32 bytes: architecture and base weights."""
    tokenizer_hash: bytes
    """32 bytes."""
    eos_id: int
    """Ends a completion."""
    eos_ids: frozenset[int]
    """All tokens at which generation stops; chat models have several."""
    pad_id: int
    """Padding id. It is masked everywhere, so that any valid id works."""
    vocab_size: int
    """Size of the vocabulary that model and tokenizer share; see `vocabulary`."""
    chat: Chat = field(default=Chat(), kw_only=True)
    """Conversation around every question."""
    context: int | None = field(default=None, kw_only=True)
    """Largest number of tokens of a prompt with its answer; None if the model has no limit."""
    unused_ids: frozenset[int] = field(default=frozenset(), kw_only=True)
    """Ids below `vocab_size` without a token in the tokenizer. They are never sampled."""

    @property
    def tokens_per_text_byte(self) -> float:
        """Approximate number of this tokenizer's tokens per byte of text."""
        return len(
            self.tokenizer(SAMPLE_TEXT, add_special_tokens=False, verbose=False)["input_ids"]
        ) / len(SAMPLE_TEXT.encode())

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return the token ids of a question. With a chat template they are the system turn if
        there is one, the user turn, and the start of the answer; otherwise those of the text."""
        return list(encode_prompt(self.tokenizer, prompt, self.chat))

    def encode_turns(self, turns: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a conversation, up to the start of the next answer. A first turn
        of the role `system` replaces the system prompt. Names of special tokens are encoded as
        text.

        Args:
            turns: Role and content of each turn.

        Raises:
            Incompatible: The chat template refuses the conversation.
        """
        chat = self.chat
        if turns and turns[0]["role"] == "system":
            chat, turns = replace(chat, system=turns[0]["content"]), turns[1:]
        if not self.tokenizer.chat_template:
            return self.encode_prompt("\n".join(turn["content"] for turn in turns))
        try:
            text = _render(self.tokenizer, mark_special(self.tokenizer, turns), chat)
        except Exception as error:  # a template is a program and may raise anything  # noqa: BLE001
            raise Incompatible(f"the chat template refuses these messages: {error}") from None
        return encode_marked(self.tokenizer, text)

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the ids that a completion follows: those of a question, or `prompt` itself if it
        is ids.

        An episode in progress is given as ids.
        """
        return self.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)

    def observation_ids(self, observation: str, last_id: int, tools: bool = False) -> list[int]:
        """Return the ids between two actions of an episode.

        They are the observation and the text of the chat template around it, including the start of
        the next action.

        Args:
            observation: Text from the environment. Names of special tokens in it are encoded as
                text.
            last_id: Last token of the previous action.
            tools: True if the episode's prompt has tools (`has_tools`).

        Raises:
            Unavailable: The chat template cannot be used for episodes.
        """
        encode = lambda text, **how: list(
            self.tokenizer(text, add_special_tokens=False, **how)["input_ids"]
        )
        before, after = around_observations(self.tokenizer, self.chat, tools)
        head = encode(before)
        if head[:1] == [last_id]:  # the policy already sampled the end of its turn
            head = head[1:]
        return [*head, *encode(observation, split_special_tokens=True), *encode(after)]

    def has_tools(self, prompt: str) -> bool:
        """Return True if the chat template shows the tools of a first text: observations are then
        the results of tools."""
        first = tool_prompt.split(prompt)
        return bool(first.tools) and shows_tools(self.tokenizer, self.chat, first.form)

    def room(self, prompt_ids: Sequence[int], wanted: int) -> int:
        """Return the number of answer tokens that fit after a prompt, at most `wanted`.

        Raises:
            PromptTooLong: None fits.
        """
        room = wanted if self.context is None else min(wanted, self.context - len(prompt_ids))
        if room < 1:
            raise PromptTooLong(
                f"a prompt of {len(prompt_ids):,} tokens leaves no room for an answer in the"
                f" model's context of {self.context:,} tokens"
            )
        return room

    def fits(self, prompt: str) -> bool:
        """Return True if a question leaves room for an answer in the model's context."""
        return self.context is None or len(self.encode_prompt(prompt)) < self.context

    def known_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits (…, V) of the model's logits (…, rows). An id without a token in the
        tokenizer has probability 0. Sampling and scoring both call this, so that they agree."""
        known = logits[..., : self.vocab_size]
        if not self.unused_ids:
            return known
        return known.index_fill(-1, _index(self.unused_ids, logits.device), UNUSED_LOGIT)

    def decode(self, ids: list[int]) -> str:
        """Return the text of completion ids, which is scored and sent to peers.

        Tokens that stand for no text are omitted. All other special tokens are spelled out, such as
        those that open a channel, a tool call or another turn.
        """
        silent = silent_ids(self.tokenizer, self.eos_ids)
        shown = [i for i in ids if i not in silent]
        return str(self.tokenizer.decode(shown, skip_special_tokens=False))

    def word_ids(self, text: str) -> set[int]:
        """Return the token ids of a text's words, numbers and punctuation marks, each at the start
        of a text and behind a space."""
        words = set(re.findall(r"[^\W_]+|[^\w\s]+|_+", text))
        spelled = [form for word in words for form in (word, f" {word}")]
        if not spelled:
            return set()
        found = self.tokenizer(spelled, add_special_tokens=False, split_special_tokens=True)
        return {token for ids in found["input_ids"] for token in ids}

    def token_name(self, token: int) -> str:
        """Return the text of a token, or the name of one without text, such as `<|im_end|>`."""
        return self.decode([token]) or str(self.tokenizer.convert_ids_to_tokens(token))

    def hides(self, ids: list[int]) -> bool:
        """Return True if completion ids contain a token that `decode` does not show, other than the
        end."""
        silent = silent_ids(self.tokenizer, self.eos_ids)
        return any(i in silent for i in (ids[:-1] if ids and ids[-1] in self.eos_ids else ids))

    def tokenize_completion(self, text: str, finish: str) -> list[int]:
        """Return the ids of a peer's completion, with EOS appended if `finish` is "eos".

        Names of special tokens in the text are encoded as text.

        Raises:
            Incompatible: The tokenizer cannot represent the text.
        """
        ids = list(
            self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        )
        unknown = self.tokenizer.unk_token_id
        if unknown is not None and unknown in ids:
            raise Incompatible("the tokenizer has no token for part of the text")
        ids = [*ids, self.eos_id] if finish == "eos" else ids
        return self.check_ids(ids)

    def check_ids(self, ids: list[int]) -> list[int]:
        """Return `ids` of a peer if they are valid.

        Raises:
            Incompatible: There are no ids, or an id is outside of the vocabulary, where the
                embedding would read out of bounds.
        """
        if (
            not ids
            or min(ids) < 0
            or max(ids) >= self.vocab_size
            or not self.unused_ids.isdisjoint(ids)
        ):
            raise Incompatible(f"token ids are not {self.vocab_size} tokens' ids")
        return ids


EPISODE = (
    ("<think>\nThe goal is to the right.\n</think>\n\n", "right", "You see ice."),
    ("<think>\nNow down.\n</think>\n\n", "down", "You fell."),
)
"""Thoughts, actions and observations with which a chat template is tested."""
OPENS_THOUGHT, ENDS_THOUGHT = "<think>\n", "</think>\n\n"
"""Texts with which a template may end; the policy then writes the rest."""
TOOL_CALL: dict[str, Any] = {"name": "look_at", "arguments": {"place": "left", "distance": 7}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_at",
        "description": "Look at a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Where."},
                "distance": {"type": "integer", "description": "How far."},
            },
            "required": ["place", "distance"],
        },
    },
}
"""A call and its tool with which a chat template is tested."""


@functools.lru_cache(maxsize=8)
def around_observations(
    tokenizer: PreTrainedTokenizerBase, chat: Chat = Chat(), tools: bool = False
) -> tuple[str, str]:
    """Return the texts that the chat template puts before and after an observation.

    Without a template, they are line breaks.

    Args:
        tools: Observations are the results of tools (`shows_tools`), else turns of the user.

    Raises:
        Unavailable: The template changes earlier turns once a later turn exists. The policy would
            then be trained on other ids than those that it sampled from.
    """
    if not tokenizer.chat_template:
        return "\n", "\n"
    found = _around(tokenizer, chat, [TOOL] if tools else [])
    if found is None:
        raise Unavailable(
            "the chat template of policy.model changes earlier turns of a conversation (it strips"
            " thinking, or starts an answer otherwise), so that episodes cannot be trained on: set"
            " the template's argument that keeps them in policy.chat, such as preserve_thinking ="
            " true or clear_thinking = false, or take an instruct model that does not think"
        )
    return found


def _around(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, tools: list[dict[str, Any]]
) -> tuple[str, str] | None:
    """Return the texts before and after an observation, None if a later turn changes earlier
    ones."""
    turns = [{"role": "user", "content": "Where is the goal?"}]
    shown = [_render(tokenizer, turns, chat, tools)]
    episode = list[tuple[str, str]]()
    for thought, answer, observation in EPISODE:
        opened = OPENS_THOUGHT if shown[0].endswith(OPENS_THOUGHT) else ""
        thinks = not shown[0].endswith(ENDS_THOUGHT)
        episode.append((thought.removeprefix(opened) + answer if thinks else answer, observation))
    for action, observation in episode:
        turns += [
            {"role": "assistant", "content": action},
            {"role": "tool" if tools else "user", "content": observation},
        ]
        shown.append(_render(tokenizer, turns, chat, tools))
    (first, observation), (second, last) = episode
    before, found, after = shown[1].removeprefix(shown[0] + first).partition(observation)
    appended = shown[1] + second + before + last + after
    appends = shown[1].startswith(shown[0] + first) and bool(found) and shown[2] == appended
    return (before, after) if appends else None


@functools.lru_cache(maxsize=8)
def shows_tools(
    tokenizer: PreTrainedTokenizerBase, chat: Chat = Chat(), form: str = tool_prompt.FORM
) -> bool:
    """Return True if the chat template can show the tools of an episode and their results.

    Otherwise the model reads them as the text that `tool_prompt.describe` wrote. The template has
    to

    * show tools, and add results to a conversation without changing earlier turns;
    * write a call in the form that the environments of all members read. A receiver replays the
      text of a call, and its model may be of another family, so the form is part of the task and
      not of a model.

    Args:
        form: Response template of the task, as JSON. Another than the usual one is not compiled
            here unless it is the tokenizer's own, because a stranger may have written its patterns.
    """
    trusted = form == tool_prompt.FORM or form == json.dumps(tokenizer.response_template)
    if not tokenizer.chat_template or not trusted:
        return False
    question = [{"role": "user", "content": "Where is the goal?"}]
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": TOOL_CALL}],
    }
    try:
        asked = _render(tokenizer, question, chat, [TOOL])
        if TOOL_CALL["name"] not in asked or _around(tokenizer, chat, [TOOL]) is None:
            return False
        written = _render(tokenizer, [*question, call], chat, [TOOL], answer=False)
    except Exception:  # a template is a program and may raise anything  # noqa: BLE001
        return False
    if not written.startswith(asked):
        return False
    try:
        template = load_response_template(json.loads(form))
        parsed = parse_response(written.removeprefix(asked), template, prefix="", tools=[TOOL])
    except (ValueError, TypeError):
        return False
    return [each["function"] for each in parsed.get("tool_calls") or []] == [TOOL_CALL]


@functools.lru_cache(maxsize=8192)  # evaluations repeat the same questions
def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, chat: Chat = Chat()
) -> tuple[int, ...]:
    if not tokenizer.chat_template:
        return tuple(
            _without_end(tokenizer, tokenizer(prompt, split_special_tokens=True)["input_ids"])
        )
    first = tool_prompt.split(prompt)
    if first.tools and not shows_tools(tokenizer, chat, first.form):
        first = tool_prompt.FirstText(prompt)
    question = {"role": "user", "content": first.question}
    turns, tools = (mark_special(tokenizer, each) for each in ([question], list(first.tools)))
    return tuple(encode_marked(tokenizer, _render(tokenizer, turns, chat, tools)))


MARK = "\ue000"
"""Stands before and after the name of a special token in text that is not the template's."""


@functools.lru_cache(maxsize=8)
def _special_names(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a pattern that matches the names of special tokens."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    names = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
    return "|".join(re.escape(name) for name in names if name) or r"(?!)"


def mark_special(tokenizer: PreTrainedTokenizerBase, value: Any) -> Any:  # noqa: ANN401
    """Return JSON with a MARK around every name of a special token in its texts and keys."""
    if isinstance(value, str):
        return re.sub(_special_names(tokenizer), lambda name: f"{MARK}{name[0]}{MARK}", value)
    if isinstance(value, Mapping):
        return {
            mark_special(tokenizer, key): mark_special(tokenizer, each)
            for key, each in value.items()
        }
    if isinstance(value, Sequence):
        return [mark_special(tokenizer, each) for each in value]
    return value


def encode_marked(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a rendered conversation. A marked name is encoded as text."""
    parts = re.split(f"{MARK}({_special_names(tokenizer)}){MARK}", text)
    return [
        i
        for number, part in enumerate(parts)
        if part
        for i in tokenizer(part, add_special_tokens=False, split_special_tokens=number % 2 == 1)[
            "input_ids"
        ]
    ]


def _without_end(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Return the ids without end tokens that the tokenizer appended (`add_eos_token`): the policy
    would see a question as a finished text."""
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id}
    while len(ids) > 1 and ids[-1] in ends:
        ids = ids[:-1]
    return ids


TEMPLATE_DATE = datetime.date(2024, 7, 26)
"""Date that chat templates show, since nodes with other prompts could not check each other's
answers. It is the date that Llama 3's template falls back to."""


_CHANGING = re.compile(r"strftime_now(?!\s+is\b)|\|\s*random\b|\blipsum\s*\(")
"""Parts of a template that depend on a clock or on chance."""
NOW = re.compile(r"""strftime_now\s*\(\s*(?:format\s*=\s*)?(["'])([^"'\\\n]*)\1\s*\)""")


def _without_clock(template: str) -> str:
    """Return a chat template that shows TEMPLATE_DATE in place of the present."""
    return NOW.sub(lambda call: json.dumps(TEMPLATE_DATE.strftime(call[2])), template)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[dict[str, Any]],
    chat: Chat,
    tools: Sequence[dict[str, Any]] = (),
    answer: bool = True,
) -> str:
    """Render the conversation with the model's chat template, up to the start of an answer."""
    system = [{"role": "system", "content": chat.system}] if chat.system else []
    arguments = dict[str, Any](chat.arguments)  # no parameter of the method, see `Chat.of`
    if tools:
        arguments["tools"] = list(tools)
    template = tokenizer.get_chat_template(tools=arguments.get("tools"))
    return str(
        tokenizer.apply_chat_template(
            [*system, *turns],
            chat_template=_without_clock(template),
            add_generation_prompt=answer,
            tokenize=False,
            **arguments,
        )
    )


@functools.lru_cache(maxsize=8)  # a decoding step that is recorded must not copy to the device
def _index(ids: frozenset[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(sorted(ids), device=device)


def vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int) -> tuple[int, frozenset[int]]:
    """Return the size of the vocabulary that a model and its tokenizer share, and its unused ids.

    Many models have more rows than their tokenizer has tokens, for speed. Their logits exist, and a
    random or barely trained model samples them.

    Args:
        rows: Number of rows of the model's embedding.
    """
    used = {i for i in tokenizer.get_vocab().values() if i < rows}
    size = max(used, default=-1) + 1
    return size, frozenset(range(size)) - used


SILENT_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens that a tokenizer names by their purpose and that stand for no text."""


@functools.lru_cache(maxsize=64)
def silent_ids(
    tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int] = frozenset()
) -> frozenset[int]:
    """Return the ids of special tokens that stand for no text: begin, end, padding, unknown."""
    special = frozenset(tokenizer.all_special_ids) | {
        i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    named = {getattr(tokenizer, f"{name}_token_id", None) for name in SILENT_TOKENS}
    return special & (named | eos_ids)

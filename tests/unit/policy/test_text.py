"""Length of other tokenizers' text in tokens of this tokenizer."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from swarmnode.policy.text import SAMPLE_TEXT, PolicyText
from swarmnode.rollouts.network.admission import LONGEST_FACTOR

PROSE = (
    "To find how many red apples there are, we take the 24 apples that were bought and leave out"
    " the green ones. " * 40
)


@pytest.fixture(scope="module")
def text():
    """Return a byte-level BPE with some hundred merges; real models have a hundred thousand."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    words = [SAMPLE_TEXT, PROSE]
    core.train_from_iterator(
        words,
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    return PolicyText(tokenizer, b"m" * 32, b"t" * 32, 0, frozenset({0}), 0, len(tokenizer))


def test_estimates_token_count_for_another_tokenizer(text):
    answer = PROSE[:1126]
    really = len(text.tokenize_completion(answer, "length"))
    estimated = len(answer.encode()) * text.tokens_per_text_byte
    assert really < 400
    assert really / 2 < estimated < really * LONGEST_FACTOR / 2, (
        "an honest answer of our own length is never `too_long`"
    )

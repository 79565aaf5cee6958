"""Model rows without a token are neither sampled nor counted."""

import math
import string

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swarmnode.config import PolicyConfig
from swarmnode.errors import Incompatible
from swarmnode.policy.generate import Sampling
from swarmnode.policy.load import load_policy
from swarmnode.policy.logprobs import (
    WAYS,
    collate,
    logprobs_by,
    score_with_entropy,
    splits_head,
    takes_way,
)
from swarmnode.stages.trainer.stage_model import StageRuntime
from tests.support.gaps import rows_of, sampled_by
from tests.support.model_zoo import build
from tests.support.split_models import split_model

PROMPTS = ["3 + 4?", "Add 12 to 30, please."]
HOLES = frozenset({20, 21, 22, 60})
ROWS = 512


def tokenizer(holes):
    """A tokenizer of characters, with unused token ids in between."""
    tokens = ["<pad>", "<eos>", "<unk>", *filter(str.isprintable, string.printable)]
    free = iter(i for i in range(ROWS) if i not in holes)
    core = Tokenizer(models.WordLevel({t: next(free) for t in tokens}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture(scope="module", params=[frozenset(), HOLES], ids=["padded", "with holes"])
def policy(request, tmp_path_factory):
    """Four of five rows have no token."""
    directory = tmp_path_factory.mktemp("padded")
    build("qwen2", directory, tokenizer(request.param), rows=ROWS)
    return load_policy(PolicyConfig(model=str(directory), devices="cpu"))


@pytest.mark.parametrize("kind", ["lockstep", "continuous"])
def test_every_way_scores_what_was_sampled(policy, kind):
    groups = sampled_by(kind, policy, PROMPTS, Sampling(8, 12, 0.9), seed=1)
    rows = rows_of(groups)
    known = set(policy.tokenizer.get_vocab().values())
    for _, ids in rows:
        assert known.issuperset(ids), "only ids with a token are sampled"
        assert policy.check_ids(ids) == ids
    recorded = [x for group in groups for each in group.completions for x in each.logprobs]
    batch = collate(rows, policy.pad_id, policy.device)
    for way in WAYS:
        assert takes_way(policy, way)
        for piece in (None, 7):
            with torch.no_grad():
                found, entropy = logprobs_by(way, policy, batch, 0.9, piece)
            assert found[batch.completion_mask].tolist() == pytest.approx(recorded, abs=1e-4)
            assert bool(torch.isfinite(entropy).all())
    assert splits_head(policy)


def test_entropy_is_of_the_tokens_that_exist(policy):
    (_, spread) = score_with_entropy(policy, [(policy.encode_prompt("?"), [30, 31])], 100.0)[0]
    known = len(policy.tokenizer.get_vocab())
    assert spread == pytest.approx([math.log(known)] * 2, abs=0.02)


def test_an_unused_id_of_a_peer_is_refused(policy):
    for wrong in [*policy.unused_ids, policy.vocab_size, ROWS - 1]:
        with pytest.raises(Incompatible):
            policy.check_ids([5, wrong])


def test_a_crew_gives_the_same_probabilities(policy):
    row = (policy.encode_prompt("What?"), [30, 31, 32, 1])
    batch = collate([row], policy.pad_id)
    first, last = [
        StageRuntime(spec, stage, known_logits=policy.known_logits)
        for spec, stage in split_model(policy.base, [1, 1])
    ]
    found, spread = last.score(batch, first.forward(batch, None), 1.0)
    ((logprobs, entropy),) = score_with_entropy(policy, [row], 1.0)
    assert found[0].tolist() == pytest.approx(logprobs, abs=1e-4)
    assert spread[0].tolist() == pytest.approx(entropy, abs=1e-4)

"""The gradient of a batch equals that of a real GRPOTrainer of TRL; advantages are in
`test_update_exact.py`.

TRL has no old log-probabilities, as for a batch that gives one step: its ratio is 1. Its loss is
then another number than ours, with the same gradient."""

import copy

import pytest
import torch

from swarmnode.rl.advantages import advantages
from swarmnode.rl.objectives import Objective, policy_loss

trl = pytest.importorskip("trl")

PAD, EOS = 0, 1
LENGTH = 7


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": PAD, "</s>": EOS} | {f"w{i}": i for i in range(2, 32)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", padding_side="left"
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        initializer_range=0.5,
    )
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(folder)
    # with beta > 0, GRPOTrainer loads its reference from where the model came from
    return LlamaForCausalLM.from_pretrained(folder)


def grpo_trainer(base, tokenizer, folder, **settings):
    from datasets import Dataset

    args = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=LENGTH,
        temperature=1.0,
        disable_dropout=True,
        logging_strategy="no",
        save_strategy="no",
        **settings,
    )
    trainer = trl.GRPOTrainer(
        model=copy.deepcopy(base),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w2 w3"] * 8}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1  # what Trainer.train sets before the first step
    trainer.model.train()
    return trainer


@pytest.fixture(scope="module")
def batch(base):
    """Two groups of four with prompts and completions of different lengths; the reference policy is
    elsewhere."""
    generator = torch.Generator().manual_seed(1)
    rows = 8
    prompt_length = torch.tensor([3, 3, 3, 3, 5, 5, 5, 5])
    completion_length = torch.tensor([7, 1, 4, 2, 6, 7, 3, 5])
    prompt_mask = (torch.arange(5).flip(0) < prompt_length.unsqueeze(1)).long()  # left padding
    completion_mask = (torch.arange(LENGTH) < completion_length.unsqueeze(1)).long()
    ids = torch.randint(2, 32, (rows, 5 + LENGTH), generator=generator)
    prompt_ids = ids[:, :5].masked_fill(prompt_mask == 0, PAD)
    completion_ids = ids[:, 5:].masked_fill(completion_mask == 0, PAD)
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "num_items_in_batch": completion_mask.sum(),
    }
    with torch.no_grad():
        now = completion_logprobs(base, inputs)
    inputs["ref_per_token_logps"] = now + torch.randn(rows, LENGTH, generator=generator) * 0.5
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.25, 0.0, 0.5, 0.0]])
    inputs["advantages"] = advantages(rewards).flatten()
    return inputs


def completion_logprobs(model, inputs):
    """Return (N, T) computed from the logits alone, without code of TRL or swarmnode."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -LENGTH - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


MODES = [
    dict(loss_type="dapo"),
    dict(loss_type="grpo"),
    dict(loss_type="dr_grpo"),
    dict(loss_type="bnpo"),
    dict(loss_type="dapo", beta=0.05),
    dict(loss_type="grpo", beta=0.3),
    dict(loss_type="dr_grpo", beta=0.1),
]


@pytest.mark.parametrize("mode", MODES, ids=lambda m: ",".join(f"{k}={v}" for k, v in m.items()))
def test_the_gradient_equals_trls(mode, base, tokenizer, batch, tmp_path):
    settings = {"beta": 0.0} | mode
    trainer = grpo_trainer(base, tokenizer, tmp_path, **settings)
    trainer.compute_loss(trainer.model, batch).backward()

    model = copy.deepcopy(base)
    # of one batch they are both that
    token_mean = {"loss_type": settings["loss_type"].replace("bnpo", "dapo")}
    objective = Objective(**settings | token_mean, max_completion_length=LENGTH)
    ours = policy_loss(
        completion_logprobs(model, batch),
        batch["advantages"],
        batch["completion_mask"],
        objective,
        objective.normalizer(batch["completion_mask"].sum(1).tolist()),
        ref_logprobs=batch["ref_per_token_logps"],
    )
    ours.loss.backward()

    assert flat_gradient(model).norm() > 1e-2
    assert torch.allclose(flat_gradient(model), flat_gradient(trainer.model), atol=1e-4)
    if settings["beta"] > 0:
        kl = trainer._metrics["train"]["kl"][0]
        assert ours.kl.item() == pytest.approx(kl, abs=1e-4)

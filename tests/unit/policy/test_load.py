"""Loading of all kinds of models, with one line for each possible problem."""

import json
import shutil
from dataclasses import replace

import httpx
import pytest
import torch
from huggingface_hub.errors import GatedRepoError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaForCausalLM, MllamaConfig

from swarmnode.config import LoraSettings, PolicyConfig
from swarmnode.errors import DeviceError, Incompatible, StateError, Unavailable
from swarmnode.policy import device, load
from swarmnode.policy.fingerprint import fingerprint, tokenizer_hash
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy, name_modules, overwrite, trainable
from swarmnode.policy.logprobs import score
from swarmnode.policy.published import published_shape
from swarmnode.stages.trainer.stage_model import find_unused

ROWS = [([5, 9, 20], [30, 31, 1])]


@pytest.fixture
def llama(tmp_path, model_dir):
    """Return a copy that the test may damage."""
    return shutil.copytree(model_dir("llama"), tmp_path / "llama")


def cpu(directory, **more):
    return PolicyConfig(model=str(directory), devices="cpu", **more)


def edit_config(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# --- existing models


def test_a_tokenizer_without_padding_token_is_padded_with_eos(llama):
    path = llama / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["pad_token"]
    path.write_text(json.dumps(settings))
    policy = load_policy(cpu(llama))
    assert policy.pad_id == policy.eos_id
    prompts = ["1", "Calculate 1 + 2."]
    assert len(generate(policy, prompts, Sampling(2, 3), policy.random_generator(0))) == 2


def test_adapter_can_be_bypassed(llama):
    policy = load_policy(cpu(llama, lora=LoraSettings(r=4)))
    s = policy.statistics()
    assert 0 < s.trainable_parameters < s.parameters / 4 * 3
    base = score(policy, ROWS, 1.0)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.05)
    assert score(policy, ROWS, 1.0) != base
    assert score(replace(policy, adapter_off=True), ROWS, 1.0) == base
    assert policy.fingerprint == load_policy(cpu(llama)).fingerprint


@pytest.mark.parametrize("rank", [0, 4])
def test_trained_weights_are_float32_and_others_bfloat16(llama, rank, precision_restored):
    policy = load_policy(cpu(llama, dtype="bfloat16", lora=LoraSettings(r=rank)))
    assert policy.dtype == torch.bfloat16
    assert {p.dtype for p in policy.trainable_parameters()} == {torch.float32}
    frozen = {p.dtype for p in policy.model.parameters() if not p.requires_grad}
    assert frozen == ({torch.bfloat16} if rank else set())


def test_saved_weights_come_back(embedded):
    one, other = embedded.clone(), embedded.clone()
    with torch.no_grad():
        one.trainable_parameters()[0].add_(0.1)
    overwrite(trainable(other.model), trainable(one.model))
    assert score(one, ROWS, 1.0) == score(other, ROWS, 1.0)


def test_saved_weights_of_another_policy_are_refused(embedded, policies):
    with pytest.raises(StateError, match="another policy"):
        overwrite(trainable(embedded.model), trainable(policies["llama"].model))


# --- peers' text and ids


def test_peer_text_gets_eos_if_it_ended(embedded):
    assert embedded.decode(embedded.tokenize_completion("12", "length")) == "12"
    assert embedded.tokenize_completion("12", "eos") == [
        *embedded.tokenize_completion("12", "length"),
        embedded.eos_id,
    ]


def test_special_tokens_spelled_out_stay_text(embedded):
    ids = embedded.tokenize_completion("1<eos>2<reply>", "length")
    assert embedded.eos_id not in ids
    assert embedded.decode(ids) == "1<eos>2<reply>"


@pytest.mark.parametrize("text", ["1²", "\x00"])
def test_text_that_the_tokenizer_cannot_say_is_refused(embedded, text):
    with pytest.raises(Incompatible):
        embedded.tokenize_completion(text, "eos")


@pytest.mark.parametrize("ids", [[], [-1], [5, 2**31], [115]])
def test_ids_outside_the_vocabulary_are_refused(embedded, ids):
    with pytest.raises(Incompatible):
        embedded.check_ids(ids)


# --- identity


def test_fingerprint_does_not_depend_on_sharding(llama, policies):
    tensors = load_file(llama / "model.safetensors")
    names = sorted(tensors)
    (llama / "model.safetensors").unlink()
    parts = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, llama / file)
    index = {"metadata": {}, "weight_map": {n: file for file, part in parts.items() for n in part}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fingerprint(llama) == policies["llama"].fingerprint
    assert load_policy(cpu(llama)).fingerprint == policies["llama"].fingerprint


def test_fingerprint_is_of_architecture_and_weights(llama):
    before = fingerprint(llama)
    edit_config(llama, transformers_version="9.9.9", use_cache=False, _name_or_path="somewhere")
    assert fingerprint(llama) == before
    edit_config(llama, rms_norm_eps=1e-5)
    another = fingerprint(llama)
    assert another != before
    tensors = load_file(llama / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-6
    save_file(tensors, llama / "model.safetensors")
    assert fingerprint(llama) not in (before, another)


def test_tokenizer_hash_covers_only_the_mapping(plain_tokenizer_dir, policies):
    policy = load_policy(cpu(plain_tokenizer_dir))
    plain = policy.tokenizer_hash
    assert plain != policies["gpt2"].tokenizer_hash  # the chat template is part of every prompt
    policy.tokenizer(["1", "22"], padding=True, truncation=True, max_length=1)
    assert tokenizer_hash(policy.tokenizer) == plain
    policy.tokenizer.add_tokens(["forty-two"])
    assert tokenizer_hash(policy.tokenizer) != plain


# --- missing models


def test_a_hub_name_without_network_is_one_line(offline):
    with pytest.raises(
        Unavailable, match="not in the local cache, and HF_HUB_OFFLINE is set"
    ) as caught:
        load_policy(PolicyConfig(model="nobody/nothing-at-all"))
    assert "\n" not in str(caught.value)


def test_a_gated_model_names_the_remedy(monkeypatch):
    def read():
        response = httpx.Response(403, request=httpx.Request("GET", "https://example.org"))
        raise GatedRepoError("gated", response=response)

    with pytest.raises(Unavailable, match="accept its licence on the Hub, then run `hf auth"):
        load.offline(PolicyConfig(model="owner/gated"), read)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: read())
    with pytest.raises(Unavailable, match="owner/gated: accept its licence"):
        published_shape("owner/gated")


def remove(name):
    return lambda llama: (llama / name).unlink()


def pickled(llama):
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")


def truncated(llama):
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def git_lfs_pointer(llama):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 7\n"
    (llama / "model.safetensors").write_text(pointer)


def only_an_adapter(llama):
    (llama / "config.json").unlink()
    (llama / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def another_shape(llama):
    weights, name = load_file(llama / "model.safetensors"), "model.layers.1.self_attn.q_proj.weight"
    changed = weights | {name: weights[name][:-1].clone()}
    save_file(changed, llama / "model.safetensors", metadata={"format": "pt"})


def edited(**values):
    return lambda llama: edit_config(llama, **values)


NOT_CAUSAL = edited(model_type="qwen3_vl", architectures=["Qwen3VLForConditionalGeneration"])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (remove("config.json"), r"no config\.json"),
        (remove("tokenizer.json"), r"no tokenizer in .*: copy tokenizer\.json"),
        (pickled, "only safetensors"),
        (truncated, ""),
        (git_lfs_pointer, r"model\.safetensors is a Git LFS pointer.* run `git lfs pull` in"),
        (only_an_adapter, r"contains an adapter, .*`swarmnode export --merge`"),
        (another_shape, r"other shapes .*\(model\.layers\.1\): download"),
        (edited(tie_word_embeddings=False), r"lack 1 weights .*\(lm_head\)"),
        (edited(num_hidden_layers=4), r"lack 18 .*\(model\.layers\.2, model\.layers\.3\)"),
        (NOT_CAUSAL, "no causal language model of type qwen3_vl: use a text"),
    ],
)
def test_a_directory_that_is_no_model_is_one_line(llama, damage, problem):
    damage(llama)
    with pytest.raises(Unavailable, match=problem) as error:
        load_policy(cpu(llama))
    assert "\n" not in str(error.value)


def test_code_that_comes_with_a_model_is_not_run(llama):
    (llama / "evil.py").write_text(f"open({str(llama / 'ran')!r}, 'w')")
    edit_config(
        llama,
        model_type="evil",
        auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
    )
    with pytest.raises(Unavailable):
        load_policy(cpu(llama))
    assert not (llama / "ran").exists()


def test_a_model_whose_export_could_not_be_opened_is_refused():
    with pytest.raises(Unavailable, match="no causal language model of type mllama"):
        device.count_parameters(MllamaConfig())


def test_unused_layers_are_named(llama):
    assert not find_unused(llama, AutoConfig.from_pretrained(llama))
    edit_config(llama, num_hidden_layers=1)
    unused = find_unused(llama, AutoConfig.from_pretrained(llama))
    assert name_modules(unused) == "model.layers.1", "by a stage"
    lines = []
    load_policy(cpu(llama), lines.append)
    assert any("9 weights" in line and line.endswith("not used: model.layers.1") for line in lines)


# --- does it fit: known from config.json alone


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_adapter_parameters_are_counted_without_weights(model_dir, kind):
    policy = load_policy(cpu(model_dir(kind), lora=LoraSettings(r=4)))
    assert (
        4 * device.count_parameters(policy.model.config)[1]
        == policy.statistics().trainable_parameters
    )


def test_a_model_that_cannot_fit_is_refused_before_loading(llama, monkeypatch):
    """The configuration is of a model with 70 billion parameters, whose weights do not exist."""
    size = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    edit_config(llama, vocab_size=128256, **size, **heads)
    (llama / "model.safetensors").unlink()
    monkeypatch.setattr(device, "free_bytes", lambda where: 64 * 2**30)
    told = r"need about 1\d{3}\.\d GiB to train .* cpu has 64.0 GiB free; policy.lora.r"
    with pytest.raises(DeviceError, match=told) as caught:
        load_policy(cpu(llama))
    assert "\n" not in str(caught.value)


# --- the probe, with GPUs that this machine need not have


def pretend(monkeypatch, capability, count=1, free=80 * 2**30):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (free, free))


def test_bfloat16_where_the_device_has_it(monkeypatch):
    pretend(monkeypatch, (9, 0))
    assert device.probe(PolicyConfig()).reason == "cuda:0, bfloat16: compute capability 9.0"
    pretend(monkeypatch, (7, 5))
    assert device.probe(PolicyConfig()).reason == "cuda:0, float16: compute capability 7.5"
    pretend(monkeypatch, (6, 1))
    assert device.probe(PolicyConfig()).reason == "cuda:0, float32: compute capability 6.1"


def test_a_stage_never_computes_in_float16(monkeypatch):
    pretend(monkeypatch, (7, 5))
    stage = device.without_float16(device.probe(PolicyConfig()))
    assert (stage.dtype, stage.device.type) == (torch.float32, "cuda")
    pretend(monkeypatch, (9, 0))
    whole = device.probe(PolicyConfig())
    assert device.without_float16(whole) is whole


@pytest.mark.parametrize(("factor", "dtype"), [(1.0, torch.float16), (1e6, torch.float32)])
def test_a_model_beyond_float16_is_loaded_in_float32(
    model_dir, tmp_path, monkeypatch, precision_restored, factor, dtype
):
    made = LlamaForCausalLM.from_pretrained(model_dir("llama"))
    made.lm_head.weight.data.mul_(factor)
    shutil.copytree(model_dir("llama"), tmp_path / "model")
    made.save_pretrained(tmp_path / "model")
    card = device.Placement(torch.device("cpu"), torch.float16, "a card without bfloat16")
    real, said = device.probe, []
    monkeypatch.setattr(load, "probe", lambda cfg: card if cfg.dtype == "auto" else real(cfg))
    policy = load_policy(PolicyConfig(model=str(tmp_path / "model"), devices="cpu"), said.append)
    assert policy.dtype == dtype
    assert any("overflows in float16" in line for line in said) is (dtype == torch.float32)


def test_spreads_layers_only_if_one_gpu_is_too_small(monkeypatch, embedded):
    config = embedded.model.config
    need = device.update_bytes(
        PolicyConfig(), config, device.Placement(torch.device("cuda"), torch.bfloat16, "")
    )
    for free, spread in ((need + 1, False), (need // 2 + 1, True)):
        pretend(monkeypatch, (9, 0), count=2, free=free)
        assert device.fit(PolicyConfig(), config, device.probe(PolicyConfig())).spread is spread
    one = PolicyConfig(devices="cuda:1")  # a device that the operator names is not replaced
    with pytest.raises(DeviceError):
        device.fit(one, config, device.probe(one))

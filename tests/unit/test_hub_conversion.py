"""The GGUF converter on tiny files: container, weights, config, atomic appearance."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from nanoserve.errors import StartupError
from nanoserve.hub.convert import convert_gguf
from nanoserve.hub.gguf_config import build_config, build_generation_config, llama3_divisors, shortest_float
from nanoserve.hub.gguf_file import open_gguf
from nanoserve.hub.model_files import read_model_files
from tests.gguf_samples import CONTROL, byte_vocabulary, hf_tensors, write_gguf

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


def convert(path: Path, tmp_path: Path, parts: list[Path] | None = None) -> Path:
    return convert_gguf(parts or [path], tmp_path / "out", "0" * 64, lambda part: None, weights=True)


def config_of(path: Path, rope_factors: list[float] | None = None) -> dict[str, Any]:
    with open_gguf([path]) as file:
        return build_config(file, rope_factors)


# ---- weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_comes_back_under_its_own_name(family: str, tmp_path: Path) -> None:
    """Names, row order of queries and keys, and norms are those of the model before it became a GGUF."""
    tensors = hf_tensors(family)
    found = load_file(convert(write_gguf(tmp_path / "m.gguf", family, tensors=tensors), tmp_path) / "model.safetensors")
    assert set(found) == set(tensors)
    for name, value in tensors.items():
        assert found[name].dtype == np.float32
        if family == "gemma3" and name.endswith("norm.weight"):
            np.testing.assert_array_equal(found[name], (value + np.float32(1)) - np.float32(1))
        else:
            np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_quantized_blocks_become_their_exact_values(kind: str, tmp_path: Path) -> None:
    tensors = hf_tensors("qwen2")
    quantization = gguf.GGMLQuantizationType[kind]
    # 48 columns are no whole number of blocks, so that matrix stays as it is.
    tensors = {name: value for name, value in tensors.items() if "down_proj" not in name}
    down = {f"blk.{i}.ffn_down.weight": hf_tensors("qwen2")[f"model.layers.{i}.mlp.down_proj.weight"] for i in (0, 1)}
    path = write_gguf(tmp_path / "m.gguf", "qwen2", tensors=tensors, quantize=quantization, raw_tensors=down)
    found = load_file(convert(path, tmp_path) / "model.safetensors")
    for name, value in tensors.items():
        if value.ndim == 2:
            value = gguf.quants.dequantize(gguf.quants.quantize(value, quantization), quantization)
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_half_precision_tensors_keep_their_bits(tmp_path: Path) -> None:
    tensors = {name: value.astype(np.float16) for name, value in hf_tensors("qwen3").items()}
    found = load_file(
        convert(write_gguf(tmp_path / "m.gguf", "qwen3", tensors=tensors), tmp_path) / "model.safetensors"
    )
    for name, value in tensors.items():
        assert found[name].dtype == np.float16
        np.testing.assert_array_equal(found[name], value)


def test_untied_output_and_attention_biases_are_kept(tmp_path: Path) -> None:
    tensors = hf_tensors("llama")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    for index in (0, 1):
        tensors[f"model.layers.{index}.self_attn.q_proj.bias"] = np.arange(32, dtype=np.float32)
        tensors[f"model.layers.{index}.self_attn.k_proj.bias"] = np.arange(16, dtype=np.float32)
    directory = convert(write_gguf(tmp_path / "m.gguf", tensors=tensors), tmp_path)
    found = load_file(directory / "model.safetensors")
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    config = json.loads((directory / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["attention_bias"] is True


def test_a_file_in_parts_equals_the_whole(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", "gemma3")
    data = whole.read_bytes()
    cuts = [0, 7, len(data) // 3, len(data) // 2, len(data)]  # also inside the header
    parts = []
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        parts.append(tmp_path / f"m.gguf.part{number:02d}")
        parts[-1].write_bytes(data[start:stop])
    joined = convert_gguf(parts, tmp_path / "joined", "0" * 64, lambda part: None, weights=True)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (joined / name).read_bytes() == (convert(whole, tmp_path) / name).read_bytes(), name
    assert json.loads((joined / "source.json").read_text())["parts"] == [str(part) for part in parts]


def test_progress_rises_to_one(tmp_path: Path) -> None:
    seen: list[float] = []
    convert_gguf([write_gguf(tmp_path / "m.gguf")], tmp_path / "out", "0" * 64, seen.append, weights=True)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len(seen) > 10


# ---- broken files: one line each, nothing left ---------------------------------------------------------------------


def breakages(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    good = write_gguf(tmp_path / "good.gguf").read_bytes()

    def raw(name: str, data: bytes) -> Path:
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        return path

    missing = hf_tensors("llama")
    del missing["model.layers.1.mlp.up_proj.weight"]
    strange = {"blk.0.ssm_conv1d.weight": np.zeros((2, 2), np.float32)}
    return {
        "no gguf": (raw("text", b"hello world" * 10), "not a GGUF file"),
        "empty": (raw("empty", b""), "truncated"),
        "version": (raw("version", good[:4] + struct.pack("<I", 1) + good[8:]), "version 1"),
        "cut header": (raw("header", good[:500]), "truncated"),
        "cut data": (raw("data", good[:-100]), "truncated"),
        "huge string": (raw("string", good[:24] + struct.pack("<Q", 1 << 60) + good[32:]), "truncated or damaged"),
        "architecture": (write_gguf(tmp_path / "a.gguf", metadata={"general.architecture": "mamba"}), "'mamba'"),
        "no key": (write_gguf(tmp_path / "k.gguf", metadata={"llama.block_count": None}), "llama.block_count"),
        "experts": (write_gguf(tmp_path / "x.gguf", metadata={"llama.expert_count": 8}), "mixture-of-experts"),
        "missing tensor": (write_gguf(tmp_path / "t.gguf", tensors=missing), "model.layers.1.mlp.up_proj.weight"),
        "strange tensor": (write_gguf(tmp_path / "s.gguf", raw_tensors=strange), "ssm_conv1d"),
        "rope": (write_gguf(tmp_path / "r.gguf", metadata={"llama.rope.scaling.type": "longrope"}), "longrope"),
        "layers": (write_gguf(tmp_path / "l.gguf", metadata={"llama.block_count": 1}), "past the last of 1 layers"),
    }


def test_broken_files_are_refused_in_one_line(tmp_path: Path) -> None:
    for name, (path, words) in breakages(tmp_path).items():
        with pytest.raises(StartupError, match=words) as caught:
            convert(path, tmp_path)
        assert "\n" not in str(caught.value), name
        assert not (tmp_path / "out").exists(), name
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_damaged_metadata_is_refused_or_harmless(family: str, tmp_path: Path) -> None:
    """Random bytes of the header overwritten, dropped or doubled: one line, or a conversion; nothing else, no hang."""
    good = write_gguf(tmp_path / "good.gguf", family).read_bytes()
    header = len(good) - 4 * sum(value.size for value in hf_tensors(family).values())
    draw = random.Random(11)
    outcomes = {"refused": 0, "converted": 0}
    for turn in range(150):
        data = bytearray(good)
        for _ in range(draw.choice([1, 1, 3])):
            # The first 1200 bytes hold the numbers; the rest is mostly vocabulary.
            at = draw.randrange(4, draw.choice([1200, header]))
            data[at : at + 1] = draw.choice([bytes([draw.choice([0, 1, 9, 255])]), b"", b"\x07\x08"])
        path = tmp_path / "bad.gguf"
        path.write_bytes(data)
        try:
            convert_gguf([path], tmp_path / f"out{turn}", "0" * 64, lambda part: None, weights=True)
            outcomes["converted"] += 1
        except StartupError as exc:
            assert "\n" not in str(exc)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 5


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_metadata_of_the_wrong_kind_is_refused_or_harmless(family: str, tmp_path: Path) -> None:
    fields = ["block_count", "attention.head_count", "attention.head_count_kv", "attention.key_length",
              "context_length", "embedding_length", "rope.scaling.type", "rope.scaling.factor",
              "attention.sliding_window", "attention.sliding_window_pattern"]  # fmt: skip
    vocabulary = ["tokens", "token_type", "merges", "model", "pre", "bos_token_id", "add_bos_token"]
    keys = [f"{family}.{key}" for key in fields] + [f"tokenizer.ggml.{key}" for key in vocabulary]
    keys += ["tokenizer.chat_template", "general.sampling.temp"]
    values = [0, 7, 4294967295, "x", 1.5, float("nan"), float("inf"), True, [1, 2], ["a", "b"]]
    for key in keys:
        for value in values:
            tokens = byte_vocabulary(["<s>", "</s>"], ["a b"], ids={"bos": 256, "eos": 257})
            tokens.extra = {"tokenizer.chat_template": "</s>", key: value}
            path = write_gguf(tmp_path / "m.gguf", family, vocabulary=tokens)
            try:
                convert(path, tmp_path)
                read_model_files(tmp_path / "out")
            except StartupError as exc:
                assert "\n" not in str(exc), (key, value)
            shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_too_small_a_disk_is_told_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StartupError, match="--cache-dir"):
        convert(write_gguf(tmp_path / "m.gguf"), tmp_path)


# ---- config ----------------------------------------------------------------------------------------------------


def test_config_of_each_family(tmp_path: Path) -> None:
    types = {family: config_of(write_gguf(tmp_path / f"{family}.gguf", family)) for family in FAMILIES}
    assert {family: config["model_type"] for family, config in types.items()} == {
        "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text",
    }  # fmt: skip
    for config in types.values():
        assert config["vocab_size"] == 300
        assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)
        assert config["rms_norm_eps"] == 1e-5  # not 9.999999747378752e-06
        assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (256, 257, None)
    assert types["gemma3"]["sliding_window"] == 64
    assert types["gemma3"]["layer_types"] == ["sliding_attention"] * 2
    assert types["gemma3"]["rope_local_base_freq"] == 10000.0


def test_gemma_layer_pattern_and_scaling(tmp_path: Path) -> None:
    def layers(pattern: Any) -> list[str]:
        extra = {"gemma3.block_count": 12, "gemma3.attention.sliding_window_pattern": pattern}
        path = write_gguf(tmp_path / "m.gguf", "gemma3", tensors=hf_tensors("gemma3", layers=12), metadata=extra)
        return ["s" if kind == "sliding_attention" else "g" for kind in config_of(path)["layer_types"]]

    assert "".join(layers(None)) == "sssssgsssssg"
    assert "".join(layers(3)) == "ssgssgssgssg"
    assert "".join(layers([True, False] * 6)) == "sg" * 6
    extra = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    config = config_of(write_gguf(tmp_path / "m.gguf", "gemma3", metadata=extra))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    tensors = hf_tensors("gemma3", layers=62)
    large = config_of(write_gguf(tmp_path / "m.gguf", "gemma3", tensors=tensors, metadata={"gemma3.block_count": 62}))
    assert large["query_pre_attn_scalar"] == 32 // 4


def test_mistral_is_a_llama_with_a_window(tmp_path: Path) -> None:
    config = config_of(write_gguf(tmp_path / "m.gguf", metadata={"llama.attention.sliding_window": 128}))
    assert config["model_type"] == "mistral"
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 128


def test_llama3_rope_scaling_is_found_again_from_its_factors(tmp_path: Path) -> None:
    wanted = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}  # fmt: skip
    metadata = {"llama.rope.freq_base": 500000.0, "llama.attention.key_length": 64, "llama.attention.value_length": 64}
    divisors = llama3_divisors(500000.0, 64, wanted)
    assert min(divisors) == 1.0 and max(divisors) == 32.0 and len(set(divisors)) > 3
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata)
    assert config_of(path, np.array(divisors, np.float32).tolist())["rope_scaling"] == wanted
    with pytest.raises(StartupError, match="follow no known scaling"):
        config_of(path, [1.0] * 16 + [5.0] * 16)


def test_yarn_and_old_linear_scaling(tmp_path: Path) -> None:
    yarn = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 128}  # fmt: skip
    config = config_of(write_gguf(tmp_path / "m.gguf", "qwen2", metadata=yarn))
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = config_of(write_gguf(tmp_path / "m.gguf", metadata={"llama.rope.scale_linear": 2.0}))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_generation_config_names_every_end(tmp_path: Path) -> None:
    specials = ["<s>", "</s>", "<|im_end|>", "<|eot_id|>", "<|other|>"]

    def generation(ids: dict[str, int], template: str | None, **extra: Any) -> dict[str, Any]:
        vocabulary = byte_vocabulary(specials, ids={"bos": 256, **ids})
        vocabulary.extra = {"tokenizer.chat_template": template, **extra}
        path = write_gguf(tmp_path / "m.gguf", vocabulary=vocabulary)
        with open_gguf([path]) as file:
            return build_generation_config(file)

    assert generation({"eos": 257}, None) == {"bos_token_id": 256, "eos_token_id": 257}
    assert generation({"eos": 257, "eot": 259}, None)["eos_token_id"] == [257, 259]
    assert generation({"eos": 257}, "{{ x }}<|im_end|>")["eos_token_id"] == [257, 258]
    assert generation({"eos": 257}, "{{ x }}<|other|>")["eos_token_id"] == 257
    assert generation({"eos": 999}, None) == {"bos_token_id": 256}  # an id outside the vocabulary
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}
    found = generation({"eos": 257}, None, **sampling)
    assert (found["temperature"], found["top_k"], found["top_p"]) == (0.6, 20, 0.95)


def test_a_turn_end_counts_only_as_a_control_token(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary(["<s>", "</s>", "<|im_end|>"], ids={"eos": 257})
    assert vocabulary.types is not None and vocabulary.types[-1] == CONTROL
    vocabulary.types[-1] = 1
    vocabulary.extra = {"tokenizer.chat_template": "<|im_end|>"}
    with open_gguf([write_gguf(tmp_path / "m.gguf", vocabulary=vocabulary)]) as file:
        assert build_generation_config(file)["eos_token_id"] == 257


def test_shortest_float() -> None:
    for text in ("1e-05", "1e-06", "0.1", "10000.0", "500000.0", "3.4028235e+38", "0.0"):
        value = float(text)
        assert shortest_float(struct.unpack("<f", struct.pack("<f", value))[0]) == value

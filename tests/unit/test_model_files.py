"""Reading a model directory: where each fact comes from, and one line for what is missing or broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoserve.errors import StartupError
from nanoserve.hub.model_files import GenerationDefaults, read_model_files

CONFIG = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 512}


def model(path: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A model directory; `files` are JSON values by name without .json, or text by name with `_jinja`."""
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(b"")
    for name, value in {"config": CONFIG if config is None else config, **files}.items():
        if name.endswith("_jinja"):
            (path / f"{name[:-6]}.jinja").write_text(value)
        else:
            (path / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_plain_directory(tmp_path: Path) -> None:
    files = read_model_files(model(tmp_path))
    assert files.config == CONFIG
    assert (files.vocab_size, files.context_length, files.eos_token_ids) == (100, 512, ())
    assert (files.bos_token, files.chat_template) == (None, None)
    assert files.generation == GenerationDefaults()
    assert files.weight_files == (tmp_path / "model.safetensors",)
    assert files.weight_map == {}


def test_sharded_weights(tmp_path: Path) -> None:
    model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00002.safetensors").write_bytes(b"")
    index = {"weight_map": {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = read_model_files(tmp_path)
    assert [path.name[6:11] for path in files.weight_files] == ["00001", "00002"]
    assert files.weight_map["a"] == files.weight_files[1]
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StartupError, match=r"names model-00002-of-00002[.]safetensors, which is not in"):
        read_model_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(StartupError, match="which is not in"):
        read_model_files(tmp_path)


def test_every_place_of_an_end_id_counts(tmp_path: Path) -> None:
    files = read_model_files(model(tmp_path, CONFIG | {"eos_token_id": 5}, generation_config={"eos_token_id": [9, 7]}))
    assert files.eos_token_ids == (5, 7, 9)
    nothing = read_model_files(model(tmp_path, CONFIG | {"eos_token_id": None}, generation_config={}))
    assert nothing.eos_token_ids == ()


def test_generation_defaults(tmp_path: Path) -> None:
    stated = {"temperature": 1, "top_k": 64, "top_p": 0.95, "do_sample": True, "transformers_version": "5"}
    files = read_model_files(model(tmp_path, generation_config=stated))
    assert files.generation == GenerationDefaults(temperature=1.0, top_k=64, top_p=0.95)
    with pytest.raises(StartupError, match="top_p must be a number"):
        read_model_files(model(tmp_path, generation_config={"top_p": "high"}))


def test_special_tokens_in_both_spellings(tmp_path: Path) -> None:
    written_out = {"content": "<s>", "lstrip": False}
    files = read_model_files(
        model(
            tmp_path,
            tokenizer_config={"bos_token": written_out, "eos_token": "</s>", "pad_token": None},
            special_tokens_map={"eos_token": "old", "unk_token": {"content": "<unk>"}},
        )
    )
    assert (files.bos_token, files.eos_token, files.pad_token, files.unk_token) == ("<s>", "</s>", None, "<unk>")


def test_chat_template_newest_place_first(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert read_model_files(model(tmp_path, tokenizer_config={"chat_template": named})).chat_template == "D"
    assert read_model_files(model(tmp_path, tokenizer_config={"chat_template": named[:1]})).chat_template == "T"
    assert read_model_files(model(tmp_path, tokenizer_config={"chat_template": "C"})).chat_template == "C"
    assert read_model_files(model(tmp_path, chat_template={"chat_template": "J"})).chat_template == "J"
    assert read_model_files(model(tmp_path, chat_template_jinja="F\n")).chat_template == "F\n"


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"rope_scaling": None}, 512),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 1024),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}, 512),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}}, 512),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, 1024),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 512),
        ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"factor": 8.0}}}, 512),
    ],
)
def test_context_length_with_rope_scaling(scaling: dict[str, Any], length: int, tmp_path: Path) -> None:
    assert read_model_files(model(tmp_path, CONFIG | scaling)).context_length == length


def test_text_part_of_a_multimodal_model(tmp_path: Path) -> None:
    """Google's 4B file leaves most of its text_config to the defaults of the class."""
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": {"hidden_size": 2560, "num_hidden_layers": 34, "model_type": "gemma3_text"},
        "vision_config": {"hidden_size": 1152},
    }
    files = read_model_files(model(tmp_path, config))
    assert files.model_type == "gemma3_text"
    assert (files.config["hidden_size"], files.config["num_attention_heads"]) == (2560, 8)
    assert (files.vocab_size, files.context_length, files.eos_token_ids) == (262208, 131072, (1, 106))
    assert "vision_config" not in files.config


def test_broken_directories_are_one_line(tmp_path: Path) -> None:
    cases: list[tuple[Path, str]] = [
        (tmp_path / "gone", "no model directory"),
        (model(tmp_path / "a", "{"), "cannot read .*config.json"),  # type: ignore[arg-type]
        (model(tmp_path / "b", "[]"), "not a JSON object"),  # type: ignore[arg-type]
        (model(tmp_path / "c", {"vocab_size": 10}), "max_position_embeddings must be a positive"),
        (model(tmp_path / "d", CONFIG | {"vocab_size": True}), "vocab_size must be a positive"),
        (model(tmp_path / "q", CONFIG | {"quantization_config": {"quant_method": "gptq"}}), "quantized by 'gptq'"),
        (model(tmp_path / "e", generation_config="\x00"), "cannot read .*generation_config.json"),
        (model(tmp_path / "f", tokenizer_config="[" * 100_000), "cannot read .*tokenizer_config.json"),
    ]
    (tmp_path / "g").mkdir()
    cases.append((tmp_path / "g", "no config.json in"))
    cases.append((model(tmp_path / "h"), "no weights in"))
    (tmp_path / "h" / "model.safetensors").unlink()
    for path, words in cases:
        with pytest.raises(StartupError, match=words) as caught:
            read_model_files(path)
        assert "\n" not in str(caught.value)
    assert read_model_files(tmp_path / "h", need_weights=False).weight_files == ()

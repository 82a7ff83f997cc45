"""The converted default models against transformers' own reading of the same GGUF files."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoserve.config import ModelConfig, ServerConfig
from nanoserve.hub.model_files import read_model_files
from nanoserve.hub.resolve import find_prepared, prepare
from nanoserve.hub.sources import locate
from nanoserve.tokenizer import HFTokenizer, load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODELS = ("smollm2-135m", "gemma3-270m")
Prepared = Callable[[str], Path]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Name -> converted directory, in a cache of this module."""
    cache = tmp_path_factory.mktemp("cache")

    def make(name: str) -> Path:
        config = ServerConfig(model=ModelConfig(model=name, cache_dir=str(cache)))
        return find_prepared(config) or prepare(config, lambda stage, part: None)

    return make


@pytest.fixture(scope="module")
def joined_gguf(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Name -> one GGUF file, as transformers wants it."""

    directory = tmp_path_factory.mktemp("gguf")

    def make(name: str) -> Path:
        files = locate(name).files
        whole = directory / f"{name}.gguf"
        if len(files) == 1 or whole.exists():
            return files[0] if len(files) == 1 else whole
        with whole.open("wb") as out:
            for part in files:
                out.write(part.read_bytes())
        return whole

    return make


def reference_tokenizer(gguf: Path, name: str) -> Any:
    """transformers' tokenizer of the GGUF, with what its loader drops put back."""
    from tokenizers import pre_tokenizers, processors
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).backend_tokenizer
    if name == "smollm2-135m":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return tokenizer


def hard_strings(count: int, specials: list[str]) -> list[str]:
    """Random joints of what tokenizers get wrong: runs of spaces, digits, emoji, marks, scripts, special tokens."""
    pieces = [
        " ", "  ", "   ", "\n", "\n\n\n", "\t\t", "\r\n", "7", "2024", "3.14", "１２", "a", "Hello", " world", "don't",
        "I'LL", "naïve", "cafe\u0301", "Ünïcödé", "日本語", "中文字符", "한국어", "ไทย", "မြန်မာ", "தமிழ்", "שלום",
        "مرحبا", "😀", "👩‍👩‍👧", "🏳️‍🌈", "🔥", "\u200b", "\u00a0", "\u3000", "▁", "▁▁", "Ġ", "<0x41>", "```py\n",
        "    return x", "...", "!?", "<b>", "</s>", "$%^&*", "\x00", "\ufffd", "e" * 40, "0" * 17, *specials,
    ]  # fmt: skip
    draw = random.Random(7)
    return ["".join(draw.choices(pieces, k=draw.randint(1, 12))) for _ in range(count)]


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_config_equal_what_transformers_makes_of_the_file(
    name: str, prepared: Prepared, joined_gguf: Prepared
) -> None:
    """Weights bit for bit; the config in all that computes."""
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    gguf, directory = joined_gguf(name), prepared(name)
    theirs = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    reference = theirs.state_dict()
    with safe_open(str(directory / "model.safetensors"), framework="pt") as file:
        keys = set(file.keys())
        for key in keys:
            assert torch.equal(file.get_tensor(key).view(torch.int32), reference[key].view(torch.int32)), key
    assert set(reference) - keys == {"lm_head.weight"}  # tied to the embedding
    assert torch.equal(reference["lm_head.weight"], reference["model.embed_tokens.weight"])

    ours = AutoConfig.from_pretrained(str(directory))
    assert type(ours) is type(theirs.config)
    same = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
            "num_key_value_heads", "max_position_embeddings", "rope_parameters", "tie_word_embeddings",
            "bos_token_id", "eos_token_id", "pad_token_id"]  # fmt: skip
    if name == "gemma3-270m":
        same += ["layer_types", "sliding_window", "query_pre_attn_scalar", "hidden_activation"]
    for key in same:
        assert getattr(ours, key) == getattr(theirs.config, key), key
    assert ours.rms_norm_eps == pytest.approx(theirs.config.rms_norm_eps, rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_the_converted_directory(name: str, prepared: Prepared) -> None:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(str(prepared(name)), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("name", MODELS)
def test_encodings_equal_the_reference_tokenizer(name: str, prepared: Prepared, joined_gguf: Prepared) -> None:
    from transformers import AutoTokenizer

    directory = prepared(name)
    reference = reference_tokenizer(joined_gguf(name), name)
    ours = load_tokenizer(directory)
    assert isinstance(ours, HFTokenizer)
    theirs = AutoTokenizer.from_pretrained(str(directory))
    specials = [token for i in sorted(ours.special_ids)[:20] if (token := ours.id_to_token(i))]
    texts = hard_strings(400, [*specials, "<start_of_turn>", "<end_of_turn>", "<unused7>"])
    for text, ids in zip(texts, ours.encode_batch(texts, add_special_tokens=True), strict=True):
        assert ids == reference.encode(text).ids, text
        assert ids == theirs(text)["input_ids"], text
        assert ids == ours.encode(text, add_special_tokens=True)
        decoded = ours.decode(ids, skip_special_tokens=False)
        assert decoded == reference.decode(ids, skip_special_tokens=False), text
        assert decoded == theirs.decode(ids, skip_special_tokens=False), text


def test_smollm2_splits_digits(prepared: Prepared) -> None:
    tokenizer = load_tokenizer(prepared("smollm2-135m"))
    assert tokenizer.encode("a  7", add_special_tokens=True) == [81, 256, 39]
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.vocab_size == 49152


def test_gemma_adds_its_begin_token_once(prepared: Prepared) -> None:
    tokenizer = load_tokenizer(prepared("gemma3-270m"))
    assert tokenizer.encode("Hello", add_special_tokens=True) == [2, 9259]
    assert tokenizer.encode("Hello", add_special_tokens=False) == [9259]
    assert tokenizer.encode_batch(["", "Hello"], add_special_tokens=True) == [[2], [2, 9259]]


def test_facts_of_the_default_models(prepared: Prepared) -> None:
    smollm = read_model_files(prepared("smollm2-135m"))
    assert smollm.eos_token_ids == (2,)
    assert (smollm.bos_token, smollm.eos_token, smollm.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert smollm.unk_token == "<|endoftext|>"
    assert smollm.context_length == 8192
    assert smollm.vocab_size == 49152
    assert smollm.chat_template is not None and "<|im_start|>" in smollm.chat_template
    gemma = read_model_files(prepared("gemma3-270m"))
    assert gemma.eos_token_ids == (1,)  # the base model: no chat template, so no end of turn
    assert gemma.chat_template is None
    assert gemma.context_length == 32768
    assert gemma.vocab_size == 262144
    assert gemma.bos_token == "<bos>"

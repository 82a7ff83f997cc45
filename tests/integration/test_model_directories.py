"""Tiny models of each family: saved by transformers, read by us; and through a GGUF back into transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanoserve.config import ModelConfig, ServerConfig
from nanoserve.hub.model_files import read_model_files
from nanoserve.hub.resolve import prepare
from tests.gguf_samples import Vocabulary, byte_vocabulary, write_gguf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip


def tiny_model(family: str, **changes: Any) -> Any:
    import torch
    import transformers

    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3Text"}
    config = getattr(transformers, f"{names[family]}Config")(**SIZES | changes)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim == 1:  # norms and biases start as constants, which would hide a mix-up
                value.copy_(torch.randn_like(value) * 0.3 + (0.0 if "bias" in name or family == "gemma3" else 1.0))
            else:
                value.mul_(8)  # or the logits are so flat that little could change them
    return model


def byte_model(**kwargs: Any) -> Vocabulary:
    return byte_vocabulary(["<s>", "</s>"], ids={"bos": 256, "eos": 257}, **kwargs)


@pytest.mark.parametrize(
    ("family", "changes", "metadata"),
    [
        ("llama", {"tie_word_embeddings": True}, {}),
        ("llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3, "head_dim": 64}, {}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
         {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}),
        ("mistral", {"sliding_window": 8}, {"llama.attention.sliding_window": 8}),
        ("qwen2", {"tie_word_embeddings": True}, {}),
        ("qwen3", {"tie_word_embeddings": True}, {}),
        ("gemma3", {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 8},
         {"gemma3.block_count": 7, "gemma3.attention.sliding_window": 8, "gemma3.rope.freq_base": 1e6}),
    ],
)  # fmt: skip
def test_a_model_survives_the_way_through_a_gguf(
    family: str, changes: dict[str, Any], metadata: dict[str, Any], tmp_path: Path
) -> None:
    """Logits of the converted model, loaded by transformers, equal those of the model the GGUF was made from."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from nanoserve.hub.gguf_config import llama3_divisors

    model = tiny_model(family, **changes)
    architecture = "llama" if family == "mistral" else family
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    head_dim = changes.get("head_dim", 8)
    metadata |= {f"{architecture}.attention.key_length": head_dim, f"{architecture}.attention.value_length": head_dim,
                 f"{architecture}.attention.layer_norm_rms_epsilon": model.config.rms_norm_eps}  # fmt: skip
    raw = {}
    if changes.get("rope_parameters") is LLAMA3:
        metadata["llama.rope.freq_base"] = LLAMA3["rope_theta"]
        raw["rope_freqs.weight"] = np.array(llama3_divisors(LLAMA3["rope_theta"], head_dim, LLAMA3), np.float32)
    path = write_gguf(
        tmp_path / "m.gguf", architecture, tensors=tensors, metadata=metadata, raw_tensors=raw, vocabulary=byte_model()
    )
    settings = ServerConfig(model=ModelConfig(model=str(path), cache_dir=str(tmp_path / "cache")))
    directory = prepare(settings, lambda stage, part: None)

    files = read_model_files(directory)
    assert (files.vocab_size, files.context_length, files.eos_token_ids) == (
        300, 1024 if "rope_scaling" in files.config and files.config["rope_scaling"]["rope_type"] == "linear" else 512,
        (257,),
    )  # fmt: skip
    loaded, info = AutoModelForCausalLM.from_pretrained(str(directory), output_loading_info=True)
    assert type(loaded) is type(model)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(40)[None] * 7 % 300
    with torch.no_grad():
        want, got = model(ids).logits, loaded(ids).logits
    # Only Gemma's norms (stored as w + 1) and epsilon (32 bits in the file) are not exact.
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert want.std() > 0.1
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("shard", ["1GB", "40KB"])
def test_what_transformers_saves_is_read(family: str, shard: str, tmp_path: Path) -> None:
    from safetensors import safe_open
    from transformers import GenerationConfig

    changes = {"sliding_window": 16} if family in ("mistral", "gemma3") else {}
    model = tiny_model(family, bos_token_id=1, eos_token_id=2, **changes)
    model.generation_config = GenerationConfig(eos_token_id=[2, 7], temperature=0.6, top_k=20, do_sample=True)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    files = read_model_files(tmp_path)
    assert files.model_type == model.config.model_type
    assert (files.vocab_size, files.context_length, files.eos_token_ids) == (300, 512, (2, 7))
    assert (files.generation.temperature, files.generation.top_k) == (0.6, 20)
    assert (len(files.weight_files) > 1) is (shard == "40KB")
    found: dict[str, Path] = {}
    for path in files.weight_files:
        with safe_open(str(path), framework="np") as file:
            found |= dict.fromkeys(file.keys(), path)
    expected = set(model.state_dict()) - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    assert set(found) == expected
    assert files.weight_map == (found if shard == "40KB" else {})

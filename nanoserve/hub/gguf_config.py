"""config.json and generation_config.json out of GGUF metadata, with the names Hugging Face uses.

Used by the converter only. What a GGUF leaves to the reading program (Gemma's layer pattern, Llama 3's rope scaling,
which it stores as a tensor of factors) is put back here; anything that cannot be expressed is refused, never dropped.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from nanoserve.errors import StartupError
from nanoserve.hub.gguf_file import GgufFile

# GGUF architecture -> (model_type, class for transformers). GGUF files call Mistral models `llama`.
FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
# Ends of a chat turn, as the known templates spell them. One of them ends a generation when the file's own template
# writes it and it is no ordinary text token: some files name only the end of text.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>", "<|endofturn|>", "</s>")
# Gemma 3 27B scales its attention by the width per head, the smaller ones by head_dim; layers tell it apart.
_GEMMA3_27B_LAYERS = 62


class TokenType(IntEnum):
    """GGUF's, which are SentencePiece's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Fields:
    """Typed access to the metadata keys of one architecture; StartupError names a missing or odd one."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture", ""))
        if self.architecture not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise StartupError(f"{file.name}: architecture {self.architecture!r} is not supported (only {known})")

    def get(self, key: str, kind: type[int] | type[float] | type[str], default: Any = None) -> Any:
        """The value of `<architecture>.<key>`. A float is given as the shortest decimal of its 32 bits."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            return None
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # per-layer lists are written also where all layers agree
        if kind is float and isinstance(value, (int, float)):
            return shortest_float(float(value))
        if not isinstance(value, kind) or isinstance(value, bool):
            raise StartupError(f"{self.file.name}: {self.architecture}.{key} is not one {kind.__name__}")
        return value

    def require(self, key: str, kind: type[int] | type[float] | type[str]) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise StartupError(f"{self.file.name} has no {self.architecture}.{key}")
        return value


def shortest_float(value: float) -> float:
    """The shortest decimal with the same 32-bit float: 1e-05 for 9.999999747378752e-06."""
    packed = struct.pack("<f", value)
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        with contextlib.suppress(OverflowError):  # rounded up past the largest 32-bit float
            if struct.pack("<f", candidate) == packed:
                return candidate
    return value


def build_config(file: GgufFile, rope_factors: Sequence[float] | None = None) -> dict[str, Any]:
    """The config.json of the file's text model.

    `rope_factors` is the content of the tensor rope_freqs.weight where the file has one: [head_dim / 2] divisors of
    the rotary frequencies. Raises StartupError for what the supported families cannot express.
    """
    fields = Fields(file)
    if fields.get("expert_count", int, 0):
        raise StartupError(f"{file.name}: mixture-of-experts models are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise StartupError(f"{file.name} has no token embedding")
    model_type, class_name = FAMILIES[fields.architecture]
    heads, hidden = fields.require("attention.head_count", int), fields.require("embedding_length", int)
    layers = fields.require("block_count", int)
    if min(heads, hidden, layers) < 1 or layers > len(file.tensors):  # before anything is sized by them
        raise StartupError(f"{file.name} is damaged: {layers} layers of {heads} heads and width {hidden}")
    head_dim = fields.get("attention.key_length", int) or hidden // heads
    for key, value in (("rope.dimension_count", head_dim), ("attention.value_length", head_dim)):
        if fields.get(key, int, value) != value:
            raise StartupError(f"{file.name}: {fields.architecture}.{key} must equal the head size {head_dim}")
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.require("feed_forward_length", int),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.require("context_length", int),
        "rms_norm_eps": fields.require("attention.layer_norm_rms_epsilon", float),
        "rope_theta": fields.get("rope.freq_base", float, 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float32",
        **_token_ids(file),
    }
    scaling = _rope_scaling(fields, config, rope_factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    _add_family_fields(config, fields)
    return config


def _token_ids(file: GgufFile) -> dict[str, int | None]:
    return {
        f"{name}_token_id": token_id(file, key)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }  # fmt: skip


def token_id(file: GgufFile, name: str) -> int | None:
    """`tokenizer.ggml.<name>_token_id`, None where the file names none or one outside the vocabulary."""
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < len(vocabulary(file)) else None


def vocabulary(file: GgufFile) -> list[str]:
    """The tokens by id; empty where the file has none."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return tokens if isinstance(tokens, list) and tokens and isinstance(tokens[0], str) else []


def token_types(file: GgufFile) -> list[int]:
    """The type of each token; all normal where the file states none. StartupError when they do not fit the tokens."""
    count = len(vocabulary(file))
    types = file.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [TokenType.NORMAL] * count
    if not isinstance(types, list) or len(types) != count:
        raise StartupError(f"{file.name}: token types do not cover the vocabulary")
    return types


def _add_family_fields(config: dict[str, Any], fields: Fields) -> None:
    file, model_type = fields.file, config["model_type"]
    window = fields.get("attention.sliding_window", int)
    if model_type in ("llama", "mistral"):
        config["hidden_act"] = "silu"
        if window:
            config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
        elif model_type == "mistral":
            config["sliding_window"] = None
        if "blk.0.attn_q.bias" in file.tensors:
            config["attention_bias"] = True
    elif model_type in ("qwen2", "qwen3"):
        config |= {"hidden_act": "silu", "use_sliding_window": False}
        if model_type == "qwen3":
            config["attention_bias"] = False
    else:
        layers = config["num_hidden_layers"]
        large = layers == _GEMMA3_27B_LAYERS
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": (
                config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
            ),
            "sliding_window": fields.require("attention.sliding_window", int),
            "layer_types": _gemma_layer_types(fields, layers),
            "rope_local_base_freq": fields.get("rope.freq_base_swa", float, 10000.0),
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        }


def _gemma_layer_types(fields: Fields, layers: int) -> list[str]:
    """Five sliding layers, then a global one, unless the file states a period or the layers one by one."""
    pattern = fields.file.metadata.get(f"{fields.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise StartupError(f"{fields.file.name}: sliding_window_pattern does not cover {layers} layers")
        sliding = [bool(item) for item in pattern]
    else:
        period = fields.get("attention.sliding_window_pattern", int, 6)
        if period < 1:
            raise StartupError(f"{fields.file.name}: sliding_window_pattern {period} is no period")
        sliding = [(index + 1) % period != 0 for index in range(layers)]
    return ["sliding_attention" if item else "full_attention" for item in sliding]


def _rope_scaling(
    fields: Fields, config: dict[str, Any], rope_factors: Sequence[float] | None
) -> dict[str, Any] | None:
    if rope_factors is not None:
        return _llama3_scaling(fields.file.name, config, rope_factors)
    kind = fields.get("rope.scaling.type", str, "none")
    factor = fields.get("rope.scaling.factor", float) or fields.get("rope.scale_linear", float)
    if kind == "none" and factor in (None, 0.0, 1.0):
        return None
    if kind in ("none", "linear"):  # old files give the factor alone
        return {"rope_type": "linear", "factor": factor or 1.0}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor or 1.0}
        original = fields.get("rope.scaling.original_context_length", int)
        return scaling | ({"original_max_position_embeddings": original} if original else {})
    raise StartupError(f"{fields.file.name}: rope scaling {kind!r} is not supported")


def _llama3_scaling(name: str, config: dict[str, Any], factors: Sequence[float]) -> dict[str, Any]:
    """The parameters behind the stored divisors: Llama 3.1's formula with the values its model card gives.

    The factor is the largest divisor; the other three are the same in every Llama 3 release. The divisors are
    computed again from them and compared, so a file made in another way is refused instead of served wrongly.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": shortest_float(max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_divisors(config["rope_theta"], config["head_dim"], scaling)
    if len(expected) != len(factors) or any(abs(a - b) > 1e-3 * abs(a) for a, b in zip(expected, factors, strict=True)):
        raise StartupError(f"{name}: its rope frequencies follow no known scaling")
    return scaling


def llama3_divisors(theta: float, head_dim: int, scaling: dict[str, Any]) -> list[float]:
    """What Llama 3.1's scaling divides each of the head_dim / 2 rotary frequencies by."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        turns = scaling["original_max_position_embeddings"] / wavelength
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1.0 / ((1.0 - blend) / factor + blend))
    return divisors


# ---- generation_config.json -------------------------------------------------------------------------------


def build_generation_config(file: GgufFile) -> dict[str, Any]:
    """Ids that end a generation (end of text, of turn, of message) and the sampling the file recommends."""
    ends = {token_id(file, name) for name in ("eos", "eot", "eom")} | set(_template_turn_ends(file))
    ids = sorted(end for end in ends if end is not None)
    config: dict[str, Any] = {key: value for key, value in _token_ids(file).items() if value is not None}
    if ids:
        config["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    for key, name in (("temp", "temperature"), ("top_k", "top_k"), ("top_p", "top_p"), ("min_p", "min_p"),
                      ("penalty_repeat", "repetition_penalty")):  # fmt: skip
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            config[name] = shortest_float(value) if isinstance(value, float) else value
    return config


def _template_turn_ends(file: GgufFile) -> list[int]:
    template = file.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        return []
    return [
        index
        for index, (token, kind) in enumerate(zip(vocabulary(file), token_types(file), strict=True))
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED) and token in _TURN_ENDS and token in template
    ]

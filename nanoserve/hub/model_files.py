"""What a model directory says about its model: config, generation defaults, special tokens, template, weight files.

Read by the supervisor, api and engine processes at start; imports neither torch nor numpy. The directory has the
Hugging Face layout: config.json, tokenizer files, *.safetensors (with an index when sharded).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.errors import StartupError

# What Gemma3TextConfig of transformers assumes for keys that a config.json leaves out; Google's multimodal
# checkpoints (4B and up) rely on it, so their text_config is incomplete on its own. No other family needs this.
_GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling fields of generation_config.json; None where the model states nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """One model directory, read. `config` is the text model's: a multimodal file's `text_config` is lifted."""

    path: Path
    config: dict[str, Any]
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    eos_token_ids: tuple[int, ...] = ()  # ascending; any of them ends a generation
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    chat_template: str | None = None  # Jinja source
    context_length: int  # tokens, prompt and answer together; the model's own limit, with its rope scaling
    vocab_size: int  # rows of the output layer, padding rows included: the bound for every token id
    weight_files: tuple[Path, ...] = ()  # in name order; empty where there are none (sim)
    weight_map: dict[str, Path] = field(default_factory=dict)  # tensor -> file, of a sharded model only

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))


def read_model_files(path: Path, *, need_weights: bool = True) -> ModelFiles:
    """Reads a prepared model directory (`hub.resolve`). Raises StartupError, one line, for what is missing or broken.

    With `need_weights=False` a directory without *.safetensors is accepted (sim, random weights).
    """
    if not path.is_dir():
        raise StartupError(f"no model directory at {path}")
    raw = _read_json(path / "config.json", required=True)
    config = text_config(raw)
    generation = _read_json(path / "generation_config.json")
    tokens = _special_tokens(path)
    weight_files, weight_map = find_weights(path)
    if need_weights and not weight_files:
        raise StartupError(f"no weights in {path}: expected *.safetensors")
    quantization = raw.get("quantization_config")
    if need_weights and quantization:  # its tensors have other names and shapes than the family's
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise StartupError(f"{path / 'config.json'}: weights quantized by {str(method)[:40]!r} are not supported")
    return ModelFiles(
        path=path,
        config=config,
        generation=_generation_defaults(generation, path),
        eos_token_ids=_eos_ids(generation, config, raw),
        bos_token=tokens["bos_token"],
        eos_token=tokens["eos_token"],
        pad_token=tokens["pad_token"],
        unk_token=tokens["unk_token"],
        chat_template=_chat_template(path),
        context_length=_context_length(config, path),
        vocab_size=_positive_int(config, "vocab_size", path),
        weight_files=weight_files,
        weight_map=weight_map,
    )


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json: `text_config` of a multimodal one, else all of it."""
    inner = raw.get("text_config")
    config = dict(raw)
    if isinstance(inner, dict):
        config = {**{key: raw[key] for key in ("architectures", "dtype", "torch_dtype") if key in raw}, **inner}
        if raw.get("model_type") == "gemma3":
            config["model_type"] = "gemma3_text"
        if "tie_word_embeddings" in raw:
            config.setdefault("tie_word_embeddings", raw["tie_word_embeddings"])
    if config.get("model_type") == "gemma3_text":
        config = {**_GEMMA3_DEFAULTS, **config}
    return config


def find_weights(path: Path) -> tuple[tuple[Path, ...], dict[str, Path]]:
    """Weight files of a directory, and for a sharded model which tensor lies in which. Raises StartupError when
    the index names a file that is not there."""
    index_path = path / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise StartupError(f"{index_path} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            # A name with a separator could point outside the directory.
            if Path(name).name != name or not (path / name).is_file():
                raise StartupError(f"{index_path.name} names {name[:100]}, which is not in {path}")
        return tuple(path / name for name in names), {tensor: path / name for tensor, name in weight_map.items()}
    single = path / "model.safetensors"
    if single.is_file():
        return (single,), {}
    return tuple(sorted(path.glob("*.safetensors"))), {}


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """A JSON object; {} when the file is not there and not required."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise StartupError(f"no {path.name} in {path.parent}") from None
        return {}
    except (OSError, ValueError, RecursionError) as exc:
        raise StartupError(f"cannot read {path}: {' '.join(str(exc).split())[:200]}") from exc
    if not isinstance(value, dict):
        raise StartupError(f"cannot read {path}: not a JSON object")
    return value


def _positive_int(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise StartupError(f"{path / 'config.json'}: {key} must be a positive whole number")
    return value


def _eos_ids(generation: dict[str, Any], *configs: dict[str, Any]) -> tuple[int, ...]:
    """The union over all places: instruct models often name the turn's end in only one of them."""
    ids: set[int] = set()
    for source in (generation, *configs):
        value = source.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
                ids.add(item)
    return tuple(sorted(ids))


def _generation_defaults(generation: dict[str, Any], path: Path) -> GenerationDefaults:
    """Like other servers, `do_sample` is not looked at: a stated temperature is the model's recommendation."""
    values: dict[str, Any] = {}
    for name, kind in (("temperature", float), ("top_k", int), ("top_p", float), ("min_p", float),
                       ("repetition_penalty", float), ("max_new_tokens", int)):  # fmt: skip
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise StartupError(f"{path / 'generation_config.json'}: {name} must be a number")
        values[name] = kind(value)
    return GenerationDefaults(**values)


def _special_tokens(path: Path) -> dict[str, str | None]:
    """Names of the special tokens; tokenizer_config.json wins over the older special_tokens_map.json."""
    sources = [_read_json(path / name) for name in ("tokenizer_config.json", "special_tokens_map.json")]
    found: dict[str, str | None] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        found[name] = None
        for source in sources:
            value = source.get(name)
            if isinstance(value, dict):  # an added token, written out
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
                break
    return found


def _chat_template(path: Path) -> str | None:
    """The default template, newest place first; of a named list the one called `default`, else the first."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as exc:
            raise StartupError(f"cannot read {file}: {exc}") from exc
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = _read_json(path / name).get("chat_template")
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            named = {str(item.get("name")): item.get("template") for item in value if isinstance(item, dict)}
            template = named.get("default", next(iter(named.values()), None))
            if isinstance(template, str):
                return template
    return None


def _context_length(config: dict[str, Any], path: Path) -> int:
    """max_position_embeddings, stretched where the rope scaling stretches it.

    linear and dynamic scaling multiply it, yarn multiplies the length the model was first trained on; llama3,
    longrope and Gemma 3 state the stretched length already. (The same reading as vLLM's.)
    """
    length = _positive_int(config, "max_position_embeddings", path)
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or str(config.get("model_type", "")).startswith("gemma3"):
        return length
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    factor = scaling.get("factor")
    if kind not in ("linear", "dynamic", "yarn") or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        return length
    if kind == "yarn":
        original = scaling.get("original_max_position_embeddings")
        length = original if isinstance(original, int) and original > 0 else length
    return int(length * factor)

"""The served model as the api process sees it: names, tokenizer, template, defaults, limits.

Owner process: api. Loaded once, in a thread, when the files are on disk and the engine has told its facts.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from nanoserve import __version__
from nanoserve.api.chat_template import ChatTemplate
from nanoserve.config import ServerConfig
from nanoserve.errors import StartupError
from nanoserve.hub.model_files import GenerationDefaults, ModelFiles, read_model_files
from nanoserve.ipc.messages import EngineFacts
from nanoserve.tokenizer import NoTokenizer, Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Everything a handler needs to know of the model."""

    names: tuple[str, ...]  # the first one is echoed
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults  # empty with --sampling-defaults openai
    facts: EngineFacts
    longest_token_bytes: int  # no token stands for more bytes of text than this
    created: int  # unix seconds
    fingerprint: str  # equal fingerprints and seeds give equal answers

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def max_model_len(self) -> int:
        return self.facts.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size


def load_served_model(config: ServerConfig, model_dir: Path, facts: EngineFacts) -> ServedModel:
    """Reads tokenizer and template; StartupError when they are missing or broken. Blocks for a second or so."""
    files = read_model_files(model_dir, need_weights=False)
    tokenizer = NoTokenizer() if config.model.skip_tokenizer_init else load_tokenizer(model_dir)
    return ServedModel(
        names=config.served_names,
        tokenizer=tokenizer,
        template=None if config.model.skip_tokenizer_init else _template(config, files),
        defaults=files.generation if config.model.sampling_defaults == "model" else GenerationDefaults(),
        facts=facts,
        longest_token_bytes=longest_token_bytes(tokenizer),
        created=int(time.time()),
        fingerprint=_fingerprint(config, facts, files),
    )


def longest_token_bytes(tokenizer: Tokenizer) -> int:
    """An upper bound of the bytes of text one token can stand for.

    Vocabularies spell a token with at least one UTF-8 byte per byte it stands for, in every family we read.
    """
    longest = 1
    for token_id in range(tokenizer.vocab_size):
        token = tokenizer.id_to_token(token_id)
        if token is not None and len(token) * 4 > longest:
            longest = max(longest, len(token.encode("utf-8", "surrogatepass")))
    return longest


def _template(config: ServerConfig, files: ModelFiles) -> ChatTemplate | None:
    source = files.chat_template
    if config.model.chat_template:
        try:
            source = Path(config.model.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"cannot read the chat template: {error}") from error
    if not source:
        return None
    names = {"bos_token": files.bos_token, "eos_token": files.eos_token}
    names |= {"pad_token": files.pad_token, "unk_token": files.unk_token}
    return ChatTemplate(source, {name: token for name, token in names.items() if token is not None})


def _fingerprint(config: ServerConfig, facts: EngineFacts, files: ModelFiles) -> str:
    """Of what an answer depends on: version, weight files (names and sizes), how the engine computes."""
    weights = sorted((path.name, path.stat().st_size) for path in files.weight_files)
    found = (facts.dtype, facts.kv_cache_dtype, facts.device, facts.attention_backend)
    how = (*found, config.model.quantization, config.engine.engine_threads)
    parts = repr((__version__, config.model.model, config.model.revision, weights, how))
    return "fp_" + hashlib.sha256(parts.encode()).hexdigest()[:12]

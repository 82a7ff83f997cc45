"""Real tokenizers of every family, small enough to be trained inside a test, and references to compare with."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from nanoserve.tokenizer import HFTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog yes yes two days later says no.",
    "def main(argument):\n\tfor index in range(12):\n\t\tprint(index ; index)\n",
    "Grüße aus Köln, ça va? naïve café übermäßig señor",
    "日本語のテキストと漢字、ひらがな、カタカナ。你好世界，今天天气很好。",
    "Привет мир, как дела? שלום עולם தமிழ் မြန်မာ ภาษาไทย 한국어",
    "👍🏽 🔥 🌶️ 🏳️‍🌈 👨‍👩‍👧 😀😁😂🤣 URGENCY🌶️",
] * 4
SPECIALS = ["<s>", "</s>", "<|im_end|>"]


@cache
def byte_level() -> HFTokenizer:
    """GPT-2's family: bytes spelled as letters, few merges, so that most characters are split over tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    return _saved(backend)


@cache
def byte_level_stripped() -> HFTokenizer:
    """Bytes as letters, yet the first space is dropped: a text may begin with a part of a character."""
    plain = json.loads(byte_level().backend.to_str())
    steps = [decoders.ByteLevel(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend = Backend.from_str(json.dumps(plain))
    backend.decoder = decoders.Sequence(steps)
    return _saved(backend)


@cache
def word_piece() -> HFTokenizer:
    """BERT's family: `##` goes on with a word, a space stands between the others."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", *SPECIALS])
    backend.train_from_iterator(CORPUS, trainer)
    return _saved(backend)


@cache
def unigram() -> HFTokenizer:
    """T5's family: `▁` for spaces, dropped at the beginning."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    return _saved(backend)


def _sentence_piece_bpe(decoder: Any, prepend: bool) -> HFTokenizer:
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prepend else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=620,
        special_tokens=["<unk>", *SPECIALS, *(f"<0x{value:02X}>" for value in range(256))],
        limit_alphabet=90,
    )
    backend.train_from_iterator([text.replace(" ", "▁") for text in CORPUS], trainer)
    backend.decoder = decoder
    # The trainer takes byte tokens in as special ones; a SentencePiece vocabulary has them as plain tokens.
    plain = json.loads(backend.to_str())
    plain["added_tokens"] = [token for token in plain["added_tokens"] if not token["content"].startswith("<0x")]
    return _saved(Backend.from_str(json.dumps(plain)))


@cache
def llama2() -> HFTokenizer:
    """Llama 2's: byte fallback, a dummy prefix, and a decoder that strips one leading space."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _sentence_piece_bpe(decoders.Sequence(steps), prepend=True)


@cache
def gemma_like() -> HFTokenizer:
    """Gemma's: byte fallback without the strip."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _sentence_piece_bpe(decoders.Sequence(steps), prepend=False)


def _saved(backend: Backend) -> HFTokenizer:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        backend.save(str(path))
        return HFTokenizer(path)


FAMILIES = {
    "byte_level": byte_level,
    "byte_level_stripped": byte_level_stripped,
    "word_piece": word_piece,
    "unigram": unigram,
    "llama2": llama2,
    "gemma_like": gemma_like,
}


def reference(tokenizer: HFTokenizer, token_ids: list[int], tail: list[int] = [], *, skip: bool = True) -> str:  # noqa: B006
    """The right text, the slow way: one decode of everything, less one decode of the prompt's tail.

    Runs of `<0xNN>` tokens are decoded as bytes on their own (see ADR 0004): each run stands in the decode as
    one placeholder token and is put in afterwards.
    """
    special = tokenizer.special_ids if skip else frozenset()
    output = [i for i in token_ids if i not in special]
    context = [i for i in tail if i not in special]
    byte_values = {}
    if tokenizer.token_to_id("<0x00>") is not None:
        byte_values = {tokenizer.token_to_id(f"<0x{value:02X}>"): value for value in range(256)}
    if not byte_values:
        while context and tokenizer.decode(context, skip_special_tokens=False).endswith("\ufffd"):
            context.pop()
        before = tokenizer.decode(context, skip_special_tokens=False)
        return tokenizer.decode(context + output, skip_special_tokens=False)[len(before) :]
    pieces = [tokenizer.id_to_token(i) or "" for i in output]
    text, run = "", b""
    for token_id, piece in zip(output, pieces, strict=True):
        if token_id in byte_values:
            run += bytes([byte_values[token_id]])
            continue
        text += run.decode("utf-8", "replace") + piece.replace("▁", " ")
        run = b""
    text += run.decode("utf-8", "replace")
    strips = tokenizer.decode([tokenizer.token_to_id("▁") or 0], skip_special_tokens=False) == ""
    return text.removeprefix(" ") if strips and not context else text


POISON = 77


class Panic(BaseException):
    """As pyo3 raises a panic of Rust code: no Exception."""


class Breaking(HFTokenizer):
    """A tokenizer whose native code panics on one id."""

    def __init__(self, inner: HFTokenizer) -> None:
        self.__dict__.update(inner.__dict__)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        if any(POISON in row for row in rows):
            raise Panic("index out of bounds")
        return super().decode_batch(rows, skip_special_tokens=skip_special_tokens)

"""Rebuilt tokenizers against independent implementations: SentencePiece itself, and Mistral's tekken.

The vocabularies are those that mistral-common ships; each is turned into GGUF metadata the way llama.cpp's converter
does, rebuilt by ours, and compared with the library it was made for.
"""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest

from nanoserve.hub.gguf_file import open_gguf
from nanoserve.hub.gguf_tokenizer import build_tokenizer
from nanoserve.tokenizer import HFTokenizer, load_tokenizer
from tests.gguf_samples import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, Vocabulary, write_gguf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def library_file(name: str) -> Path:
    import mistral_common

    return Path(str(mistral_common.__file__)).parent / "data" / name


def texts(count: int) -> list[str]:
    """Random joints of runs of spaces, digits, emoji, marks and scripts; no special tokens."""
    pieces = [
        " ", "  ", "   ", "\n", "\n\n", "\t", "7", "2024", "3.14", "a", "Hello", " world", "don't", "I'LL", "naïve",
        "cafe\u0301", "日本語", "中文", "한국어", "ไทย", "မြန်မာ", "தமிழ்", "שלום", "مرحبا", "😀", "👩‍👩‍👧", "🔥",
        "\u00a0",
        "    return x", "...", "!?/\n", "CamelCase", "ÄÖü", "ǅ", "x" * 30, "0" * 9,
    ]  # fmt: skip
    draw = random.Random(3)
    return ["".join(draw.choices(pieces, k=draw.randint(1, 10))) for _ in range(count)]


def rebuilt(tmp_path: Path, vocabulary: Vocabulary) -> HFTokenizer:
    with open_gguf([write_gguf(tmp_path / "m.gguf", vocabulary=vocabulary)]) as file:
        build_tokenizer(file).save(str(tmp_path / "tokenizer.json"))
    return HFTokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_sentencepiece_vocabulary(name: str, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(library_file(name)))
    ids = range(reference.get_piece_size())

    def kind(i: int) -> int:
        checks = ((reference.is_unknown, UNKNOWN), (reference.is_control, CONTROL), (reference.is_byte, BYTE),
                  (reference.is_unused, UNUSED))  # fmt: skip
        return next((value for check, value in checks if check(i)), NORMAL)

    vocabulary = Vocabulary(
        model="llama", pre="default", tokens=[reference.id_to_piece(i) for i in ids], types=[kind(i) for i in ids],
        scores=[reference.get_score(i) for i in ids],
        ids={"bos": reference.bos_id(), "eos": reference.eos_id(), "unknown": reference.unk_id()},
    )  # fmt: skip
    ours = rebuilt(tmp_path, vocabulary)
    plain = load_tokenizer(library_file(name))
    for text in texts(500):
        want = reference.encode(text)
        assert ours.encode(text, add_special_tokens=False) == want, text
        assert ours.encode(text, add_special_tokens=True) == [reference.bos_id(), *want]
        assert plain.encode(text, add_special_tokens=False) == want
        assert ours.decode(want) == reference.decode(want) == plain.decode(want) == text


def test_tekken_vocabulary(tmp_path: Path) -> None:
    pytest.importorskip("mistral_common")
    file = library_file("tekken_240718.json")
    reference = load_tokenizer(file)
    ours = rebuilt(tmp_path, tekken_vocabulary(json.loads(file.read_text())))
    for text in texts(300):
        want = reference.encode(text, add_special_tokens=True)
        assert ours.encode(text, add_special_tokens=True) == want, text
        assert ours.decode(want) == reference.decode(want) == text


def tekken_vocabulary(data: dict[str, Any]) -> Vocabulary:
    """Ids: special tokens first, then byte strings by rank. Merges: each token is cut into the two parts that
    merging by rank leaves before its last step."""
    from tokenizers.pre_tokenizers import ByteLevel

    size, specials = data["config"]["default_vocab_size"], data["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(item["token_bytes"]): item["rank"] for item in data["vocab"][: size - specials]}
    letters = _byte_letters(sorted(ByteLevel.alphabet()))
    tokens = [f"<SPECIAL_{index}>" for index in range(specials)]
    tokens[:3] = ["<unk>", "<s>", "</s>"]
    merges = []
    for token, rank in ranks.items():
        tokens.append("".join(letters[byte] for byte in token))
        if len(token) > 1:
            parts = [bytes([byte]) for byte in token]
            while len(parts) > 2:
                best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
                if ranks.get(parts[best] + parts[best + 1], rank) >= rank:
                    break
                parts[best : best + 2] = [parts[best] + parts[best + 1]]
            if len(parts) == 2:
                merges.append(" ".join("".join(letters[byte] for byte in part) for part in parts))
    types = [CONTROL] * specials + [NORMAL] * len(ranks)
    return Vocabulary(pre="tekken", tokens=tokens, types=types, merges=merges, ids={"bos": 1, "eos": 2, "unknown": 0})


def _byte_letters(alphabet: list[str]) -> dict[int, str]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the rest follow from U+0100 on in order."""
    printable = [letter for letter in alphabet if ord(letter) < 256]
    letters = {ord(letter): letter for letter in printable}
    rest = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + index) for index, byte in enumerate(rest)}


def test_splits_are_those_that_transformers_knows() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    from nanoserve.hub.gguf_tokenizer import _SPLITS

    for name, split in _SPLITS.items():
        assert split == GGUF_PRE_TOKENIZER_SPLITS[name], name

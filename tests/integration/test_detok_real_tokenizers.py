"""The detokenizer over the vocabularies of real models: SmolLM2, Gemma 3, Tekken, SentencePiece v1."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import mistral_common
import pytest

from nanoserve.config import ModelConfig, ServerConfig
from nanoserve.detok.byte_decoder import ByteDecoder
from nanoserve.detok.incremental import Decoder, WindowDecoder
from nanoserve.detok.token_table import TokenTable, build_table, load_or_build_table
from nanoserve.hub.resolve import prepare
from nanoserve.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.slow

_MISTRAL = Path(mistral_common.__file__).parent / "data"
MODELS = ("smollm2", "gemma3", "tekken", "sentencepiece")
# Words that public reports name as broken in streams, and neighbours of theirs.
FIXTURES = (
    "URGENCY🌶️",
    "URGENCY 🌶️ URGENCY🌶️🌶️",
    "မြန်မာဘာသာစကား မင်္ဂလာပါ ကျေးဇူးတင်ပါတယ်",
    "สวัสดีชาวโลก ภาษาไทย",
    "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🔥🔥🔥 1️⃣",
    "தமிழ் வணக்கம், हिन्दी नमस्ते, 日本語と漢字、한국어 안녕하세요",
    "é è ü ñ ç å ø ß œ Ž ą e\u0301 שלום, السلام",
    "plain English text, with  two spaces; a tab\tand a newline\n .",
    " leading space",
)


@cache
def tokenizer_of(model: str) -> Tokenizer:
    if model == "tekken":
        return load_tokenizer(_MISTRAL / "tekken_240911.json")
    if model == "sentencepiece":
        return load_tokenizer(_MISTRAL / "tokenizer.model.v1")
    name = {"smollm2": "smollm2-135m", "gemma3": "gemma3-270m"}[model]
    return load_tokenizer(prepare(ServerConfig(model=ModelConfig(model="sim", tokenizer=name)), lambda *_, **__: None))


@cache
def table_of(model: str) -> TokenTable | None:
    return build_table(tokenizer_of(model))


@cache
def decoders_of(model: str) -> dict[str, Decoder]:
    windows = WindowDecoder(tokenizer_of(model))
    table = table_of(model)
    return {"window": windows} | ({"bytes": ByteDecoder(table, windows)} if table is not None else {})


def stream(decoder: Decoder, token_ids: list[int], tail: list[int], rng: random.Random, *, skip: bool = True) -> str:
    state = decoder.open(tail, skip_special=skip)
    text, at = "", 0
    while at < len(token_ids):
        size = rng.choice((1, 1, 1, 2, 5))
        pieces = decoder.decode([(state, token_ids[at : at + size], rng.random() < 0.5)])[0]
        assert pieces is not None
        text += "".join(pieces)
        at += size
    return text + decoder.flush(state)


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(" " + rng.choice(FIXTURES)) for _ in range(rng.randrange(60)))


@pytest.mark.parametrize("model", MODELS)
def test_bytes_are_proved_for_all_but_the_slow_tokenizer(model: str) -> None:
    assert (table_of(model) is None) == (model == "sentencepiece")


@pytest.mark.rule(43)
@pytest.mark.parametrize("model", MODELS)
def test_text_comes_out_as_one_decode(model: str) -> None:
    tokenizer, rng = tokenizer_of(model), random.Random(1)
    for text in [*FIXTURES, *(random_text(rng) for _ in range(100))]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for decoder in decoders_of(model).values():
            assert stream(decoder, ids, [], rng) == tokenizer.decode(ids)
            tail = tokenizer.encode("Once upon a time", add_special_tokens=False)[-5:]
            with_tail = tokenizer.decode(tail + ids)
            assert stream(decoder, ids, tail, rng) == with_tail[len(tokenizer.decode(tail)) :]


@pytest.mark.parametrize("model", ["smollm2", "tekken"])
def test_any_ids_come_out_as_one_decode_of_a_byte_level_vocabulary(model: str) -> None:
    tokenizer, rng = tokenizer_of(model), random.Random(2)
    table = table_of(model)
    assert table is not None
    parts = list(table.parts)
    for turn in range(200):
        ids = [rng.choice(parts) if rng.random() < 0.4 else rng.randrange(tokenizer.vocab_size) for _ in range(40)]
        skip = turn % 2 == 0
        wanted = tokenizer.decode(ids, skip_special_tokens=skip)
        for decoder in decoders_of(model).values():
            assert stream(decoder, ids, [], rng, skip=skip) == wanted


@pytest.mark.parametrize("model", ["gemma3", "sentencepiece"])
def test_any_ids_of_a_byte_fallback_vocabulary(model: str) -> None:
    """Against our reading of byte runs (ADR 0004), and against the library's wherever no run is invalid."""
    tokenizer, rng = tokenizer_of(model), random.Random(3)
    bytes_of = {tokenizer.token_to_id(f"<0x{value:02X}>"): value for value in range(256)}
    byte_ids = [i for i in bytes_of if i is not None]
    plain = tokenizer.encode("x", add_special_tokens=False)
    num_equal = 0
    for turn in range(200):
        share = (0.0, 0.1, 0.5)[turn % 3]
        ids = [rng.choice(byte_ids) if rng.random() < share else rng.randrange(tokenizer.vocab_size) for _ in range(30)]
        ids = [i for i in ids if i not in tokenizer.special_ids]
        texts = {name: stream(decoder, ids, plain, rng) for name, decoder in decoders_of(model).items()}
        assert len(set(texts.values())) == 1
        runs = [[]]  # type: list[list[int]]
        for token_id in ids:
            if token_id in bytes_of:
                runs[-1].append(bytes_of[token_id])
            elif runs[-1]:
                runs.append([])
        if all(bytes(run).decode("utf-8", "replace").count("\ufffd") == 0 for run in runs):
            whole = tokenizer.decode(plain + ids)
            assert texts["window"] == whole[len(tokenizer.decode(plain)) :]
            num_equal += 1
    assert num_equal > 50


def test_gemma_emoji_spelled_in_bytes() -> None:
    tokenizer = tokenizer_of("gemma3")
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") or 0 for byte in "🫨€".encode()]
    for decoder in decoders_of("gemma3").values():
        assert stream(decoder, ids, [], random.Random(0)) == "🫨€" == tokenizer.decode(ids)


def test_the_proof_is_kept_under_the_hash_of_the_tokenizers_file(tmp_path: Path) -> None:
    tokenizer, path = tokenizer_of("tekken"), _MISTRAL / "tekken_240911.json"
    first = load_or_build_table(tokenizer, path, tmp_path)
    (kept,) = (tmp_path / "token-tables").iterdir()
    assert load_or_build_table(tokenizer_of("smollm2"), path, tmp_path) == first  # read, not built
    kept.write_bytes(b"broken")
    assert load_or_build_table(tokenizer, path, tmp_path) == first
    assert load_or_build_table(tokenizer, path, Path("/proc/none")) == first  # a cache that cannot be written

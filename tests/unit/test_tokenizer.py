"""The tokenizers: the protocol's promises, and what the converter builds from GGUF vocabularies."""

from __future__ import annotations

import importlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from nanoserve.errors import StartupError
from nanoserve.hub.gguf_file import open_gguf
from nanoserve.hub.gguf_tokenizer import KNOWN_PRE_TOKENIZERS, build_tokenizer
from nanoserve.tokenizer import HFTokenizer, load_tokenizer
from tests.gguf_samples import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary, byte_vocabulary, write_gguf


def built(tmp_path: Path, vocabulary: Vocabulary) -> HFTokenizer:
    with open_gguf([write_gguf(tmp_path / "m.gguf", vocabulary=vocabulary)]) as file:
        build_tokenizer(file).save(str(tmp_path / "tokenizer.json"))
    return HFTokenizer(tmp_path / "tokenizer.json")


def pieces(tokenizer: HFTokenizer, text: str, *, add_special_tokens: bool = False) -> list[str | None]:
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    assert tokenizer.encode_batch([text], add_special_tokens=add_special_tokens) == [ids]
    return [tokenizer.id_to_token(token_id) for token_id in ids]


# ---- the protocol -------------------------------------------------------------------------------------------------


def test_protocol_over_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, byte_vocabulary(["<s>", "</s>"], ["h i"], ids={"bos": 257, "eos": 258}))
    assert tokenizer.vocab_size == 259
    assert tokenizer.special_ids == {257, 258}
    ids = tokenizer.encode("hi<s> \x80é", add_special_tokens=False)
    assert ids[:2] == [256, 257]
    assert tokenizer.decode(ids) == "hi \x80é"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hi<s> \x80é"
    assert tokenizer.decode_batch([ids, [], [256]], skip_special_tokens=False) == ["hi<s> \x80é", "", "hi"]
    assert tokenizer.decode([256, 100_000, 256]) == "hihi"  # an id without a token decodes to nothing
    assert (tokenizer.id_to_token(256), tokenizer.id_to_token(100_000)) == ("hi", None)
    assert (tokenizer.token_to_id("<s>"), tokenizer.token_to_id("nope")) == (257, None)
    with pytest.raises(OverflowError):
        tokenizer.decode_batch([[1 << 32]])


@pytest.mark.rule(51)
def test_spaces_are_not_cleaned_up(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, byte_vocabulary())
    for text in (" ; ; ;", "do n't , he 's .", "a  b", " leading", "trailing "):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.rule(23)
def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    """A tokenizer.json made for training cuts at its length: a server must not cut prompts silently."""
    built(tmp_path, byte_vocabulary(["<pad>"]))
    path = tmp_path / "tokenizer.json"
    data = json.loads(path.read_text())
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 256,
                       "pad_type_id": 0, "pad_token": "<pad>"}  # fmt: skip
    path.write_text(json.dumps(data))
    tokenizer = HFTokenizer(path)
    assert len(tokenizer.encode("x" * 100, add_special_tokens=True)) == 100
    assert tokenizer.encode("", add_special_tokens=True) == []
    assert [len(row) for row in tokenizer.encode_batch(["a", "bcd"], add_special_tokens=True)] == [1, 3]


@pytest.mark.rule(23)
def test_one_object_serves_many_threads(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, byte_vocabulary(["<s>"], ["a b", "ab c"]))
    texts = [("abc é" * n + str(n)) for n in range(1, 40)]
    want = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    faults: list[str] = []

    def work(start: int) -> None:
        for turn in range(200):
            index = (start + turn) % len(texts)
            ids = tokenizer.encode(texts[index], add_special_tokens=True)
            if ids != want[index] or tokenizer.decode(ids) != texts[index]:
                faults.append(texts[index])

    threads = [threading.Thread(target=work, args=(start,)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert faults == []


def test_load_finds_the_tokenizer_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
    with pytest.raises(StartupError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "gone.json")
    built(tmp_path, byte_vocabulary(["<s>"]))
    (tmp_path / "tokenizer.model").write_bytes(b"junk")  # tokenizer.json goes first
    assert load_tokenizer(tmp_path).vocab_size == 257
    assert load_tokenizer(tmp_path / "tokenizer.json").vocab_size == 257
    (tmp_path / "tokenizer.json").write_text("nonsense")
    with pytest.raises(StartupError, match=r"cannot read the tokenizer .*tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "library", "package"),
    [("tekken.json", "mistral_common", "mistral-common"), ("tokenizer.model", "sentencepiece", "sentencepiece")],
)
def test_a_missing_library_is_named(
    name: str, library: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def absent(module: str, *args: Any) -> Any:
        if module.startswith(library):
            raise ImportError(module)
        return real(module, *args)

    monkeypatch.setattr(importlib, "import_module", absent)
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(StartupError, match=f"{name} needs the package {package}: pip install {package}"):
        load_tokenizer(tmp_path)


# ---- byte-level vocabularies out of a GGUF --------------------------------------------------------------------------


def test_digits_are_split_for_smollm_only(tmp_path: Path) -> None:
    merges = ["1 2", "Ġ 1", "Ġ Ġ"]
    smollm = built(tmp_path, byte_vocabulary(merges=merges, pre="smollm"))
    assert pieces(smollm, "12") == ["1", "2"]
    assert pieces(smollm, "a  7") == ["a", "ĠĠ", "7"]  # the run of spaces stays whole before a digit
    plain = built(tmp_path, byte_vocabulary(merges=merges, pre="gpt-2"))
    assert pieces(plain, "12") == ["12"]
    assert pieces(plain, "a  7") == ["a", "Ġ", "Ġ", "7"]


def test_each_pre_tokenizer_groups_digits_its_way(tmp_path: Path) -> None:
    merges = ["1 1", "11 1", "11 11"]
    found = {
        pre: [len(piece or "") for piece in pieces(built(tmp_path, byte_vocabulary(merges=merges, pre=pre)), "1111")]
        for pre in KNOWN_PRE_TOKENIZERS
    }
    whole, threes, single = [4], [3, 1], [1, 1, 1, 1]
    assert found == {
        "llama-bpe": threes, "llama3": threes, "qwen2": single, "deepseek-r1-qwen": single, "tekken": single,
        "smollm": single, "gpt-2": whole, "gpt2": whole, "default": whole,
    }  # fmt: skip


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="pre-tokenizer 'bailingmoe' is not known"):
        built(tmp_path, byte_vocabulary(pre="bailingmoe"))
    assert pieces(built(tmp_path, byte_vocabulary(pre=None)), "ab") == ["a", "b"]  # old files: GPT-2's


def test_llama3_takes_whole_words_and_a_begin_token(tmp_path: Path) -> None:
    """`abc` has no merge: only the look-up of whole words finds it."""
    vocabulary = byte_vocabulary(["<s>", "</s>"], pre="llama-bpe", ids={"bos": 256, "eos": 257})
    vocabulary.tokens.append("abc")
    assert vocabulary.types is not None
    vocabulary.types.append(NORMAL)
    tokenizer = built(tmp_path, vocabulary)
    assert pieces(tokenizer, "abc", add_special_tokens=True) == ["<s>", "abc"]
    vocabulary.extra = {"tokenizer.ggml.add_bos_token": False}
    assert pieces(built(tmp_path, vocabulary), "abc", add_special_tokens=True) == ["abc"]


def test_qwen2_normalizes(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, byte_vocabulary(pre="qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301", add_special_tokens=False)) == "é"


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary(["<|end|>", "<think>", "<｜odd▁name｜>"], ids={"eos": 256})
    assert vocabulary.types is not None
    vocabulary.types[257] = USER_DEFINED
    tokenizer = built(tmp_path, vocabulary)
    assert tokenizer.special_ids == {256, 258}
    assert pieces(tokenizer, "<think>a<|end|><｜odd▁name｜>") == ["<think>", "a", "<|end|>", "<｜odd▁name｜>"]
    assert tokenizer.decode([257, 256, 258]) == "<think>"
    assert tokenizer.decode([257, 256, 258], skip_special_tokens=False) == "<think><|end|><｜odd▁name｜>"


@pytest.mark.rule(21)
def test_begin_and_end_tokens_are_added_where_the_file_says(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary(["<s>", "</s>"], ids={"bos": 256, "eos": 257})
    for bos, eos, want in ((None, None, [64]), (True, None, [256, 64]), (True, True, [256, 64, 257])):
        vocabulary.extra = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
        tokenizer = built(tmp_path, vocabulary)
        letter = tokenizer.token_to_id("a")
        assert tokenizer.encode("a", add_special_tokens=True) == [letter if i == 64 else i for i in want]
        assert tokenizer.encode("a", add_special_tokens=False) == [letter]


def test_broken_vocabularies_are_one_line(tmp_path: Path) -> None:
    good = byte_vocabulary()
    for change, words in (
        ({"merges": ["a b c"]}, "does not have two parts"),
        ({"merges": ["zz y"]}, "broken vocabulary"),
        ({"types": [NORMAL]}, "token types do not cover"),
        ({"tokens": []}, "no vocabulary"),
        ({"model": "t5"}, "'t5' is not supported"),
        ({"model": "llama", "scores": [1.0]}, "scores do not cover"),
    ):
        vocabulary = Vocabulary(**{**vars(good), **change})  # type: ignore[arg-type]
        with pytest.raises(StartupError, match=words) as caught:
            built(tmp_path, vocabulary)
        assert "\n" not in str(caught.value)


# ---- SentencePiece vocabularies out of a GGUF -----------------------------------------------------------------------


def spm_vocabulary(**extra: Any) -> Vocabulary:
    """<unk>, <s>, </s>, 256 bytes, then pieces, the earlier the better."""
    words = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "abc", "  "]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<tag>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), USER_DEFINED]
    types[tokens.index("  ")] = USER_DEFINED
    return Vocabulary(
        model="llama", pre="default", tokens=tokens, types=types, scores=[-float(i) for i in range(len(tokens))],
        ids={"bos": 1, "eos": 2, "unknown": 0}, extra=extra,
    )  # fmt: skip


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, spm_vocabulary())
    # `▁a` scores better than `ab`, so it is merged first.
    assert pieces(tokenizer, "ab", add_special_tokens=True) == ["<s>", "▁ab"]
    assert pieces(tokenizer, "abc") == ["▁ab", "c"]
    assert pieces(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab é", add_special_tokens=True)) == "ab é"
    assert tokenizer.special_ids == {0, 1, 2}
    assert pieces(tokenizer, "b<tag>c") == ["▁", "b", "<tag>", "▁", "c"]


def test_sentencepiece_without_a_space_before_the_text(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = built(tmp_path, spm_vocabulary(**extra))
    assert pieces(tokenizer, "abc", add_special_tokens=True) == ["abc"]
    assert pieces(tokenizer, " ab") == ["▁ab"]
    assert tokenizer.decode(tokenizer.encode(" ab", add_special_tokens=False)) == " ab"
    # A run of spaces is matched before anything is merged, also before a better-scored `▁a`.
    assert pieces(tokenizer, "  a") == ["▁▁", "a"]
    assert tokenizer.decode(tokenizer.encode("b  a", add_special_tokens=False)) == "b  a"

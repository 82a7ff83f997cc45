"""tokenizer.json, tokenizer_config.json and chat template out of GGUF metadata.

Used by the converter only. A GGUF stores the vocabulary, the merges or scores, and the names of two algorithms
(`tokenizer.ggml.model` and `.pre`); the rest of the pipeline is fixed by those names and rebuilt here. A name that
is not known is refused: a wrong pre-tokenizer serves text that looks right and is not.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from nanoserve.errors import StartupError
from nanoserve.hub.gguf_config import TokenType, token_id, token_types, vocabulary
from nanoserve.hub.gguf_file import GgufFile

_SPACE = "▁"

# Splits of the text before byte-level BPE, as published in each model's tokenizer.json.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "tekken": _TEKKEN}
_PLAIN = ("gpt-2", "gpt2", "default")  # GPT-2's own split, which is ByteLevel's
KNOWN_PRE_TOKENIZERS = (*_SPLITS, "smollm", *_PLAIN)
# These look up a whole word in the vocabulary before they apply merges.
_IGNORE_MERGES = ("llama-bpe", "llama3", "tekken")
# Byte-level files that say nothing about the begin token mean "yes" with these, "no" otherwise (llama.cpp's reading).
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "tekken")


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The file's tokenizer, ready to be saved as tokenizer.json. Raises StartupError for an algorithm or
    pre-tokenizer that is not known, and for a vocabulary that does not hold together."""
    model = file.metadata.get("tokenizer.ggml.model")
    tokens = vocabulary(file)
    if not tokens:
        raise StartupError(f"{file.name} has no vocabulary")
    types = token_types(file)
    try:
        if model == "gpt2":
            tokenizer = _byte_level(file, tokens)
        elif model == "llama":
            tokenizer = _sentencepiece(file, tokens, types)
        else:
            raise StartupError(f"{file.name}: tokenizer {model!r} is not supported (only gpt2 and llama)")
        _add_tokens(tokenizer, file, tokens, types)
        _add_template(tokenizer, file, tokens)
    except StartupError:
        raise
    except Exception as exc:  # the library raises bare Exception, for merges without tokens and the like
        raise StartupError(f"{file.name}: broken vocabulary: {' '.join(str(exc).split())[:200]}") from exc
    return tokenizer


def build_tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """tokenizer_config.json, without the chat template."""
    tokens = vocabulary(file)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # transformers then takes tokenizer.json as it is
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        found = token_id(file, key)
        if found is not None:
            config[f"{name}_token"] = tokens[found]
    length = file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length")
    if isinstance(length, int):
        config["model_max_length"] = length
    return config


def chat_template(file: GgufFile) -> str | None:
    """The file's default chat template, Jinja source."""
    template = file.metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) and template else None


def _flag(file: GgufFile, name: str, default: bool) -> bool:
    return bool(file.metadata.get(f"tokenizer.ggml.{name}", default))


# ---- byte-level BPE -------------------------------------------------------------------------------------------


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """GPT-2's scheme: text is split into words, each word spelled in an alphabet of 256 letters, then merged."""
    pre = _pre_tokenizer_name(file)
    if pre not in KNOWN_PRE_TOKENIZERS:
        known = ", ".join(KNOWN_PRE_TOKENIZERS)
        raise StartupError(
            f"{file.name}: pre-tokenizer {pre!r} is not known (only {known}); name the right one with --tokenizer"
        )
    merges = [tuple(merge.split(" ")) for merge in file.metadata.get("tokenizer.ggml.merges") or ()]
    if any(len(merge) != 2 for merge in merges):
        raise StartupError(f"{file.name}: a merge does not have two parts")
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre in _IGNORE_MERGES))
    prefix = _flag(file, "add_space_prefix", False)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if pre in _SPLITS:
        steps: list[Any] = [
            pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif pre == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=prefix)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def _pre_tokenizer_name(file: GgufFile) -> str:
    return str(file.metadata.get("tokenizer.ggml.pre") or "default")


# ---- SentencePiece BPE ------------------------------------------------------------------------------------------


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """SentencePiece's scheme: spaces become U+2581, pairs merge by the score of the result, the rest falls to bytes.

    A space is put before the text, and after each special token, where the file asks for it (the default), as
    llama.cpp and the first Llama tokenizers do; the decoder takes one leading space off again.
    """
    # Runs of spaces are stored as real spaces, but are looked up after the spaces were replaced.
    spelled = [_SPACE * len(token) if len(token) > 1 and not token.strip(" ") else token for token in tokens]
    vocab = {token: index for index, token in enumerate(spelled)}
    unknown = token_id(file, "unknown")
    tokenizer = Tokenizer(
        BPE(
            vocab=vocab,
            merges=_merges_from_scores(file, spelled, types, vocab),
            unk_token=None if unknown is None else spelled[unknown],
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in types,
        )
    )
    replace = normalizers.Replace(" ", _SPACE)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _flag(file, "add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(
    file: GgufFile, tokens: list[str], types: list[int], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best result first.

    SentencePiece merges whichever neighbours give the best-scoring token, so a pair's rank is its result's score;
    user-defined tokens come before all others, as it matches them before it merges anything. Ids break ties.
    """
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise StartupError(f"{file.name}: scores do not cover the vocabulary")
    unmergeable = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE)
    mergeable = [index for index, kind in enumerate(types) if kind not in unmergeable]
    parts = {tokens[index] for index in mergeable}
    mergeable.sort(key=lambda index: (0, 0.0) if types[index] == TokenType.USER_DEFINED else (1, -scores[index]))
    merges = []
    for index in mergeable:
        token = tokens[index]
        if vocab[token] != index:
            continue  # spelled twice in the file: the later id is the one that text gets
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in parts and right in parts:
                merges.append((left, right))
    return merges


# ---- both -------------------------------------------------------------------------------------------------------


def _add_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: list[str], types: list[int]) -> None:
    """Control tokens become special; user-defined ones are matched whole but stay text. All keep their ids."""
    always = {token_id(file, name) for name in ("bos", "eos", "eot", "eom")}
    special, plain = [], []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if tokenizer.token_to_id(token) != index:
            continue  # a run of spaces, respelled: merges make it
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN) or index in always:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_template(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    """Begin and end tokens around the text, where the file asks for them."""
    bos, eos = token_id(file, "bos"), token_id(file, "eos")
    sentencepiece = file.metadata["tokenizer.ggml.model"] == "llama"
    bos_default = sentencepiece or _pre_tokenizer_name(file) in _BOS_BY_DEFAULT
    begin = [tokens[bos]] if bos is not None and _flag(file, "add_bos_token", bos_default) else []
    end = [tokens[eos]] if eos is not None and _flag(file, "add_eos_token", False) else []
    if not begin and not end:
        return
    ids = {tokens[index]: index for index in (bos, eos) if index is not None}
    template = processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, *(f"{token}:1" for token in begin), "$B:1", *(f"{token}:1" for token in end)],
        special_tokens=[(token, ids[token]) for token in dict.fromkeys([*begin, *end])],
    )
    if sentencepiece:
        tokenizer.post_processor = template
    else:
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])

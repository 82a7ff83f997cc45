"""`nanoserve bench detok-table`: how many streams come out wrong, by detokenizer, on text of two kinds.

600 random strings of plain English and 600 with emoji, CJK and accents, as the ids that the tokenizer makes of them,
one id a step; half of them end inside their last character, as an answer that hits `max_tokens` does. Wrong is any
stream whose deltas joined are not one decode of its ids up to the last whole character, and one U+FFFD for an
unfinished one behind it. (`tokenizers` itself says that for byte-level vocabularies; with byte fallback it spoils
whole characters before the unfinished one too.) The four: one decode per token; DecodeStream as vLLM uses it; the
window rule of SGLang; ours. The rules of others are written here from their descriptions, for this table only.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence

from tokenizers.decoders import DecodeStream

from nanoserve import bench
from nanoserve.config import DetokConfig, ModelConfig, ServerConfig
from nanoserve.detok.incremental import REPLACEMENT
from nanoserve.detok.token_table import build_table
from nanoserve.detok.vocabulary import Vocabulary
from nanoserve.hub.resolve import prepare
from nanoserve.tokenizer import HFTokenizer, load_tokenizer

NUM_STRINGS = 600
PROMPT = "Go on:"
WORDS = [
    "the",
    "and",
    "of",
    "to",
    "a",
    "in",
    "is",
    "it",
    "that",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
]
MARKS = [", ", ". ", "; ", "! ", "\n", " - ", "  ", "'s ", "?\n\n"]
OTHERS = [
    "🔥", "👍🏽", "👨‍👩‍👧", "🏳️‍🌈", "🌶️", "日本語", "漢字", "你好", "한국어", "ไทย", "မြန်မာ", "தமிழ்", "हिन्दी",
    "🫨", "ᚠᚢ", "𓀀", "𝔄", "é", "ü", "ñ", "ß", "Ž", "ø", "e\u0301", "Привет", "שלום", "€", "…", "“quoted”",
]  # fmt: skip


def english(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) + rng.choice([" ", " ", " ", *MARKS]) for _ in range(rng.randint(5, 60)))


def mixed(rng: random.Random) -> str:
    return "".join(rng.choice([*OTHERS, rng.choice(WORDS) + " "]) for _ in range(rng.randint(5, 60)))


def right_text(tokenizer: HFTokenizer, prompt: list[int], token_ids: list[int]) -> str:
    """What the stream has to say; the text itself is known to hold no U+FFFD."""
    before = len(tokenizer.decode(prompt))
    for end in range(len(token_ids), -1, -1):
        text = tokenizer.decode(prompt + token_ids[:end])
        if REPLACEMENT not in text:
            break
    return text[before:] + (REPLACEMENT if end < len(token_ids) else "")


def naive(tokenizer: HFTokenizer, prompt: list[int], token_ids: list[int]) -> str:
    """One decode per token."""
    return "".join(tokenizer.decode([token_id]) for token_id in token_ids)


def decode_stream(tokenizer: HFTokenizer, prompt: list[int], token_ids: list[int]) -> str:
    """`tokenizers`' DecodeStream, primed with the prompt; what it still holds at the end is not asked for."""
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    return "".join(stream.step(tokenizer.backend, token_id) or "" for token_id in token_ids)


def sglang_windows(tokenizer: HFTokenizer, prompt: list[int], token_ids: list[int]) -> str:
    """The rule of SGLang's detokenizer: windows from five prompt ids on; committed when the new text is whole.

    Text that is not whole is shown up to its last space or CJK character, and what has been shown is remembered; the
    end of the request shows the rest.
    """
    ids = prompt[-5:]
    surr, read = 0, len(ids)
    committed, shown = "", 0
    out = ""
    for step, token_id in enumerate(token_ids):
        ids.append(token_id)
        before = tokenizer.decode(ids[surr:read])
        new = tokenizer.decode(ids[surr:])[len(before) :]
        if step == len(token_ids) - 1:
            text = committed + new
        elif new and not new.endswith(REPLACEMENT):
            committed += new
            surr, read = read, len(ids)
            text = committed
        else:
            text = committed + _printable(new)
        if len(text) > shown:
            out += text[shown:]
            shown = len(text)
    return out


def _printable(text: str) -> str:
    """What may be shown of text that is not whole: to the end of its last line, CJK character or word."""
    if text.endswith("\n"):
        return text
    if text and _is_cjk(text[-1]):
        return text
    if len(text) > 1 and _is_cjk(text[-2]):
        return text[:-1]
    return text[: text.rfind(" ") + 1]


def _is_cjk(char: str) -> bool:
    return any(low <= ord(char) <= high for low, high in ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0xF900, 0xFAFF)))


class Ours:
    """Both decoders; a stream is right only if both are."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        table = build_table(tokenizer)
        kinds = ("window", "bytes") if table is not None else ("window",)
        self._decoders = [
            Vocabulary(tokenizer, DetokConfig(detokenizer=kind).detokenizer, table).decoder for kind in kinds
        ]

    def __call__(self, tokenizer: HFTokenizer, prompt: list[int], token_ids: list[int]) -> str:
        texts = set()
        for decoder in self._decoders:
            stream = decoder.open(prompt[-5:], skip_special=True)
            pieces = [decoder.decode([(stream, [token_id], False)])[0] for token_id in token_ids]
            texts.add("".join("".join(piece or ()) for piece in pieces) + decoder.flush(stream))
        return texts.pop() if len(texts) == 1 else "the two decoders differ"


Detokenizer = Callable[[HFTokenizer, list[int], list[int]], str]


def count_wrong(tokenizer: HFTokenizer, num_strings: int = NUM_STRINGS, seed: int = 0) -> dict[str, dict[str, int]]:
    """Wrong streams per detokenizer and kind of text."""
    detokenizers: dict[str, Detokenizer] = {
        "naive per token": naive,
        "DecodeStream, as vLLM": decode_stream,
        "SGLang's windows": sglang_windows,
        "nanoserve": Ours(tokenizer),
    }
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False)
    table: dict[str, dict[str, int]] = {name: {} for name in detokenizers}
    for kind, make in (("english", english), ("mixed", mixed)):
        rng = random.Random(seed)
        for name in detokenizers:
            table[name][kind] = 0
        for place in range(num_strings):
            token_ids = tokenizer.encode(" " + make(rng), add_special_tokens=False)
            if place % 2 and len(token_ids) > 2:  # an answer may end anywhere
                del token_ids[rng.randrange(len(token_ids) // 2, len(token_ids)) :]
            right = right_text(tokenizer, prompt, token_ids)
            for name, detokenize in detokenizers.items():
                table[name][kind] += detokenize(tokenizer, prompt, token_ids) != right
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("detok-table", __doc__)
    parser.add_argument("--tokenizer", default="smollm2-135m", help="as --tokenizer of the server")
    parser.add_argument("--strings", type=int, default=NUM_STRINGS, help="of each kind")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    options = parser.parse_args(argv)
    config = ServerConfig(model=ModelConfig(model="sim", tokenizer=options.tokenizer))
    tokenizer = load_tokenizer(prepare(config, lambda *_, **__: None))
    if not isinstance(tokenizer, HFTokenizer):
        raise SystemExit("the comparison needs a tokenizer.json")
    table = count_wrong(tokenizer, options.strings)
    if options.json:
        print(json.dumps({"tokenizer": options.tokenizer, "strings": options.strings, "wrong": table}, indent=2))
        return 0
    print(f"wrong streams of {options.strings}, {options.tokenizer}\n\n| detokenizer | English | emoji, CJK, accents |")
    print("|---|---|---|")
    for name, wrong in table.items():
        print(f"| {name} | {wrong['english']} | {wrong['mixed']} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

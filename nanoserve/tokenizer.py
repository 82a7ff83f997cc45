"""The tokenizer as every process sees it, and its implementations: tokenizer.json, tekken.json, tokenizer.model.

Used by api (encode), detok (decode_batch, token bytes) and hub (self-checks). Imports neither torch nor
transformers: `tokenizers` costs 20 ms and 15 MB, `transformers` 3.8 s and 400 MB. The two older file forms need
libraries that are imported only when such a file is met.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from nanoserve.errors import RequestError, StartupError


class Tokenizer(Protocol):
    """Text <-> ids. Implementations are safe to call from several threads at once."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that has a token (added tokens included)."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of the text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """One text per row. Ids without a token decode to nothing; ids over 2**32 raise OverflowError."""
        ...

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, None for an id without one."""
        ...

    def token_to_id(self, token: str) -> int | None: ...


class NoTokenizer:
    """In the place of a tokenizer with `--skip-tokenizer-init`: whoever needs text is told so."""

    vocab_size = 0
    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        raise _unavailable("Text in a prompt")

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        raise _unavailable("Text in a prompt")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raise _unavailable("Text of token ids")

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        raise _unavailable("Text of token ids")

    def id_to_token(self, token_id: int) -> str | None:
        return None

    def token_to_id(self, token: str) -> int | None:
        return None


def _unavailable(what: str) -> RequestError:
    return RequestError(f"{what} is unavailable when the server runs with skip_tokenizer_init=True.")


class HFTokenizer:
    """A tokenizer.json through the `tokenizers` library.

    Its objects are safe to share between threads as long as nobody changes truncation or padding, so both are
    turned off here, once, whatever the file says: a prompt is never cut or padded silently. Spaces are never
    cleaned up in decoded text.
    """

    def __init__(self, path: Path) -> None:
        """Reads `path`, a tokenizer.json. Raises StartupError when it is missing or not a tokenizer."""
        from tokenizers import Tokenizer as Backend

        try:
            self.backend = Backend.from_file(str(path))
        except Exception as exc:  # the library raises bare Exception for every fault
            raise StartupError(f"cannot read the tokenizer {path}: {_one_line(exc)}") from exc
        self.backend.no_truncation()
        self.backend.no_padding()
        added = self.backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The fast form keeps no character offsets, which saves a tenth to a half of the time.
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        return self.backend.decode_batch(rows, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)


class TekkenTokenizer:
    """A tekken.json (Mistral) through mistral-common. `add_special_tokens` puts the begin-of-text token first."""

    def __init__(self, path: Path) -> None:
        """Raises StartupError when mistral-common is not installed or `path` is not a tekken file."""
        tekken = _import_optional("mistral_common.tokens.tokenizers.tekken", "mistral-common", path)
        base = _import_optional("mistral_common.tokens.tokenizers.base", "mistral-common", path)
        try:
            self._backend = tekken.Tekkenizer.from_file(path)
        except Exception as exc:
            raise StartupError(f"cannot read the tokenizer {path}: {_one_line(exc)}") from exc
        self._policy = base.SpecialTokenPolicy
        self._special_ids = frozenset(range(self._backend.num_special_tokens))
        # A piece of a character prints as U+FFFD, like many others: such a name says nothing.
        names = enumerate(self._backend.vocab())
        self._ids = {name: token_id for token_id, name in names if "\ufffd" not in name}

    @property
    def vocab_size(self) -> int:
        return int(self._backend.n_words)

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._backend.encode(text, bos=add_special_tokens, eos=False))

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        known = _known_ids(ids, self.vocab_size)
        policy = self._policy.IGNORE if skip_special_tokens else self._policy.KEEP
        return str(self._backend.decode(known, special_token_policy=policy))

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]

    def id_to_token(self, token_id: int) -> str | None:
        return str(self._backend.id_to_piece(token_id)) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, which its name does not tell; for ids inside the vocabulary."""
        return bytes(self._backend.id_to_byte_piece(token_id, self._policy.KEEP))


class SentencePieceTokenizer:
    """A tokenizer.model through sentencepiece. `add_special_tokens` puts the begin-of-text token first."""

    def __init__(self, path: Path) -> None:
        """Raises StartupError when sentencepiece is not installed or `path` is not a model of it."""
        library = _import_optional("sentencepiece", "sentencepiece", path)
        try:
            self._backend = library.SentencePieceProcessor(model_file=str(path))
        except Exception as exc:
            raise StartupError(f"cannot read the tokenizer {path}: {_one_line(exc)}") from exc
        backend = self._backend
        ids = range(backend.get_piece_size())
        self._special_ids = frozenset(i for i in ids if backend.is_control(i) or backend.is_unknown(i))

    @property
    def vocab_size(self) -> int:
        return int(self._backend.get_piece_size())

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = list(self._backend.encode(text))
        bos = self._backend.bos_id()
        return [bos, *ids] if add_special_tokens and bos >= 0 else ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The library drops control tokens itself; their names are put back between the runs where wanted."""
        known = _known_ids(ids, self.vocab_size)
        if skip_special_tokens:
            return str(self._backend.decode([i for i in known if i not in self._special_ids]))
        parts: list[str] = []
        run: list[int] = []
        for token_id in known:
            if token_id in self._special_ids:
                parts += [self._backend.decode(run), self._backend.id_to_piece(token_id)]
                run = []
            else:
                run.append(token_id)
        return "".join([*parts, self._backend.decode(run)])

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]

    def id_to_token(self, token_id: int) -> str | None:
        return str(self._backend.id_to_piece(token_id)) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        token_id = int(self._backend.piece_to_id(token))
        return token_id if self.id_to_token(token_id) == token else None


# In this order: where a directory has several, the first is the exact and the fast one.
TOKENIZER_FILES: dict[str, type[HFTokenizer] | type[TekkenTokenizer] | type[SentencePieceTokenizer]] = {
    "tokenizer.json": HFTokenizer,
    "tekken.json": TekkenTokenizer,
    "tokenizer.model": SentencePieceTokenizer,
}


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model directory, or of one tokenizer file.

    A file is read by its name (tekken*.json, *.model*), any other .json as a tokenizer.json. Raises StartupError,
    one line, when there is none, when it is broken, or when the library for it is not installed.
    """
    if path.is_dir():
        for name, kind in TOKENIZER_FILES.items():
            if (path / name).is_file():
                return kind(path / name)
        raise StartupError(f"no tokenizer in {path}: none of {', '.join(TOKENIZER_FILES)}")
    if not path.is_file():
        raise StartupError(f"no tokenizer at {path}")
    if path.name.startswith("tekken"):
        return TekkenTokenizer(path)
    if ".model" in path.name:  # also tokenizer.model.v3 and the like
        return SentencePieceTokenizer(path)
    return HFTokenizer(path)


def _known_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """The ids that have a token: a decoder of ours never raises on one that has none (the protocol's word)."""
    if any(token_id >= 1 << 32 or token_id < 0 for token_id in ids):
        raise OverflowError("token id out of range")
    return [token_id for token_id in ids if token_id < vocab_size]


def _import_optional(module: str, package: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise StartupError(f"{path.name} needs the package {package}: pip install {package}") from exc


def _one_line(exc: Exception) -> str:
    return " ".join(str(exc).split())[:300] or type(exc).__name__

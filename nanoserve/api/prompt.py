"""Prompts: the four shapes of `prompt`, chat messages, and the rules of length.

Owner process: api. Everything here is pure but `encode_prompts`, which waits for the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nanoserve.api.encoding import Encoder
from nanoserve.api.model import ServedModel
from nanoserve.api.schemas import UNSUPPORTED_PARAMETER, json_words, problem
from nanoserve.errors import RequestError

MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
PROMPT_TAIL = 5  # ids of left context that the detokenizer gets

_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str])
_IDS = msgspec.json.Decoder(list[int])
_ID_LISTS = msgspec.json.Decoder(list[list[int]])
_SHAPES = "`{}` must be a string, a list of strings, token ids, or a list of them"
_EMPTY = "A prompt must be provided and non-empty."
_SPACES = b" \t\r\n"
_MAX_ROLE_CHARS = 64
_TEXT_PARTS = ("text", "input_text", "output_text")
_OTHER_PARTS = (  # those that are named in the refusal
    *("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file", "input_file", "document"),
    *("refusal", "tool_use", "tool_result", "thinking", "redacted_thinking"),
)
_BEGINNING = 8  # characters per token that is looked for: in most languages some two tokens
_CUT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: text still to be encoded, or ids."""

    text: str | None
    ids: list[int] | None


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    ids: list[int]
    text: str | None  # as the client gave it; None for a prompt of ids


def parse_prompt(raw: bytes, param: str = "prompt") -> list[Prompt]:
    """A text, a list of texts, ids, or a list of ids. Anything mixed, empty or of another type is a 400."""
    data = raw.strip(_SPACES)
    inner = data[1:].lstrip(_SPACES) if data[:1] == b"[" else b""
    try:
        if data[:1] == b'"':
            return [Prompt(_TEXT.decode(data), None)]
        if inner[:1] == b'"':
            return _bounded(param, [Prompt(text, None) for text in _TEXTS.decode(data)])
        if inner[:1] == b"[":
            return _bounded(param, [Prompt(None, ids) for ids in _ID_LISTS.decode(data)])
        if inner[:1].isdigit() or inner[:1] == b"-":
            return [Prompt(None, _IDS.decode(data))]
    except msgspec.ValidationError as error:
        words = f"{_SHAPES.format(param)}, all alike: {problem(str(error))}."
        raise RequestError(words, param=param) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise RequestError(json_words(str(error)), param=param) from None
    if not data or data == b"null" or inner[:1] == b"]":
        raise RequestError(_EMPTY, param=param)
    raise RequestError(f"{_SHAPES.format(param)}.", param=param)


def _bounded(param: str, prompts: list[Prompt]) -> list[Prompt]:
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"`{param}` may hold at most {MAX_PROMPTS} prompts.", param=param)
    return prompts


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Every id the client gives must lie in the output layer's vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        raise RequestError(f"`{param}` has a token id outside [0, {vocab_size - 1}].", param=param)


async def encode_prompts(
    prompts: Sequence[Prompt], model: ServedModel, encoder: Encoder, *, add_special_tokens: bool, truncate: int | None
) -> list[EncodedPrompt]:
    """Ids of every prompt; `truncate` keeps that many of the last ids. 400 for what cannot fit, before encoding it."""
    texts: list[str] = []
    for prompt in prompts:
        if prompt.ids is not None:
            if not prompt.ids:
                raise RequestError(_EMPTY, param="prompt")
            check_ids(prompt.ids, model.vocab_size, "prompt")
        elif prompt.text is not None:
            text = prompt.text
            if truncate is None:
                refuse_by_length(text, model)
                await refuse_by_beginning(text, model, encoder)
            else:
                text = await end_of(text, truncate, encoder)
            texts.append(text)
    encoded = iter(await encoder.encode(texts, add_special_tokens=add_special_tokens) if texts else [])
    rows: list[EncodedPrompt] = []
    for prompt in prompts:
        ids = prompt.ids if prompt.ids is not None else next(encoded)
        if truncate is not None and len(ids) > truncate:
            ids = ids[-truncate:]
        if not ids:
            raise RequestError(_EMPTY, param="prompt")
        if max(ids) >= model.vocab_size:
            raise RequestError("The prompt has a token that this model's vocabulary lacks.", param="prompt")
        rows.append(EncodedPrompt(ids, prompt.text))
    return rows


def refuse_by_length(text: str, model: ServedModel) -> None:
    """Bytes over the longest token is a lower bound of the number of tokens: no need to encode to know."""
    num_bytes = len(text) if text.isascii() else len(text.encode())
    at_least = num_bytes // model.longest_token_bytes
    if at_least >= model.max_model_len:
        raise too_long(at_least, model.max_model_len, at_least=True)


async def refuse_by_beginning(text: str, model: ServedModel, encoder: Encoder) -> None:
    """A text far longer than the context is refused by the tokens of its beginning, at a cost that follows the context.

    What comes after a beginning adds to its tokens, but for a few at the cut, which lies at a space where there is one.
    Where tokens are long the beginning grows, to at most half of the text: then the whole is encoded anyhow.
    """
    size = _BEGINNING * model.max_model_len
    while size * 2 <= len(text):
        cut = text.rfind(" ", size // 2, size)
        (ids,) = await encoder.encode([text[: cut if cut > 0 else size]], add_special_tokens=False)
        at_least = len(ids) - _CUT_TOKENS
        if at_least >= model.max_model_len:
            raise too_long(at_least, model.max_model_len, at_least=True)
        size *= 4


async def end_of(text: str, num_tokens: int, encoder: Encoder) -> str:
    """The end of a text that holds its last `num_tokens` tokens: the whole of a far longer one is not encoded for them.

    It holds some more, because the first ones after the cut, at a space where there is one, may be others than without.
    (In one word of thousands of letters it may be all of them: such a text costs no more than any other.)
    """
    enough = num_tokens + _CUT_TOKENS
    size = _BEGINNING * enough
    while size * 2 <= len(text):
        cut = text.find(" ", len(text) - size, len(text) - size // 2)
        end = text[cut if cut > 0 else len(text) - size :]
        (ids,) = await encoder.encode([end], add_special_tokens=False)
        if len(ids) >= enough:
            return end
        size *= 4
    return text


def too_long(num_prompt_tokens: int, limit: int, *, at_least: bool = False) -> RequestError:
    count = f"at least {num_prompt_tokens}" if at_least else str(num_prompt_tokens)
    return RequestError(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {count} input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
        param="prompt",
        code="context_length_exceeded",
    )


def fit_max_tokens(num_prompt_tokens: int, asked: int | None, fallback: int | None, limit: int, *, clip: bool) -> int:
    """How many tokens may be generated.

    `asked` is the client's number: with `clip` an upper bound, else refused when prompt and answer pass the context.
    Without it, `fallback` (None: all that is left), always clipped.
    """
    left = limit - num_prompt_tokens
    if left < 0 or (left == 0 and asked != 0):
        raise too_long(num_prompt_tokens, limit)
    if asked is None:
        return left if fallback is None else min(fallback, left)
    if asked > left and not clip:
        raise RequestError(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_prompt_tokens + asked} tokens ({num_prompt_tokens} in the prompt, {asked} for the completion). "
            "Please reduce the length of the prompt or of the completion.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return min(asked, left)


def normal_messages(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Messages as templates expect them: a role, text content. Lists of text parts become one text."""
    if not messages:
        raise RequestError("`messages` must be a non-empty list.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"`messages` may hold at most {MAX_MESSAGES} messages.", param="messages")
    return [_normal_message(message) for message in messages]


def _normal_message(message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= _MAX_ROLE_CHARS:
        raise RequestError("Each message needs a `role` that is a string.", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_of(part) for part in content)
    elif content is None:
        if role != "assistant" or not message.get("tool_calls"):
            raise RequestError("Each message needs `content`.", param="messages")
    elif not isinstance(content, str):
        raise RequestError("`content` must be a string or a list of text parts.", param="messages")
    return {**message, "content": content}


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in _TEXT_PARTS:
        named = f"type {kind}" if kind in _OTHER_PARTS else "this type"
        words = f"Content parts of {named} are not supported; this server takes text."
        raise RequestError(words, param="messages", code=UNSUPPORTED_PARAMETER)
    if isinstance(kind, str) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RequestError("A content part must be an object with `type` text and a `text`.", param="messages")

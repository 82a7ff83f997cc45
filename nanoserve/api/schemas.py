"""Request bodies as JSON brings them: strict types, every field optional and nullable, nothing interpreted yet.

Owner process: api. `decode_body` turns bytes into one of these structs; `validation` checks values and builds what the
engine gets. Keys that no struct names are either known and unsupported (refused when they ask for something) or
unknown (accepted and named in a response header).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from nanoserve.errors import RequestError

B = TypeVar("B", bound=msgspec.Struct)


def _absent() -> msgspec.Raw:
    return msgspec.Raw(b"null")


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # accepted; we never pad


class RepetitionFields(msgspec.Struct, kw_only=True):
    """`repetition_detection`, vLLM's field: end an answer that says the same pattern of tokens again and again."""

    max_pattern_size: int | None = None
    min_pattern_size: int | None = None
    min_count: int | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that completions and chat share; names and meanings as OpenAI's and vLLM's."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repetition_detection: RepetitionFields | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # another server's name for include_stop_str_in_output
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_metrics: bool | None = None  # times of this request in the answer
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    request_id: str | None = None
    rid: str | None = None
    user: str | None = None


class CompletionBody(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    prompt: msgspec.Raw = msgspec.field(default_factory=_absent)  # four shapes, told apart by `prompt.parse_prompt`
    echo: bool | None = None
    logprobs: int | None = None


class ChatBody(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None  # begin the answer with the last message, where that is the assistant's


class GenerateSampling(SamplingFields, kw_only=True):
    """`sampling_params` of POST /generate: the same fields under another server's names."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /generate, the native route: text or ids in, text and ids out."""

    text: msgspec.Raw = msgspec.field(default_factory=_absent)  # a text or a list of texts
    input_ids: msgspec.Raw = msgspec.field(default_factory=_absent)  # ids or a list of them
    sampling_params: msgspec.Raw = msgspec.field(default_factory=_absent)
    model: str | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    rid: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None


class AbortBody(msgspec.Struct, kw_only=True):
    """POST /abort_request."""

    rid: str | None = None
    request_id: str | None = None
    abort_all: bool | None = None


class PauseBody(msgspec.Struct, kw_only=True):
    """POST /pause_generation and /continue_generation."""

    mode: str | None = None


class ProfileBody(msgspec.Struct, kw_only=True):
    """POST /start_profile."""

    num_steps: int | None = None


class LoggingBody(msgspec.Struct, kw_only=True):
    """POST /configure_logging; what is not given stays as it is."""

    log_requests: bool | None = None
    log_requests_level: int | None = None
    log_level: str | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: a text, or messages that go through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int] | None = None
    skip_special_tokens: bool | None = None


# Keys that mean something elsewhere and nothing here: any other value than these is refused, not ignored.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "beam_width": (1,),
    "length_penalty": (1, 1.0),
    "prompt_embeds": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "grammar": ("",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
    "chat_template": (),
    "documents": ([],),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "lora_path": (),
    "return_token_offsets": (False,),
    "return_hidden_states": (False,),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
}

# Accepted without effect: they are for the sender's own books.
IGNORED = frozenset({"metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "extra_body"})

UNSUPPORTED_PARAMETER = "unsupported_parameter"  # the `error_code` of what we know and do not do
_PATH = re.compile(r" - at `\$\.?([^`\[.]*)[^`]*`$")
_EXPECTED = re.compile(r"^Expected `([^`]+)`, got `([^`]+)`$")
_MAX_WARNED_KEYS = 16
_MAX_KEYS = 256
_MAX_COMMAS = 1 << 18  # each value but the first of its list or object has one before it; building values takes time
MAX_COMMAS_WITH_IDS = 1 << 20  # where lists of token ids are the content


@dataclass(frozen=True, slots=True)
class Decoded(Generic[B]):
    body: B
    unknown_keys: tuple[str, ...]  # accepted and unused, for X-Nanoserve-Warnings


class BodyDecoder(Generic[B]):
    """Decodes one kind of body; built once per endpoint. Strict: RequestError 400 that names the field.

    `may_be_empty`: no body at all is one without fields.
    """

    def __init__(
        self,
        kind: type[B],
        *,
        unsupported: dict[str, tuple[Any, ...]] | None = None,
        max_commas: int = _MAX_COMMAS,
        may_be_empty: bool = False,
    ) -> None:
        self._max_commas = max_commas
        self._empty = b"{}" if may_be_empty else b""
        self._fields = frozenset(kind.__struct_fields__)
        self._unsupported = UNSUPPORTED if unsupported is None else unsupported
        self._decoder = msgspec.json.Decoder(kind)
        self._keys = msgspec.json.Decoder(dict[str, msgspec.Raw])

    def decode(self, data: bytes, *, strict: bool = False) -> Decoded[B]:
        """`strict` refuses unknown keys instead of reporting them."""
        data = data or self._empty
        if data.count(b",") > self._max_commas:
            raise RequestError("The body has too many values.")
        try:
            data.decode()  # msgspec looks only into the strings it keeps
            body = self._decoder.decode(data)
            keys = self._keys.decode(data)
        except UnicodeDecodeError as error:
            raise RequestError(f"The body is not valid UTF-8 (byte {error.start}).") from None
        except RecursionError:
            raise RequestError("The body is nested too deeply.") from None
        except msgspec.ValidationError as error:
            raise field_error(str(error)) from None
        except (msgspec.DecodeError, ValueError) as error:
            raise RequestError(json_words(str(error))) from None
        if len(keys) > _MAX_KEYS:
            raise RequestError(f"The body may have at most {_MAX_KEYS} fields.")
        unknown: list[str] = []
        for key in keys.keys() - self._fields:
            if key in self._unsupported:
                self._refuse_unsupported(key, bytes(keys[key]))
            elif key not in IGNORED:
                unknown.append(key)
        if unknown and strict:
            name = shown_key(min(unknown))
            words = f"The body has a field this server does not know: `{name}`."
            raise RequestError(words, param=name, code="unknown_parameter")
        return Decoded(body, tuple(sorted(unknown)[:_MAX_WARNED_KEYS]))

    def _refuse_unsupported(self, key: str, raw: bytes) -> None:
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            value = object()
        if value is not None and not any(value == d and type(value) is type(d) for d in self._unsupported[key]):
            raise RequestError(f"`{key}` is not supported by this server.", param=key, code=UNSUPPORTED_PARAMETER)


def field_error(words: str) -> RequestError:
    """msgspec's words with the field they are about; they never contain values of the input but enum strings."""
    match = _PATH.search(words)
    param = match.group(1) if match and match.group(1) else None
    if param is None:
        return RequestError(f"The body is not what this endpoint takes: {problem(words)}.")
    return RequestError(f"Invalid `{param}`: {problem(words)}.", param=param)


def problem(words: str) -> str:
    """msgspec's words without the place, as we say them: `expected str, got array`."""
    words = _PATH.sub("", words)
    if words.startswith("Invalid enum value"):
        return "Invalid value"
    expected = _EXPECTED.match(words)
    if expected:
        return f"expected {expected.group(1).replace(' | null', '').replace('|', 'or')}, got {expected.group(2)}"
    return words


def json_words(words: str) -> str:
    """What is wrong with the JSON, with the byte where it went wrong if msgspec tells."""
    if "truncated" in words:
        return "The body is not valid JSON: it ends too early, or holds half of a surrogate pair."
    return "The body is not valid JSON: " + words.removeprefix("JSON is malformed: ") + "."


def shown_key(key: str) -> str:
    """A client's own key, where we name it: printable ASCII, short."""
    return re.sub(r"[^\x21-\x7e]", "?", key)[:40]


def header_safe(keys: tuple[str, ...]) -> str:
    """Unknown keys as a header value."""
    return "unknown fields ignored: " + ", ".join(map(shown_key, keys))

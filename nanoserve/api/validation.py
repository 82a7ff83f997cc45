"""Checks the values of a decoded body and builds what every request of it has in common.

Owner process: api. Pure. Every number has a type and two bounds here, so that nothing later can overflow.
The first problem ends the check; messages name the field and never repeat text of the input.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from nanoserve.api.bounds import INT32, MAX_BIAS, WHOLE, real, whole
from nanoserve.api.model import ServedModel
from nanoserve.api.prompt import check_ids
from nanoserve.api.schemas import RepetitionFields, SamplingFields
from nanoserve.config import ServerConfig
from nanoserve.errors import RequestError
from nanoserve.ipc.messages import EmitMode, RepetitionDetection, SamplingParams, TextSpec
from nanoserve.stop_regex import compile_regex

Number = TypeVar("Number", int, float)

MAX_SEQUENCES = 2048  # prompts times n
_MAX_STOP_CHARS = 1024
_MAX_STOP_IDS = 256
_MAX_STOP_REGEXES = 4
_MAX_BIASES = 1024
_MAX_ALLOWED = 8192
_MAX_BAD_WORDS = 64
_MAX_BAD_WORD_CHARS = 256
_MAX_PATTERN = 256  # tokens; each token of the answer is compared with as many
_MAX_LABEL = 128
_MAX_SALT = 1024
_GREEDY = 1e-5  # temperatures below are argmax


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """One body, checked. `sampling` and `text` lack what depends on the prompt or the choice (lengths, seed, tail)."""

    sampling: SamplingParams
    text: TextSpec
    seed: int | None
    n: int = 1
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    interval: int = 1
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    return_metrics: bool = False
    truncate: int | None = None
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    label: str = ""
    bad_words: tuple[str, ...] = ()  # not encoded yet

    def child_sampling(self, sample: int, max_tokens: int, seeds: random.Random) -> SamplingParams:
        """Sampling of one choice. With a given seed, choices of one prompt differ by their number."""
        seed = seeds.getrandbits(63) if self.seed is None else _wrap64(self.seed + sample)
        return msgspec.structs.replace(
            self.sampling, seed=seed, max_tokens=max_tokens, min_tokens=min(self.sampling.min_tokens, max_tokens)
        )


def _wrap64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


class Checker:
    """The model's and the server's bounds; built when the model is loaded, used for every request."""

    def __init__(self, config: ServerConfig, model: ServedModel) -> None:
        self._model = model
        self._max_stop_strings = config.api.max_stop_strings
        self._max_logprobs = config.api.max_logprobs
        self._always_usage = config.api.force_include_usage
        self._ids_only = config.model.skip_tokenizer_init
        self._has_priorities = config.scheduler.scheduling_policy == "priority"

    def check_model_name(self, name: str | None) -> None:
        """Absent means the default; any other name than ours is a 404."""
        if name is not None and name not in self._model.names:
            raise RequestError(
                f"The requested model does not exist. This server has `{self._model.name}`.",
                status=404,
                param="model",
                code="model_not_found",
            )

    def check(
        self,
        body: SamplingFields,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        min_max_tokens: int = 1,
    ) -> ValidRequest:
        """All shared fields. `logprobs` is the number of top entries the endpoint asks for (None: off)."""
        if self._ids_only:
            _refuse_text(stop=body.stop, stop_regex=body.stop_regex, bad_words=body.bad_words, logprobs=logprobs)
        stream = bool(body.stream)
        if body.stream_options is not None and not stream:
            raise RequestError("Stream options can only be defined when `stream=True`.", param="stream_options")
        n = whole("n", body.n, 1, *WHOLE["n"])
        max_tokens = None if max_tokens is None else whole("max_tokens", max_tokens, 1, min_max_tokens, INT32)
        if prompt_logprobs is None and body.prompt_logprobs is not None:
            prompt_logprobs = whole("prompt_logprobs", body.prompt_logprobs, 0, 0, self._max_logprobs)
            if stream:
                raise RequestError("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")
        sampling = self._sampling(body, max_tokens, logprobs, prompt_logprobs)
        if n > 1 and sampling.temperature < _GREEDY:
            raise RequestError(f"n must be 1 when using greedy sampling, got {n}.", param="n")
        options = body.stream_options
        truncate = whole("truncate_prompt_tokens", body.truncate_prompt_tokens, -1, *WHOLE["truncate_prompt_tokens"])
        if body.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens must be -1 or at least 1, got 0.", param="truncate_prompt_tokens"
            )
        return ValidRequest(
            sampling=sampling,
            text=self._text_spec(body, stream, sampling.min_tokens),
            seed=None if body.seed is None else whole("seed", body.seed, 0, *WHOLE["seed"]),
            n=n,
            max_tokens=max_tokens,
            stream=stream,
            include_usage=self._always_usage or bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            interval=whole("stream_interval", body.stream_interval, 1, *WHOLE["stream_interval"]),
            return_token_ids=bool(body.return_token_ids) or self._ids_only,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            return_metrics=bool(body.return_metrics),
            truncate=self._truncation(truncate, max_tokens) if body.truncate_prompt_tokens is not None else None,
            priority=self._priority(body.priority),
            cache_salt=_bounded_text("cache_salt", body.cache_salt, _MAX_SALT),
            timeout_s=_seconds("timeout_s", body.timeout_s),
            queue_timeout_s=_seconds("queue_timeout_s", body.queue_timeout_s),
            label=_bounded_text("request_id", body.request_id or body.rid, _MAX_LABEL),
            bad_words=_bad_words(body.bad_words),
        )

    def check_logprobs(self, param: str, value: int | None) -> int | None:
        return None if value is None else whole(param, value, 0, 0, self._max_logprobs)

    def _sampling(
        self, body: SamplingFields, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        defaults = self._model.defaults
        min_tokens = whole("min_tokens", body.min_tokens, 0, *WHOLE["min_tokens"])
        if max_tokens is not None and min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.",
                param="min_tokens",
            )
        repetition = _or(defaults.repetition_penalty, 1.0)
        top_p = real("top_p", body.top_p, _or(defaults.top_p, 1.0))
        top_k = whole("top_k", body.top_k, _or(defaults.top_k, 0), *WHOLE["top_k"])
        return SamplingParams(
            temperature=real("temperature", body.temperature, _or(defaults.temperature, 1.0)),
            top_k=max(top_k, 0),
            top_p=top_p,
            min_p=real("min_p", body.min_p, _or(defaults.min_p, 0.0)),
            presence_penalty=real("presence_penalty", body.presence_penalty, 0.0),
            frequency_penalty=real("frequency_penalty", body.frequency_penalty, 0.0),
            repetition_penalty=real("repetition_penalty", body.repetition_penalty, repetition),
            repetition_detection=_repetition(body.repetition_detection),
            min_tokens=min_tokens,
            stop_token_ids=self._stop_token_ids(body.stop_token_ids),
            ignore_eos=bool(body.ignore_eos),
            logit_bias=self._allowed(body.allowed_token_ids, self._logit_bias(body.logit_bias)),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _text_spec(self, body: SamplingFields, stream: bool, min_tokens: int) -> TextSpec:
        return TextSpec(
            detokenize=not self._ids_only,
            # a deadline answers with what is there by then, so the text must come as it grows
            emit=EmitMode.STREAM if stream or body.timeout_s is not None else EmitMode.FINAL,
            skip_special_tokens=body.skip_special_tokens is not False,
            spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
            stop=self._stop_strings(body.stop),
            stop_regex=_stop_regexes(body.stop_regex),
            include_stop_str_in_output=bool(body.include_stop_str_in_output or body.no_stop_trim),
            min_tokens=min_tokens,
            return_token_ids=bool(body.return_token_ids) or self._ids_only,
        )

    def _stop_strings(self, stop: str | list[str] | None) -> tuple[str, ...]:
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > self._max_stop_strings:
            raise RequestError(f"stop may hold at most {self._max_stop_strings} strings.", param="stop")
        for string in strings:
            if not string:
                raise RequestError("stop cannot contain an empty string.", param="stop")
            if len(string) > _MAX_STOP_CHARS:
                raise RequestError(f"A stop string may have at most {_MAX_STOP_CHARS} characters.", param="stop")
        return tuple(dict.fromkeys(strings))

    def _stop_token_ids(self, ids: list[int] | None) -> tuple[int, ...]:
        if not ids:
            return ()
        if len(ids) > _MAX_STOP_IDS:
            raise RequestError(f"stop_token_ids may hold at most {_MAX_STOP_IDS} ids.", param="stop_token_ids")
        check_ids(ids, self._model.vocab_size, "stop_token_ids")
        return tuple(dict.fromkeys(ids))

    def _logit_bias(self, bias: dict[str, float] | None) -> dict[int, float]:
        if not bias:
            return {}
        if len(bias) > _MAX_BIASES:
            raise RequestError(f"logit_bias may hold at most {_MAX_BIASES} entries.", param="logit_bias")
        parsed: dict[int, float] = {}
        for key, value in bias.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise RequestError("logit_bias must have token ids as keys.", param="logit_bias")
            parsed[int(key)] = min(max(value, -MAX_BIAS), MAX_BIAS)
        check_ids(list(parsed), self._model.vocab_size, "logit_bias")
        return parsed

    def _allowed(self, ids: list[int] | None, bias: dict[int, float]) -> dict[int, float]:
        """An allow-list as biases: those of 100 and more decide, so only the listed ids are left.

        Their own biases still count among them; -100 bans one of them.
        """
        if ids is None:
            return bias
        if not 0 < len(ids) <= _MAX_ALLOWED:
            raise RequestError(f"allowed_token_ids must hold 1 to {_MAX_ALLOWED} token ids.", param="allowed_token_ids")
        check_ids(ids, self._model.vocab_size, "allowed_token_ids")
        kept = {token_id: 200.0 + bias.get(token_id, 0.0) for token_id in ids if bias.get(token_id, 0.0) > -100.0}
        if not kept:
            raise RequestError("logit_bias bans every allowed token.", param="allowed_token_ids")
        return kept

    def _truncation(self, asked: int, max_tokens: int | None) -> int:
        """How many prompt ids are kept: as asked, -1 means what the context leaves."""
        room = self._model.max_model_len - (1 if max_tokens is None else max(max_tokens, 1))
        if room < 1:
            raise RequestError("max_tokens leaves no room for a prompt.", param="max_tokens")
        return room if asked == -1 else min(asked, room)

    def _priority(self, priority: int | None) -> int:
        value = whole("priority", priority, 0, *WHOLE["priority"])
        if value and not self._has_priorities:
            raise RequestError("`priority` needs a server with --scheduling-policy priority.", param="priority")
        return value


def _refuse_text(**fields: object) -> None:
    """Without a tokenizer what needs text is refused by name."""
    for name, value in fields.items():
        if value is not None and value != []:
            raise RequestError(
                f"`{name}` is unavailable when the server runs with skip_tokenizer_init=True.", param=name
            )


def _stop_regexes(given: str | list[str] | None) -> tuple[str, ...]:
    patterns = [given] if isinstance(given, str) else given or []
    patterns = [pattern for pattern in dict.fromkeys(patterns) if pattern]
    if len(patterns) > _MAX_STOP_REGEXES:
        raise RequestError(f"stop_regex may hold at most {_MAX_STOP_REGEXES} patterns.", param="stop_regex")
    for pattern in patterns:
        try:
            compile_regex(pattern)
        except ValueError as error:
            raise RequestError(f"A pattern of stop_regex {error}.", param="stop_regex") from error
    return tuple(patterns)


def _bad_words(words: list[str] | None) -> tuple[str, ...]:
    if not words:
        return ()
    if len(words) > _MAX_BAD_WORDS or max(map(len, words)) > _MAX_BAD_WORD_CHARS:
        limits = f"{_MAX_BAD_WORDS} words of {_MAX_BAD_WORD_CHARS} characters"
        raise RequestError(f"bad_words may hold at most {limits}.", param="bad_words")
    if not all(word.strip() for word in words):
        raise RequestError("bad_words cannot contain an empty string.", param="bad_words")
    return tuple(words)


def _repetition(fields: RepetitionFields | None) -> RepetitionDetection | None:
    """None where it is off: without the field, and with a `max_pattern_size` of 0."""
    if fields is None:
        return None
    name = "repetition_detection"
    longest = whole(f"{name}.max_pattern_size", fields.max_pattern_size, 0, 0, _MAX_PATTERN)
    shortest = whole(f"{name}.min_pattern_size", fields.min_pattern_size, 0, 0, longest)
    if not longest:
        return None
    return RepetitionDetection(
        longest, max(shortest, 1), whole(f"{name}.min_count", fields.min_count or 0, 0, 2, INT32)
    )


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _seconds(name: str, value: float | None) -> float | None:
    return None if value is None else real(name, value, 0.0)


def _bounded_text(name: str, value: str | None, limit: int) -> str:
    if value is not None and not 0 < len(value) <= limit:
        raise RequestError(f"{name} must have 1 to {limit} characters.", param=name)
    return value or ""

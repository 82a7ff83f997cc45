"""`nanoserve.LLM`: the same scheduler, executor and detokenizer in one process, without sockets or HTTP.

    from nanoserve import LLM, SamplingParams
    llm = LLM("smollm2-135m")
    for answer in llm.generate(["The sky is", "Water is"], SamplingParams(temperature=0.0, max_tokens=32)):
        print(answer.text)

What a prompt gives here is what the server gives for it: the cores are the same, and so are the defaults.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nanoserve.api.bounds import WHOLE, real, whole
from nanoserve.api.model import ServedModel, load_served_model
from nanoserve.api.prompt import PROMPT_TAIL
from nanoserve.cli import load_config
from nanoserve.detok.manager import DetokManager
from nanoserve.detok.token_table import load_or_build_table
from nanoserve.engine.core import EngineCore, MemoryInbox
from nanoserve.engine.process import load_executor, scheduler_limits
from nanoserve.errors import RequestError
from nanoserve.hub.cache import cache_root
from nanoserve.hub.resolve import prepare
from nanoserve.ipc import messages as wire
from nanoserve.ipc.columns import pack_ids, unpack_ids
from nanoserve.ipc.ids import RequestIdAllocator
from nanoserve.sched.scheduler import Scheduler

_log = logging.getLogger(__name__)

_WHOLE = ("n", "max_tokens", "min_tokens", "top_k", "seed")
_REAL = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to answer. Fields and their bounds are those of the HTTP API, RequestError for others.

    `seed` None draws one, `logprobs` 0 is the chosen token only, `max_tokens` may be 0.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in _WHOLE:
            whole(name, getattr(self, name), 0, 0 if name == "max_tokens" else WHOLE[name][0], WHOLE[name][1])
        for name in _REAL:
            real(name, getattr(self, name), 0.0)
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens={self.max_tokens}.", param="min_tokens")
        if "" in self.stop_strings:
            raise RequestError("stop cannot contain an empty string.", param="stop")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def to_wire(self, seed: int) -> wire.SamplingParams:
        return wire.SamplingParams(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logit_bias=dict(self.logit_bias),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )

    def to_text_spec(self, prompt_ids: Sequence[int]) -> wire.TextSpec:
        return wire.TextSpec(
            emit=wire.EmitMode.FINAL,
            skip_special_tokens=self.skip_special_tokens,
            prompt_tail=tuple(prompt_ids[-PROMPT_TAIL:]),
            stop=self.stop_strings,
            include_stop_str_in_output=self.include_stop_str_in_output,
            min_tokens=self.min_tokens,
            return_token_ids=True,
        )


@dataclass(slots=True)
class CompletionOutput:
    """One answer. `finish_reason` is stop, length, abort or error; `error` says why in words."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[wire.TokenText] | None = None
    finish_reason: str = ""
    stop_reason: int | str | None = None  # the stop id or stop string that ended it
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its `n` answers."""

    prompt: str | None  # None where ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[wire.TokenText] | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """The first answer."""
        return self.outputs[0].text


class LLM:
    """A model in this process. `options` are those of launch_server: `LLM(model, max_model_len=4096, dtype="float32")`.

    Not safe for several threads at once.
    """

    def __init__(self, model: str = "smollm2-135m", **options: Any) -> None:
        """Loads the model; ConfigError for a wrong option, StartupError when it cannot be loaded."""
        config = load_config(_as_flags({"model": model, **options}), {}, prog="LLM")
        model_dir = prepare(config, _log_progress)
        executor, facts, eos_token_ids = load_executor(config, model_dir, _log_progress)
        self.model: ServedModel = load_served_model(config, model_dir, facts)
        self._inbox = MemoryInbox()
        # All prompts of a call are in memory anyway: there is no queue to protect.
        limits = dataclasses.replace(scheduler_limits(config.scheduler, facts), max_num_queued=1 << 62)
        self._core = EngineCore(
            Scheduler(limits, eos_token_ids),
            executor,
            self._inbox,
            engine_index=0,
            incarnation=1,
            clock=time.monotonic_ns,
        )
        table = load_or_build_table(self.model.tokenizer, model_dir, cache_root(config.model))
        self._detok = DetokManager(self.model.tokenizer, config.detok, table=table)
        self._ids = RequestIdAllocator(0, 1)
        self._is_closed = False

    def default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without parameters: the model's own generation_config.json, where it has one."""
        defaults = self.model.defaults
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: getattr(defaults, name) for name in names}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts; each prompt is a text or a list of ids.

        A prompt that cannot be served (too long, an id outside the vocabulary) has finish_reason "error"; the others
        are not touched.
        """
        listed = _as_prompts(prompts)
        texts = [prompt for prompt in listed if isinstance(prompt, str)]
        encoded = iter(self.model.tokenizer.encode_batch(texts, add_special_tokens=True))
        ids = [next(encoded) if isinstance(prompt, str) else list(prompt) for prompt in listed]
        return self._run([prompt if isinstance(prompt, str) else None for prompt in listed], ids, sampling_params)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation, or to several: lists of {"role": ..., "content": ...}."""
        template = self.model.template
        if template is None:
            raise RequestError("This model has no chat template: use generate, or the chat_template option.")
        texts = [
            template.render([dict(message) for message in conversation]) for conversation in _as_chats(conversations)
        ]
        ids = self.model.tokenizer.encode_batch(texts, add_special_tokens=False)
        return self._run(list(texts), ids, sampling_params)

    def stats(self) -> wire.EngineStats:
        """Gauges now, and totals since the model was loaded."""
        return self._core.stats()

    def close(self) -> None:
        """Ends the engine's threads and gives its memory of keys and values back; weights go with this object.

        What is asked for afterwards is refused with RequestError.
        """
        self._is_closed = True
        self._core.shut_down()

    def _run(
        self,
        texts: list[str | None],
        prompts: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        if self._is_closed:
            raise RequestError("This LLM is closed.")
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or self.default_sampling_params()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise RequestError(f"{len(sampling_params)} sampling_params for {len(prompts)} prompts.")
        results: list[RequestOutput] = []
        live: dict[int, tuple[RequestOutput, CompletionOutput]] = {}
        for text, ids, params in zip(texts, prompts, sampling_params, strict=True):
            result = RequestOutput(text, ids, [CompletionOutput(index) for index in range(params.n)])
            results.append(result)
            for request, output in zip(self._requests(ids, params), result.outputs, strict=True):
                live[request.request_id] = (result, output)
                self._inbox.put(request)
        request_ids = list(live)
        try:
            while live:
                self._turn(live)
        finally:
            # Also after Ctrl-C: whatever still runs is ended, and the engine forgets all of it.
            self._inbox.put(wire.Release(request_ids))
            while self._turn(live):
                pass
        return results

    def _requests(self, prompt_ids: list[int], params: SamplingParams) -> Iterator[wire.AddRequest]:
        seed = secrets.randbits(62) if params.seed is None else params.seed
        for index in range(params.n):
            yield wire.AddRequest(
                self._ids.next(),
                _pack(prompt_ids),
                params.to_wire(seed + index),
                msgspec.msgpack.encode(params.to_text_spec(prompt_ids)),
                arrival_ns=time.monotonic_ns(),
            )

    def _turn(self, live: dict[int, tuple[RequestOutput, CompletionOutput]]) -> bool:
        """One step through all three parts; False when nothing was left to do."""
        core = self._core
        core.receive()
        batches = [core.take_news(), core.step() if core.has_work else None]
        heard = self._detok.process([batch for batch in batches if batch is not None])
        for message in heard.to_engine:
            core.handle(message)
        for batch in heard.text_batches.values():
            _collect(batch, live)
        return core.has_work


def _collect(batch: wire.TextBatch, live: dict[int, tuple[RequestOutput, CompletionOutput]]) -> None:
    """Takes one text batch into the answers; those that ended leave `live`."""
    token_ids, offset = unpack_ids(batch.token_ids), 0
    scores = {row.row: row.tokens for row in batch.logprobs}
    rows = zip(batch.request_ids, batch.deltas, batch.num_tokens, strict=True)
    for row, (request_id, delta, count) in enumerate(rows):
        if request_id in live:
            output = live[request_id][1]
            output.text += delta
            output.token_ids += token_ids[offset : offset + count]
            if row in scores:
                output.logprobs = [*(output.logprobs or []), *scores[row]]
        offset += count
    for prompt in batch.prompt_logprobs:
        if prompt.request_id in live:
            live[prompt.request_id][0].prompt_logprobs = prompt.tokens
    for end in batch.finished:
        finished = end.finished
        if finished.request_id not in live:
            continue
        result, output = live.pop(finished.request_id)
        result.num_cached_tokens = finished.num_cached_tokens
        output.finish_reason = finished.reason.name.lower()
        output.stop_reason = end.stop_string if end.stop_string is not None else finished.stop_token_id
        output.error = finished.failure.message if finished.failure else None


def _pack(token_ids: list[int]) -> bytes:
    try:
        return pack_ids(token_ids)
    except OverflowError:
        return pack_ids([-1])  # outside every vocabulary: the engine refuses this prompt and no other


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], int)):
        listed: list[Any] = [prompts]
    elif isinstance(prompts, Sequence):
        listed = list(prompts)
    else:
        raise RequestError("A prompt is a text or a list of token ids.", param="prompts")
    for prompt in listed:
        if isinstance(prompt, str):
            if not prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt):
                raise RequestError("A prompt has half a surrogate pair: it is not Unicode text.", param="prompts")
        elif not isinstance(prompt, Sequence) or not all(type(token_id) is int for token_id in prompt):
            raise RequestError("A prompt is a text or a list of token ids.", param="prompts")
    return listed


def _as_chats(conversations: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    if len(conversations) > 0 and isinstance(conversations[0], Mapping):
        return [conversations]  # type: ignore[list-item]
    return list(conversations)  # type: ignore[arg-type]


def _as_flags(options: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            shown = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            flags.append(f"--{flag}={shown}")
    return flags


def _log_progress(stage: str, progress: float) -> None:
    _log.debug("%s: %.0f %%", stage, 100 * progress)

"""The whole wire protocol, grouped by edge in ring order: api -> engine -> detok -> api, then the supervisor.

Owner: nobody; every process imports it, it imports only the standard library and msgspec.

Rules (each has a test): structs are frozen and positional (`array_like`), tags are integers, fields are only
ever appended and then carry a default, `PROTOCOL_VERSION` is raised on any other change and compared in
`Ready`. Token ids travel as packed little-endian int32 (`ipc.columns`), because a Python list of ids costs
ten times as much to encode and decode. One message per step and edge: columns instead of row objects.

`first_index` and `char_offset` are absolute positions in a request's output. They make every delivery
idempotent: a receiver drops what it already has and sees a gap at once.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NewType

import msgspec

PROTOCOL_VERSION = 1

PROBE_PRIORITY = -(2**31)
"""Of the one-token round that proves the ring: it goes first under every policy, and no full queue refuses it."""

RequestId = NewType("RequestId", int)
"""63 bits: api index, api incarnation, counter (`ipc.ids`). Never reused, never given by a client."""


class FinishReason(IntEnum):
    STOP = 0  # end of sequence, a stop id, or a stop string
    LENGTH = 1  # max_tokens or the context is used up
    ABORT = 2  # somebody asked for the end: client gone, deadline, shutdown
    ERROR = 3  # refused or failed; `Failure` says why
    REPETITION = 4  # the newest tokens are one pattern again and again, as the client asked to look for

    @property
    def is_regular(self) -> bool:
        """Whether every id that the terminal record counts comes before it; one cut short may lack some."""
        return self not in (FinishReason.ABORT, FinishReason.ERROR)


class AbortCause(IntEnum):
    CLIENT_GONE = 0
    STOP_STRING = 1
    DEADLINE = 2
    SHUTDOWN = 3
    TEXT_FAILED = 4  # the detokenizer cannot make text of these ids; api has its error record


class EmitMode(IntEnum):
    STREAM = 0  # text as soon as it is certain
    FINAL = 1  # one text at the end


class Failure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why a request ended with FinishReason.ERROR: an HTTP status and words for the error envelope."""

    status: int
    message: str
    param: str | None = None
    error_type: str = "invalid_request_error"
    code: str | None = None


class RepetitionDetection(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Ends an output whose newest tokens are `min_count` times the same pattern of so many tokens."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How tokens are chosen and when ids end a request. Validated at the edge; ids are inside the vocabulary.

    `temperature` below 1e-5 is greedy. `top_k` 0 is off. `seed` is always set before it reaches the engine
    (the api draws one when the client gives none), so that a resumed request repeats its draws.
    `logprobs` None is off, 0 is the sampled token only, n adds the n most likely. `max_tokens` 0 scores the prompt.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # id sequences that the output may not contain
    repetition_detection: RepetitionDetection | None = None


class TextSpec(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How a request's ids become text. Written by api, opened by detok only; the engine carries it as bytes."""

    emit: EmitMode = EmitMode.STREAM
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    prompt_tail: tuple[int, ...] = ()  # last prompt ids, left context of the first output token
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0  # stop strings that end within this many tokens do not count
    return_token_ids: bool = False
    detokenize: bool = True  # False: ids only, text stays empty
    stop_regex: tuple[str, ...] = ()  # patterns of `nanoserve.stop_regex`


# ---- api -> engine ---------------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """A new request, or (with `output_token_ids`) one that goes on after an engine's death."""

    request_id: int
    prompt_token_ids: bytes  # packed int32
    sampling: SamplingParams
    text_spec: bytes  # encoded TextSpec
    priority: int = 0  # lower is earlier
    cache_salt: str = ""
    output_token_ids: bytes = b""  # packed int32
    arrival_ns: int = 0  # CLOCK_MONOTONIC, the same clock in every process of the box
    share_key: str = ""  # whose share of the engine it takes, with `--scheduling-policy fair`
    num_siblings: int = 1  # single requests of the same HTTP request, itself among them


class AbortRequest(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """End these requests. Unknown ids are ignored and counted. Also detok -> engine for stop strings."""

    request_ids: list[int]
    cause: AbortCause
    num_kept: list[int] = []  # STOP_STRING: output tokens that count, per request


class Release(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The terminal records of these requests have reached api; the engine may forget their ids."""

    request_ids: list[int]


class FlushCache(msgspec.Struct, frozen=True, array_like=True, tag=12, gc=False):
    """Forget every cached prefix block that no running request holds. The next stats tell how many there were."""


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=15, gc=False):
    """Compute nothing from now on, or go on. An engine that begins anew is not paused."""

    paused: bool


class StartProfile(msgspec.Struct, frozen=True, array_like=True, tag=16, gc=False):
    """Record the next steps and write them to this file. While another profile runs nothing happens.

    The next stats tell which profile it is.
    """

    number: int  # chosen by whoever asks, never 0
    num_steps: int
    file: str


class StopProfile(msgspec.Struct, frozen=True, array_like=True, tag=17, gc=False):
    """Record no more, and write what there is. Where no profile runs nothing happens. The next stats tell of it."""


# ---- engine -> detok -------------------------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """First word of a request on this edge. `output_token_ids` is non-empty when it is resumed or resynced."""

    request_id: int
    text_spec: bytes
    output_token_ids: bytes = b""  # packed int32, indices 0..n-1 of the output


class Accepted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sent at once at admission, and again each second until the first token, with what has changed."""

    request_id: int
    queue_position: int = 0  # 0: next to run, or running
    num_computed: int = 0  # prompt tokens that are computed


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of one row's tokens; lists run over the row's tokens (or the prompt's)."""

    row: int  # index into the columns of the message; -1 where the struct stands for a prompt
    logprobs: list[float | None]  # natural log; None for the first prompt token
    ranks: list[int]  # 1 is the most likely; 0 where logprob is None
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All of a prompt's log-probabilities, sent once, before or with the first output token."""

    request_id: int
    token_ids: bytes  # packed int32, the prompt
    scores: RowLogprobs


class Finished(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The one terminal record of a request on this edge.

    The output tokens include a final EOS or stop id; `stop_token_id` names it, and it is not part of the text.
    """

    request_id: int
    reason: FinishReason
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    stop_token_id: int | None = None
    is_eos: bool = False
    failure: Failure | None = None
    arrival_ns: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    num_preemptions: int = 0


class EngineStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Gauges now, and counters since this incarnation of the engine began."""

    num_running: int = 0
    num_waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    dropped_messages: int = 0  # undecodable, or for unknown ids
    step_seconds: float = 0.0
    schedule_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    send_seconds: float = 0.0
    num_retained: int = 0  # finished, not yet released
    draft_tokens: int = 0  # computed for speculation
    accepted_draft_tokens: int = 0  # of those, the ones that were right
    stop_overrun_rows: int = 0  # rows of a step that ran while the stop string of their request was on its way
    num_ended: int = 0  # requests that were admitted and have ended
    num_flushes: int = 0
    flushed_blocks: int = 0  # cached blocks that they forgot
    build_seconds: float = 0.0
    profile: int = 0  # number of the last one that was begun
    profile_steps_left: int = 0  # that it is still to record
    paused: bool = False


class TokenBatch(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """All that one engine step produced. A batch without rows is a heartbeat that carries stats."""

    engine_index: int
    incarnation: int
    step: int
    request_ids: list[int] = []
    first_index: list[int] = []  # output index of each row's first token
    num_tokens: list[int] = []
    token_ids: bytes = b""  # packed int32, ragged, rows one after the other
    accepted: list[Accepted] = []
    opened: list[Opened] = []
    logprobs: list[RowLogprobs] = []
    prompt_logprobs: list[PromptLogprobs] = []
    finished: list[Finished] = []
    stats: EngineStats | None = None
    sent_ns: int = 0


# ---- detok -> engine -------------------------------------------------------------------------------------
# AbortRequest(cause=STOP_STRING), and:


class Resync(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Send `Opened` with all ids so far (and `Finished`, if it ended) of these requests; empty means all."""

    request_ids: list[int]
    detok_index: int = 0


# ---- detok -> api ----------------------------------------------------------------------------------------


class TokenText(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token with its score, as the API shows it. `raw` are the token's own bytes, whole characters or not."""

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    rank: int = 0
    top: list[tuple[int, str, bytes, float]] = []  # id, text, bytes, logprob; most likely first
    text_offset: int = 0  # characters of output text before this token


class RowTokenTexts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Entries whose last byte is in this row's text or before: they may be those of earlier rows' ids."""

    row: int
    tokens: list[TokenText]
    first_index: int = 0  # output index of the first entry; the others follow without a gap


class PromptTokenTexts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    request_id: int
    tokens: list[TokenText]


class TextFinished(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The one terminal record of a request on the detok -> api edge."""

    finished: Finished
    stop_string: str | None = None  # which stop string fired


class DetokStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Gauges now, and counters since this incarnation of the detokenizer began."""

    num_states: int = 0
    lag_steps: int = 0  # batches that were waiting when the last drain began
    batches: int = 0
    tokens: int = 0
    decode_seconds: float = 0.0
    evictions: int = 0
    resyncs: int = 0
    forced_flushes: int = 0  # windows of undecodable bytes that were cut at their cap (no text is given up)
    late_rows: int = 0  # rows for unknown or ended requests
    row_errors: int = 0
    stop_overrun_tokens: int = 0
    dropped_messages: int = 0
    lag_seconds: float = 0.0  # age of the oldest batch of the last drain that said when it was sent
    rows: int = 0  # requests that the last drain had news of
    held_streams: int = 0  # of those, the ones that hold text back


class TextBatch(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """All that one drain of the detokenizer produced for one api process."""

    detok_index: int
    incarnation: int
    engine_index: int
    engine_incarnation: int
    step: int
    request_ids: list[int] = []
    deltas: list[str] = []
    char_offset: list[int] = []  # characters of the output before this delta
    first_index: list[int] = []  # output index of the first id of this row
    num_tokens: list[int] = []  # ids that this row carries (all ids decoded since the last row)
    token_ids: bytes = b""  # packed int32, ragged
    accepted: list[Accepted] = []
    logprobs: list[RowTokenTexts] = []
    prompt_logprobs: list[PromptTokenTexts] = []
    finished: list[TextFinished] = []
    engine_stats: EngineStats | None = None
    detok_stats: DetokStats | None = None


# ---- supervisor -> api -----------------------------------------------------------------------------------


class EngineFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What only the engine knows, once it has loaded the model."""

    max_model_len: int
    vocab_size: int  # of the output layer: every id given by a client is below it
    num_blocks: int
    block_size: int
    dtype: str = ""
    device: str = ""
    batch_invariant: bool = False
    attention_backend: str = ""
    weights_bytes: int = 0
    kv_bytes: int = 0
    kv_cache_dtype: str = ""
    num_parameters: int = 0
    context_bytes: int = 0  # that a row reads for each token of its context, in the layers without a sliding window


class ProcessFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    name: str  # "engine-0"
    pid: int
    incarnation: int
    state: str  # "starting", "ready", "dead"
    started_ns: int = 0


class ServerStatus(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """What the supervisor knows of the whole server; sent to every api on each change."""

    stage: str  # "converting model", "loading weights", "warming up", "ready", "failed", ...
    progress: float = 0.0  # 0..1 of this stage
    model_dir: str = ""  # set once the model's files are on disk
    engine: EngineFacts | None = None  # set once the engine can take requests
    processes: list[ProcessFacts] = []
    draining: bool = False
    failed: str = ""  # non-empty: the server is about to end, open streams get this as an error


# ---- api -> api ------------------------------------------------------------------------------------------
# Several api processes share one port, so that any of them gets a question about all of them.


class ApiTask(IntEnum):
    COUNTS = 0  # what this process counts, for /metrics and /server_info
    ABORT = 1  # end the requests with these labels
    EVENTS = 2  # what came after an event of a resumable stream
    LOGGING = 3  # write other lines of log from now on


class LogChoice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What api processes write into their logs; what is not given stays as it is."""

    log_requests: bool | None = None
    log_requests_level: int | None = None
    log_level: str = ""


class ApiCall(msgspec.Struct, frozen=True, array_like=True, tag=13, gc=False):
    """One api process asks another, which answers with one ApiReply of the same number."""

    asker: int
    number: int
    task: ApiTask
    sent_ns: int
    labels: list[str] | None = None  # ABORT: None means all
    event_id: str = ""  # EVENTS
    owner: str = ""  # EVENTS: the API key of whoever asks
    patience_s: float = 0.0  # EVENTS: how long the answer may wait for news
    logging: LogChoice | None = None  # LOGGING


class MetricSamples(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One metric family of the exposition format."""

    name: str
    words: str
    kind: str  # "counter", "gauge", "histogram"
    samples: list[tuple[str, dict[str, str], float]]  # name with suffix, labels, value


class ApiReply(msgspec.Struct, frozen=True, array_like=True, tag=14, gc=False):
    answerer: int
    number: int
    live_requests: int = 0
    open_streams: int = 0
    metrics: list[MetricSamples] = []
    aborted: list[str] = []
    events: list[bytes] = []
    is_over: bool = False  # EVENTS: no more will come
    failure: Failure | None = None


# ---- supervisor -> engine --------------------------------------------------------------------------------


class ApiGone(msgspec.Struct, frozen=True, array_like=True, tag=11, gc=False):
    """This life of an api process, and all before it, has ended: nobody waits for its requests any more."""

    api_index: int
    incarnation: int


# ---- child -> supervisor ---------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=8, gc=False):
    """This process can do its job. An api says Ready when it listens and again when the ring has turned."""

    name: str
    incarnation: int
    pid: int
    protocol_version: int = PROTOCOL_VERSION
    engine: EngineFacts | None = None
    ring_turned: bool = False


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag=9, gc=False):
    name: str
    incarnation: int
    message: str


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=10, gc=False):
    """Sign of life, and what this process is doing while it starts."""

    name: str
    incarnation: int
    stage: str = ""
    progress: float = 0.0
    model_dir: str = ""
    late_s: float = 0.0  # for how long its loop has been later than it said it would be
    doing: str = ""  # the long step that it has declared, if any


EngineInbox = AddRequest | AbortRequest | Release | Resync | ApiGone | FlushCache | Pause | StartProfile | StopProfile
DetokInbox = TokenBatch
ApiInbox = TextBatch | ServerStatus | ApiCall | ApiReply
SupervisorInbox = Ready | StartFailed | Heartbeat

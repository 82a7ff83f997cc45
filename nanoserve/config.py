"""The one configuration tree: frozen, built once from flags, environment and file, handed out in slices.

Every field below is a flag of launch_server (`max_num_seqs` is `--max-num-seqs`), a YAML key, and an environment
variable (`NANOSERVE_MAX_NUM_SEQS`). `nanoserve.cli` turns those into this tree; nothing changes it afterwards.
Each class takes only its own section. Field names are unique over all sections, so files and flags stay flat.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(
    default: Any,
    help: str,  # noqa: A002 - the word argparse uses
    *,
    choices: tuple[str, ...] = (),
    metavar: str = "",
    size: bool = False,
    aliases: tuple[str, ...] = (),
) -> Any:
    """A config field. `size` accepts 512MiB, 4g, 32k and the like; `aliases` are other servers' names for it."""
    metadata = {"help": help, "choices": choices, "metavar": metavar, "size": size, "aliases": aliases}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and in which form."""

    model: str = option(
        "smollm2-135m",
        "a directory, a .gguf file, a hub id (org/name), the name of a bundled model, or `sim` (no weights)",
        aliases=("model-path",),
    )
    tokenizer: str = option(
        "", "directory, tokenizer file, .gguf file, hub id or bundled name; default: the model's own"
    )
    skip_tokenizer_init: bool = option(
        False, "load no tokenizer: prompts and answers are token ids only, and what needs text is refused"
    )
    revision: str = option("", "branch, tag or commit of a hub id")
    served_model_name: tuple[str, ...] = option((), "names that clients may use; the first is echoed; default: --model")
    dtype: str = option(
        "auto",
        "compute type; auto is bfloat16 where the device computes it natively, else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "auto",
        "weights of the C++ engine. auto: bfloat16, and beside it the 4- and 8-bit blocks of the GGUF file that the "
        "model came from, for steps of few rows; gguf: those blocks alone, least memory; none: bfloat16 alone. These "
        "three give the same logits. int8: groups of 32 weights, rounded to 8 bits. int8-dynamic: the GGUF file's "
        "blocks, or such groups, multiplied as integers with activations that are rounded to 8 bits, too: fastest",
        choices=("auto", "none", "gguf", "int8", "int8-dynamic"),
    )
    max_model_len: int = option(
        0, "longest prompt plus answer in tokens; 0: the model's own, or less if memory asks for it",
        size=True, aliases=("context-length",),
    )  # fmt: skip
    load_format: str = option("auto", "dummy: random weights, for tests", choices=("auto", "dummy"))
    chat_template: str = option("", "file with a Jinja chat template; default: the model's own")
    sampling_defaults: str = option(
        "model", "where unset sampling fields come from: generation_config.json or OpenAI's defaults",
        choices=("model", "openai"),
    )  # fmt: skip
    cache_dir: str = option("", "converted models are kept here; default: $XDG_CACHE_HOME/nanoserve")
    seed: int = option(0, "seed of the seeds that are drawn for requests without one; 0: from the system")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """`--model sim`: everything is real but the forward pass."""

    sim_output: str = option(
        "echo", "what the sim model says: the prompt's ids again, or ids drawn from the seed",
        choices=("echo", "random"),
    )  # fmt: skip
    sim_step_ms: float = option(0.0, "time of one step of the sim model")
    sim_token_us: float = option(0.0, "additional time per token in a step of the sim model")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine process: device and threads."""

    device: str = option("auto", "auto takes a GPU where there is one", choices=("auto", "cpu", "cuda"))
    engine_threads: int = option(0, "compute threads of the CPU engine; 0: one per core")
    attention_backend: str = option("auto", "auto, or torch for the plain reference path", choices=("auto", "torch"))
    standby_engine: bool = option(
        False, "keep a second engine process that has loaded its libraries and waits (150 MB): when the engine dies, "
        "streams go on in about half the time",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs, and how much of it, in a step."""

    max_num_seqs: int = option(64, "most requests in one step", aliases=("max-running-requests",))
    max_num_batched_tokens: int = option(
        512, "most tokens in one step, prompts and answers together", size=True, aliases=("max-prefill-tokens",)
    )
    prompt_tokens_per_stream: int = option(
        0, "most prompt tokens in a step for each stream that decodes in it and each request that waits for its first "
        "token, beside 32 (fewer far back in a long prompt, unbound while as many wait as decode); 0: 2 on a CPU, "
        "unbound on a GPU",
    )  # fmt: skip
    max_num_queued: int = option(
        1024, "most requests that wait; more are refused (see --overload-status)", aliases=("max-queued-requests",)
    )
    scheduling_policy: str = option(
        "fcfs", "order of waiting requests; priority: lower first; fair: equal shares for every API key",
        choices=("fcfs", "priority", "fair"),
        aliases=("schedule-policy",),
    )  # fmt: skip
    prefix_cache: bool = option(True, "reuse the KV blocks of equal prompt beginnings")
    speculative_num_tokens: int = option(
        -1, "most tokens that a step drafts for one answer, from what followed in earlier text, while at most three "
        "answers are in work (more where contexts are long) and drafts prove right; answers stay the same; 0: off; "
        "-1: 4 on a CPU, else off",
        aliases=("num-speculative-tokens", "speculative-num-draft-tokens"),
    )  # fmt: skip
    speculative_ngram_min: int = option(
        3, "tokens that must have stood before, so that what followed them is drafted", aliases=("prompt-lookup-min",)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV memory."""

    block_size: int = option(16, "tokens in one KV block", aliases=("page-size",))
    kv_cache_memory: int = option(
        0, "bytes of KV cache (512MiB, 4GiB); 0: a quarter of the free memory, at most what the limits can use",
        size=True,
    )  # fmt: skip
    kv_cache_dtype: str = option(
        "auto", "type of keys and values; auto: the one computed in, int8: half the bytes of bfloat16 (docs/models.md)",
        choices=("auto", "bfloat16", "int8"),
    )  # fmt: skip
    num_kv_blocks: int = option(0, "exact number of KV blocks, for tests; 0: from --kv-cache-memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokConfig:
    """The detokenizer process."""

    detok_max_states: int = option(
        65536, "most live streams kept in memory; the least recently used is rebuilt on need"
    )
    detokenizer: str = option(
        "auto", "how ids become text; bytes: by a table, window: by the tokenizer; auto: bytes where proved equal",
        choices=("auto", "window", "bytes"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """The HTTP processes."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free one")
    root_path: str = option("", "prefix that a proxy puts before every path, as /llm; answered with and without it")
    uds: str = option("", "listen on this Unix socket; host and port are then ignored")
    api_workers: int = option(1, "api processes on the one port")
    max_body_bytes: int = option(32 << 20, "largest request body", size=True)
    max_bodies_bytes: int = option(
        256 << 20, "request bodies that an api process reads at the same time, in all; beyond it 503", size=True
    )
    max_header_bytes: int = option(16 << 10, "largest header line, and largest path", size=True)
    max_headers: int = option(100, "most header lines of a request")
    header_timeout: float = option(20.0, "seconds a new connection has for its first headers; 0: no limit")
    body_timeout: float = option(60.0, "seconds a request body may take to arrive; 0: no limit")
    max_connections: int = option(8192, "most open connections of one api process; more are closed with 503")
    api_key: tuple[str, ...] = option((), "keys that clients must send; none: open to all")
    api_key_file: str = option("", "file with one such key per line")
    admin_api_key: tuple[str, ...] = option((), "keys for paths that change the server; default: the api keys")
    cors_allow_origins: tuple[str, ...] = option((), "origins whose browsers may call; `*`: all; default: none")
    ssl_certfile: str = option("", "certificate chain (PEM); serve HTTPS")
    ssl_keyfile: str = option("", "private key of the certificate (PEM)")
    http_keep_alive: float = option(75.0, "seconds an idle connection is kept")
    sse_keep_alive: float = option(15.0, "seconds of silence before a stream sends a comment; 0: never")
    force_include_usage: bool = option(False, "a usage event at the end of every stream, asked for or not")
    max_stop_strings: int = option(16, "most stop strings in one request")
    max_logprobs: int = option(20, "most top logprobs per token")
    strict_params: bool = option(
        False, "refuse request fields that the server does not know, instead of reporting them"
    )
    stream_buffer_bytes: int = option(
        1 << 20, "text that a stream holds for a client that does not read; beyond it the connection is cut", size=True
    )
    write_timeout: float = option(120.0, "seconds a client may leave a stream unread; 0: no limit")
    resume_grace: float = option(
        0.0, "seconds a stream goes on without its client, who may resume it with Last-Event-ID; 0: not at all"
    )
    accept_timeout: float = option(
        60.0, "seconds a new request waits for a restarting engine to take it; then 503; 0: no limit"
    )
    overload_status: str = option("503", "status of requests refused because the queue is full", choices=("503", "429"))
    drain_timeout: float = option(30.0, "seconds that live streams get after SIGTERM", aliases=("shutdown-timeout",))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObsConfig:
    """Logs and watchdogs."""

    log_dir: str = option(
        "", "one log and one watchdog log per process here; default: they are kept only while the server runs"
    )
    log_level: str = option(
        "info", "least important line that is written", choices=("debug", "info", "warning", "error")
    )
    log_requests: bool = option(False, "one line of log for each request that ends: ids, sizes, times; never texts")
    log_requests_level: str = option(
        "0", "what such a line tells; 0: ids, sizes and times; 1: sampling parameters too", choices=("0", "1")
    )
    stats_interval: float = option(10.0, "seconds between the status lines of a busy process; 0: none")
    watchdog_soft: float = option(30.0, "seconds without progress before all stacks go to the watchdog log; 0: off")
    watchdog_hard: float = option(300.0, "seconds without progress before that process is ended; 0: never")
    slow_step: float = option(2.0, "seconds after which a step is logged with its likely reason; 0: never")
    startup_timeout: float = option(600.0, "seconds for all processes to become ready")
    max_restarts: int = option(5, "restarts of one process within ten minutes before the whole server ends")
    fault: tuple[str, ...] = option((), "for tests: PROCESS:ACTION[=VALUE]@TURN[!], see nanoserve/obs/faults.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Which of the processes run here."""

    role: str = option(
        "all", "api, engine, detok: only this one, so that a container runtime can run and restart each by itself",
        choices=("all", "api", "engine", "detok"),
    )  # fmt: skip
    run_dir: str = option("", "with --role: the directory where the processes meet, the same for all of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The whole tree. `nanoserve.cli.load_config` builds it; `msgspec.json` carries it to the children."""

    model: ModelConfig = field(default_factory=ModelConfig)
    sim: SimConfig = field(default_factory=SimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    detok: DetokConfig = field(default_factory=DetokConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    obs: ObsConfig = field(default_factory=ObsConfig)
    processes: ProcessConfig = field(default_factory=ProcessConfig)

    @property
    def is_sim(self) -> bool:
        return self.model.model == "sim"

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.model.served_model_name or (self.model.model,)

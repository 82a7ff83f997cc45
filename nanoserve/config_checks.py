"""What a configuration must fulfil beyond the types of its fields: ranges, and fields that depend on each other.

Owner: the launcher, through `nanoserve.cli.load_config`. Each rule gives one line that names the flag.
"""

from __future__ import annotations

from pathlib import Path

from nanoserve.config import ServerConfig
from nanoserve.errors import ConfigError
from nanoserve.ipc.ids import MAX_API_INDEX
from nanoserve.obs.faults import parse_fault

_MAX_COUNT = 1 << 24  # of tokens or blocks: beyond any model, and still small enough to keep books of


def check_config(config: ServerConfig) -> None:
    """Raises ConfigError for the first rule that is broken; reads nothing but the paths it is given."""
    _check_ranges(config)
    scheduler, obs = config.scheduler, config.obs
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {scheduler.max_num_batched_tokens} is below --max-num-seqs "
            f"{scheduler.max_num_seqs}: a step needs room for one token of each request"
        )
    if obs.watchdog_hard and obs.watchdog_hard <= obs.watchdog_soft:
        raise ConfigError("--watchdog-hard must be longer than --watchdog-soft, or 0")
    if config.model.chat_template and not Path(config.model.chat_template).is_file():
        raise ConfigError(f"--chat-template {config.model.chat_template}: no such file")
    if (config.processes.role == "all") != (not config.processes.run_dir):
        raise ConfigError("--role api|engine|detok and --run-dir belong together")
    if config.engine.standby_engine and config.processes.role != "all":
        raise ConfigError("--standby-engine needs --role all: an engine by itself is restarted by whoever started it")
    if config.api.max_bodies_bytes < config.api.max_body_bytes:
        raise ConfigError("--max-bodies-bytes is below --max-body-bytes: the largest body could never be read")
    if config.api.ssl_keyfile and not config.api.ssl_certfile:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile: without it nothing would be encrypted")
    for text in obs.fault:
        parse_fault(text)
    if obs.log_dir and Path(obs.log_dir).exists() and not Path(obs.log_dir).is_dir():
        raise ConfigError(f"--log-dir {obs.log_dir}: not a directory")


def _check_ranges(config: ServerConfig) -> None:
    at_least: list[tuple[str, float, float]] = [
        ("max_model_len", config.model.max_model_len, 0),
        ("seed", config.model.seed, 0),
        ("sim_step_ms", config.sim.sim_step_ms, 0),
        ("sim_token_us", config.sim.sim_token_us, 0),
        ("engine_threads", config.engine.engine_threads, 0),
        ("max_num_seqs", config.scheduler.max_num_seqs, 1),
        ("prompt_tokens_per_stream", config.scheduler.prompt_tokens_per_stream, 0),
        ("max_num_queued", config.scheduler.max_num_queued, 0),
        ("speculative_num_tokens", config.scheduler.speculative_num_tokens, -1),
        ("speculative_ngram_min", config.scheduler.speculative_ngram_min, 1),
        ("block_size", config.cache.block_size, 1),
        ("kv_cache_memory", config.cache.kv_cache_memory, 0),
        ("num_kv_blocks", config.cache.num_kv_blocks, 0),
        ("detok_max_states", config.detok.detok_max_states, 1),
        ("port", config.api.port, 0),
        ("api_workers", config.api.api_workers, 1),
        ("max_body_bytes", config.api.max_body_bytes, 1024),
        ("max_header_bytes", config.api.max_header_bytes, 1024),
        ("max_headers", config.api.max_headers, 8),
        ("max_connections", config.api.max_connections, 1),
        ("header_timeout", config.api.header_timeout, 0),
        ("body_timeout", config.api.body_timeout, 0),
        ("write_timeout", config.api.write_timeout, 0),
        ("resume_grace", config.api.resume_grace, 0),
        ("accept_timeout", config.api.accept_timeout, 0),
        ("stream_buffer_bytes", config.api.stream_buffer_bytes, 1024),
        ("http_keep_alive", config.api.http_keep_alive, 0),
        ("sse_keep_alive", config.api.sse_keep_alive, 0),
        ("max_stop_strings", config.api.max_stop_strings, 0),
        ("max_logprobs", config.api.max_logprobs, 0),
        ("drain_timeout", config.api.drain_timeout, 0),
        ("stats_interval", config.obs.stats_interval, 0),
        ("watchdog_soft", config.obs.watchdog_soft, 0),
        ("watchdog_hard", config.obs.watchdog_hard, 0),
        ("slow_step", config.obs.slow_step, 0),
        ("startup_timeout", config.obs.startup_timeout, 1),
        ("max_restarts", config.obs.max_restarts, 0),
    ]
    for name, value, lowest in at_least:
        if value < lowest:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g} is below {lowest:g}")
    at_most = [
        ("max_model_len", config.model.max_model_len, _MAX_COUNT),
        ("num_kv_blocks", config.cache.num_kv_blocks, _MAX_COUNT),
        ("block_size", config.cache.block_size, _MAX_COUNT),
        ("max_num_seqs", config.scheduler.max_num_seqs, _MAX_COUNT),
        ("max_num_batched_tokens", config.scheduler.max_num_batched_tokens, _MAX_COUNT),
        ("seed", config.model.seed, 2**63 - 1),
        ("port", config.api.port, 65535),
        ("api_workers", config.api.api_workers, MAX_API_INDEX + 1),
    ]
    for name, value, highest in at_most:
        if value > highest:
            raise ConfigError(f"--{name.replace('_', '-')} {value} is above {highest}")
    if config.model.max_model_len == 1:
        raise ConfigError("--max-model-len 1 is below 2: one token of prompt and one of answer")
    if not config.model.model:
        raise ConfigError("--model is empty")

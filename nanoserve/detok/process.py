"""The detokenizer process: receive token batches, make text, send it on. The work is `DetokManager`'s.

Started by the supervisor. Imports neither torch nor transformers. A detokenizer that took a dead one's place asks the
engine for everything that lives, and every api drops the text that it has.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import zmq

from nanoserve.config import ServerConfig
from nanoserve.detok.manager import DetokManager
from nanoserve.detok.token_table import TokenTable, load_or_build_table
from nanoserve.hub.cache import cache_root
from nanoserve.ipc.channels import Inbox, Outbox
from nanoserve.ipc.endpoints import Endpoints
from nanoserve.ipc.link import ProcessLink
from nanoserve.ipc.messages import DetokInbox, TokenBatch
from nanoserve.obs.logs import FILE_ONLY
from nanoserve.obs.memory import count
from nanoserve.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger("nanoserve.detok")
_IDLE_MS = 1000


def run(config: ServerConfig, model_dir: Path, endpoints: Endpoints, link: ProcessLink) -> None:
    """Serves until a stop is requested. Raises StartupError when the tokenizer cannot be used."""
    # Its batches are small: threads would cost more than they save, and take cores from the engine.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    manager = _load(config, model_dir, link)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[TokenBatch] = Inbox(context, endpoints.detok(link.index), DetokInbox, wake_fd=link.stop_fd)
    engine = Outbox(context, endpoints.engine())
    apis = [Outbox(context, endpoints.api(index)) for index in range(config.api.api_workers)]
    if link.incarnation > 1:
        engine.send(manager.resync_all())
    count("detok states", manager.state_bytes)
    link.ready()
    watchdog = link.watchdog
    try:
        while not link.stop_requested:
            with watchdog.idle():
                inbox.wait(_IDLE_MS)
            output = manager.process(inbox.drain())
            for index, text_batch in output.text_batches.items():
                apis[index].send(text_batch)
            for message in output.to_engine:
                engine.send(message)
            watchdog.feed()
    finally:
        inbox.close()
        for outbox in (engine, *apis):
            outbox.close()
        context.term()


def _load(config: ServerConfig, model_dir: Path, link: ProcessLink) -> DetokManager:
    tokenizer: Tokenizer | None = None
    table: TokenTable | None = None
    if not config.model.skip_tokenizer_init:
        link.stage("loading tokenizer")
        tokenizer = load_tokenizer(model_dir)
        link.stage("checking token bytes")
        table = load_or_build_table(tokenizer, model_dir, cache_root(config.model))
    manager = DetokManager(
        tokenizer,
        config.detok,
        detok_index=link.index,
        incarnation=link.incarnation,
        num_apis=config.api.api_workers,
        table=table,
    )
    num_tokens = tokenizer.vocab_size if tokenizer else 0
    _log.info("%d tokens, decoded by %s", num_tokens, manager.decoder_name, extra=FILE_ONLY)
    return manager

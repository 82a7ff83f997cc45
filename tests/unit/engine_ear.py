"""An ear for what the engine's core says, its loop, and cores with messages in them."""

from __future__ import annotations

from nanoserve.engine.core import EngineCore
from nanoserve.ipc.columns import unpack_ids
from nanoserve.ipc.messages import EngineInbox, Finished, TokenBatch
from tests.factories import make_core
from tests.fakes import FakeExecutor


class Ear:
    """Hears batches as the detokenizer does and insists on the protocol."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}

    def hear(self, batch: TokenBatch | None) -> None:
        if batch is None:
            return
        for opened in batch.opened:
            self.outputs[opened.request_id] = unpack_ids(opened.output_token_ids)
        assert len(set(batch.request_ids)) == len(batch.request_ids), "two rows of one request in a batch"
        ids, offset = unpack_ids(batch.token_ids), 0
        for request_id, first, count in zip(batch.request_ids, batch.first_index, batch.num_tokens, strict=True):
            assert request_id not in self.finished, "a row after the end"
            assert first == len(self.outputs[request_id]), "a gap or a repeat"
            self.outputs[request_id] += ids[offset : offset + count]
            offset += count
        assert offset == len(ids)
        for end in batch.finished:
            assert end.request_id in self.outputs, "an end without a beginning"
            assert end.request_id not in self.finished, "two ends"
            self.finished[end.request_id] = end


def run(core: EngineCore, ear: Ear, max_steps: int = 500) -> None:
    """The process's loop, until nothing is left to do."""
    for _ in range(max_steps):
        core.receive()
        ear.hear(core.take_news())
        if not core.has_work:
            return
        ear.hear(core.step())
    raise AssertionError("no end")


def post(core: EngineCore, message: EngineInbox) -> None:
    """Leaves a message in the inbox, to be found at the next drain."""
    core._inbox.put(message)


def core_with(*messages: EngineInbox, **kwargs) -> tuple[EngineCore, FakeExecutor]:
    executor = kwargs.pop("executor", None) or FakeExecutor(kwargs.get("block_size", 4))
    core = make_core(executor, **kwargs)
    for message in messages:
        core.handle(message)
    return core, executor


# ---- admission ----------------------------------------------------------------------------------------------

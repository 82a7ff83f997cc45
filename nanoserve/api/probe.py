"""One token round the ring: how an api process knows that engine and detokenizer work.

Owner process: api. Called at start by `process`, and by /health_generate.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanoserve.api.engine_client import EngineClient, NewRequest
from nanoserve.api.errors import from_failure
from nanoserve.api.stream import Outlet
from nanoserve.ipc.messages import PROBE_PRIORITY, AbortCause, EmitMode, FinishReason, SamplingParams, TextSpec


async def one_token_round(client: EngineClient, prompt_token_ids: Sequence[int]) -> None:
    """Returns when the token has come round; RequestError when the ring refuses it. Waits without a limit."""
    outlet = Outlet()
    new = NewRequest(
        prompt_token_ids=list(prompt_token_ids),
        sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        text=TextSpec(emit=EmitMode.FINAL),
        priority=PROBE_PRIORITY,
    )
    stream = client.submit(new, outlet)
    try:
        while stream.finished is None:
            for ready in await outlet.wait():
                ready.take()  # or it would not be told of the end
    finally:
        client.abort([stream], AbortCause.CLIENT_GONE)
    ended = stream.finished.finished
    if ended.reason == FinishReason.ERROR:
        raise from_failure(ended.failure)

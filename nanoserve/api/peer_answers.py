"""What this api process answers when another one asks: its counts, the end of requests, events of a stream, its log.

Owner process: api. `process` hands the calls over; the asking side is in `ops`, `control` and `remote_resume`.
"""

from __future__ import annotations

from nanoserve.api.context import ApiContext
from nanoserve.api.errors import http_error
from nanoserve.ipc.messages import ApiCall, ApiReply, ApiTask


async def answer(context: ApiContext, call: ApiCall) -> ApiReply:
    """RequestError where what is asked for is not here; the asker gets it as a failure."""
    index = context.peers.index
    match call.task:
        case ApiTask.COUNTS:
            return counts(context, call.number)
        case ApiTask.ABORT:
            ended = context.pacer.abort(None if call.labels is None else set(call.labels))
            return ApiReply(answerer=index, number=call.number, aborted=sorted(ended))
        case ApiTask.LOGGING:
            if call.logging is not None:
                context.request_log.choose(call.logging)
            return ApiReply(answerer=index, number=call.number)
        case ApiTask.EVENTS:
            if context.resumes is None:
                raise http_error(404, "There is no such stream to resume.")
            stream, after = context.resumes.find(call.event_id, call.owner)
            events, is_over = await stream.take(after, call.patience_s)
            return ApiReply(answerer=index, number=call.number, events=events, is_over=is_over)


def counts(context: ApiContext, number: int = 0) -> ApiReply:
    """What this process counts, in the shape in which it goes to others."""
    return ApiReply(
        answerer=context.peers.index,
        number=number,
        live_requests=context.client.num_live,
        open_streams=context.metrics.streams_open,
        metrics=context.metrics.own_samples(),
    )

"""vLLM's detokenizers over a given text; run by `nanoserve bench detok` with an interpreter that has vLLM.

Reads {tokenizer, text, streams, steps, prompt, rounds} as JSON on stdin and writes CPU microseconds per token as JSON
on stdout. It imports nothing of nanoserve, which that interpreter does not have.
"""

from __future__ import annotations

import gc
import inspect
import json
import sys
import time
from typing import Any


def main() -> None:
    import transformers
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest, detokenizer

    asked = json.load(sys.stdin)
    steps, num_streams = asked["steps"], asked["streams"]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=asked["tokenizer"])
    ids = tokenizer(asked["text"], add_special_tokens=False)["input_ids"]
    ids *= num_streams * steps // len(ids) + 2
    streams_ids = [ids[place * steps : (place + 1) * steps] for place in range(num_streams)]
    rows = [[[stream_ids[step]] for stream_ids in streams_ids] for step in range(steps)]
    given: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": ids[: asked["prompt"]],
        "sampling_params": SamplingParams(max_tokens=9999),
        "arrival_time": 0.0,
    }
    names = inspect.signature(EngineCoreRequest).parameters
    needed = {name for name, parameter in names.items() if parameter.default is inspect.Parameter.empty}
    request = EngineCoreRequest(**{name: given.get(name) for name in names if name in given or name in needed})

    def run(kind: Any) -> int:
        started = time.process_time_ns()
        streams = [kind(tokenizer, request) for _ in streams_ids]
        for row in rows:
            for stream, new_ids in zip(streams, row, strict=True):
                stream.update(new_ids, False)
                stream.get_next_output_text(False, True)
        return time.process_time_ns() - started

    seen: dict[str, list[float]] = {"vllm_fast_us": [], "vllm_slow_us": []}
    for turn in range(asked["rounds"] + 1):
        for name, kind in zip(
            seen, (detokenizer.FastIncrementalDetokenizer, detokenizer.SlowIncrementalDetokenizer), strict=True
        ):
            if name == "vllm_slow_us" and turn > 1:
                continue  # hundreds of microseconds with a large vocabulary: one round says enough
            gc.collect()
            took = run(kind)
            if turn:
                seen[name].append(took / 1e3 / (steps * num_streams))
    print(json.dumps(seen))


if __name__ == "__main__":
    main()

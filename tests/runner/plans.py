"""A stand-in for the scheduler that drives an executor through random plans, and keeps what comes out."""

from __future__ import annotations

import msgspec
import numpy as np

from nanoserve.ipc.messages import SamplingParams
from nanoserve.sched.plan import Executor, NewRequest, PlanRow, StepPlan, StepResult


class Driver:
    """Stands for the scheduler: random chunks, random company, preemptions; keeps every token and score."""

    def __init__(self, runner: Executor, *, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self.runner = runner
        self.block_size = block_size
        self.random = np.random.default_rng(seed)
        self.free = list(range(num_blocks))
        self.requests: dict[int, NewRequest] = {}
        self.target: dict[int, int] = {}
        self.outputs: dict[int, list[int]] = {}
        self.scores: dict[int, list] = {}
        self.prompt_scores: dict[int, dict[int, object]] = {}
        self.computed: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self.dropped: list[int] = []
        self.errors: dict[int, str] = {}
        self.steps = 0

    def add(self, request_id: int, prompt: list[int], num_output: int, suppressed=(), **sampling) -> None:
        self.requests[request_id] = NewRequest(request_id, prompt, len(prompt), SamplingParams(**sampling), suppressed)
        self.target[request_id] = num_output
        self.outputs[request_id], self.scores[request_id], self.prompt_scores[request_id] = [], [], {}

    @property
    def live(self) -> list[int]:
        return [r for r in self.requests if len(self.outputs[r]) < self.target[r] and r not in self.errors]

    def run(self, *, company: float = 1.0, chunk: int = 1000, preempt: float = 0.0) -> None:
        while self.live:
            for request_id in [r for r in self.computed if self.random.random() < preempt]:
                self.forget(request_id)
            chosen = [r for r in self.live if self.random.random() < company] or self.live[:1]
            self.random.shuffle(chosen)
            self.step([(r, int(self.random.integers(1, chunk + 1))) for r in chosen])

    def forget(self, request_id: int) -> None:
        self.dropped.append(request_id)
        self.free += self.blocks.pop(request_id)
        del self.computed[request_id]

    def step(self, wanted: list[tuple[int, int]]) -> StepResult:
        new, rows = [], []
        for request_id, count in wanted:
            request, outputs = self.requests[request_id], self.outputs[request_id]
            if request_id not in self.computed:
                tokens = [*request.token_ids[: request.num_prompt_tokens], *outputs]
                new.append(msgspec.structs.replace(request, token_ids=tokens))
                self.computed[request_id], self.blocks[request_id] = 0, []
            start, total = self.computed[request_id], request.num_prompt_tokens + len(outputs)
            count = min(count, total - start)
            missing = -(-(start + count) // self.block_size) - len(self.blocks[request_id])
            fresh = [self.free.pop() for _ in range(missing)]
            self.blocks[request_id] += fresh
            rows.append(PlanRow(request_id, start, count, fresh, start + count == total))
        result = self.runner.execute(StepPlan(self.steps, new, rows, self.dropped))
        self.steps, self.dropped = self.steps + 1, []
        self._take(rows, result)
        return result

    def _take(self, rows: list[PlanRow], result: StepResult) -> None:
        self.errors |= {error.request_id: error.message for error in result.errors}
        tokens = iter(result.token_ids)
        for row, num_tokens in zip(rows, result.num_tokens, strict=True):
            assert num_tokens == (row.samples and row.request_id not in self.errors)
            self.outputs[row.request_id] += [next(tokens) for _ in range(num_tokens)]
            self.scores[row.request_id] += result.scores.get(row.request_id, [])
            for offset, score in enumerate(result.prompt_scores.get(row.request_id, [])):
                self.prompt_scores[row.request_id][row.start + 1 + offset] = score
            self.computed[row.request_id] += row.num_tokens
        assert next(tokens, None) is None
        for request_id in [r for r in self.computed if r not in self.live]:
            self.forget(request_id)

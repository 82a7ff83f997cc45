"""Stand-ins for the parts that a test does not test: an executor without a model, a link without a supervisor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nanoserve.ipc.messages import EngineFacts, SamplingParams
from nanoserve.sched.plan import NewRequest, PlanRow, RowError, StepPlan, StepResult, TokenScores


def prefix_hashes(token_ids: list[int], before: int = 0) -> list[int]:
    """A number per position that depends on every token up to it. `before` is that of the position before the first."""
    hashes, value = [], before
    for token_id in token_ids:
        value = hash((value, token_id, 12345))
        hashes.append(value)
    return hashes


def score_of(prefix_hash: int, token_id: int) -> TokenScores:
    return TokenScores(-((prefix_hash + token_id) % 97) / 8, 1 + token_id % 3, [token_id], [-0.5])


@dataclass(slots=True)
class _State:
    """What the fake keeps of a running request, as the real executor does."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    suppressed: tuple[int, ...]
    hashes: list[int]
    block_ids: list[int] = field(default_factory=list)

    def next_token(self, vocab_size: int, memory: int) -> int:
        seen = prefix_hashes(self.token_ids[-memory:])[-1] if memory else self.hashes[-1]
        value = hash((seen, self.sampling.seed)) % vocab_size
        if len(self.token_ids) - self.num_prompt_tokens < self.sampling.min_tokens:
            while value in self.suppressed:
                value = (value + 1) % vocab_size
        return value

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.hashes.append(hash((self.hashes[-1], token_id, 12345)))


class FakeExecutor:
    """The next token is a hash of all tokens before it, so a lost, doubled or foreign token changes all that follow.

    "KV memory" holds the prefix hash of the token that was written to each slot. Every row's whole context is
    checked before and after the step's writes: reading a slot that was not written, that belongs to another prefix,
    or that another row of the step overwrites is an AssertionError. Drafts are written too, with the hashes that they
    would have if they were right, and judged by the tokens themselves.

    With `memory` the next token depends on the seed and the last so many tokens only: texts that soon repeat.
    """

    def __init__(
        self,
        block_size: int,
        vocab_size: int = 100,
        *,
        tokens_per_row: Callable[[int], int] = lambda position: 1,
        broken_rows: dict[int, int] | None = None,
        broken_steps: set[int] | None = None,
        memory: int = 0,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.tokens_per_row = tokens_per_row
        self.broken_rows = broken_rows or {}  # request id -> output index at which its row breaks
        self.broken_steps = broken_steps or set()
        self.memory = memory
        self.states: dict[int, _State] = {}
        self.plans: list[StepPlan] = []
        self.during_step: Callable[[StepPlan], None] = lambda plan: None
        self.closed = False
        self._kv: dict[tuple[int, int], int] = {}

    def steps_with(self, request_id: int) -> list[int]:
        """The steps in which this request had a row."""
        return [plan.step for plan in self.plans if any(row.request_id == request_id for row in plan.rows)]

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for request_id in plan.dropped:
            self.states.pop(request_id, None)
        for new in plan.new_requests:
            self._open(new)
        if plan.step in self.broken_steps:
            raise RuntimeError("the step broke")
        self._write_kv(plan.rows)
        result = StepResult([], [], scores={}, prompt_scores={}, errors=[])
        for row in plan.rows:
            self._finish_row(row, result)
        self.during_step(plan)
        return result

    def close(self) -> None:
        self.closed = True

    def _open(self, new: NewRequest) -> None:
        assert new.request_id not in self.states, f"request {new.request_id} is here already"
        self.states[new.request_id] = _State(
            list(new.token_ids),
            new.num_prompt_tokens,
            new.sampling,
            new.suppressed_until_min_tokens,
            prefix_hashes(new.token_ids),
        )

    def _write_kv(self, rows: list[PlanRow]) -> None:
        written: set[tuple[int, int]] = set()
        for row in rows:
            assert row.num_tokens > 0
            state = self.states[row.request_id]
            state.block_ids += row.new_block_ids
            self._check_context(row.request_id, state, row.start)
        for row in rows:
            state = self.states[row.request_id]
            hashes = state.hashes + prefix_hashes(row.draft_token_ids, state.hashes[-1])
            for position in range(row.start, row.start + row.num_tokens):
                slot = self._slot(state, position)
                assert slot not in written, f"two rows write slot {slot}"
                written.add(slot)
                self._kv[slot] = hashes[position]
        for row in rows:
            end = row.start + row.num_tokens - len(row.draft_token_ids)
            self._check_context(row.request_id, self.states[row.request_id], end)

    def _check_context(self, request_id: int, state: _State, length: int) -> None:
        for position in range(length):
            found = self._kv.get(self._slot(state, position))
            assert found == state.hashes[position], f"request {request_id} reads foreign KV at position {position}"

    def _slot(self, state: _State, position: int) -> tuple[int, int]:
        return state.block_ids[position // self.block_size], position % self.block_size

    def _finish_row(self, row: PlanRow, result: StepResult) -> None:
        state = self.states[row.request_id]
        end = row.start + row.num_tokens
        drafts = row.draft_token_ids
        newest = len(state.token_ids) + len(drafts)
        assert row.samples <= (end == newest), "a row samples before its newest token"
        assert row.samples or not drafts, "drafts in a row that does not sample"
        if state.sampling.prompt_logprobs is not None:
            positions = range(row.start + 1, min(end + 1, state.num_prompt_tokens))
            result.prompt_scores[row.request_id] = [
                score_of(state.hashes[position - 1], state.token_ids[position]) for position in positions
            ]
        count = self.tokens_per_row(len(state.token_ids)) if row.samples else 0
        if drafts:
            count = 1 + len(drafts)
        output_index = len(state.token_ids) - state.num_prompt_tokens
        if row.samples and self.broken_rows.get(row.request_id) == output_index:
            result.errors.append(RowError(row.request_id, "NaN in the logits"))
            count = 0
        num_tokens = 0
        while num_tokens < count:
            token_id = state.next_token(self.vocab_size, self.memory)
            if state.sampling.logprobs is not None:
                result.scores.setdefault(row.request_id, []).append(score_of(state.hashes[-1], token_id))
            state.append(token_id)
            result.token_ids.append(token_id)
            num_tokens += 1
            is_wrong = num_tokens <= len(drafts) and drafts[num_tokens - 1] != token_id
            if is_wrong or self.broken_rows.get(row.request_id) == output_index + num_tokens:
                break
        result.num_tokens.append(num_tokens)


class FakeWatchdog:
    """Counts turns; remembers what was declared."""

    def __init__(self) -> None:
        self.feeds = 0
        self.is_idle = False
        self.declared: list[str] = []

    def feed(self) -> None:
        self.feeds += 1

    @contextmanager
    def idle(self) -> Iterator[None]:
        self.is_idle = True
        yield
        self.is_idle = False

    @contextmanager
    def busy(self, what: str, limit_s: float) -> Iterator[None]:
        assert limit_s > 0
        self.declared.append(what)
        yield


class FakeLink:
    """A `ProcessLink` for a process's `run` inside a test's thread."""

    def __init__(self, name: str = "engine-0", index: int = 0, incarnation: int = 1) -> None:
        self.name = name
        self.index = index
        self.incarnation = incarnation
        self.watchdog = FakeWatchdog()
        self.facts: EngineFacts | None = None
        self.is_ready = False
        self.stages: list[str] = []
        self.stop_requested = False
        self.stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def stage(self, stage: str, progress: float = 0.0, *, model_dir: str = "") -> None:
        self.stages.append(stage)

    def ready(self, engine: EngineFacts | None = None, *, ring_turned: bool = False) -> None:
        self.facts = engine
        self.is_ready = True

    def stop(self) -> None:
        self.stop_requested = True
        os.eventfd_write(self.stop_fd, 1)

    def close(self) -> None:
        """Once: a second time would close whatever has got the number since, and break another test."""
        stop_fd, self.stop_fd = self.stop_fd, -1
        os.close(stop_fd)

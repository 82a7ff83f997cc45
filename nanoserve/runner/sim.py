"""The `sim` model: an executor without a forward pass. Everything around it is real. Imports no torch.

It says the prompt's ids again (`echo`) or ids drawn from (seed, position) (`random`), in a set time per step. So it
measures the host path alone, tests any tokenizer without weights, and plans capacity for hardware one does not have.
Ends of requests are the scheduler's business, as with a real model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nanoserve.config import ServerConfig
from nanoserve.ipc.messages import EngineFacts
from nanoserve.runner.philox import uniforms
from nanoserve.sched.plan import NewRequest, PlanRow, RowError, StepPlan, StepResult, StepTimes, TokenScores

_FORCING_BIAS = 100.0
_MAX_DEFAULT_BLOCKS = 1 << 17
_DEFAULT_MODEL_LEN = 32768
_LOGPROB_STEP = 0.7  # made-up scores: token of rank r has log-probability -r * this


@dataclass(slots=True)
class _State:
    prompt: list[int]
    num_tokens: int  # prompt and output
    request: NewRequest
    broken: bool  # an id of the prompt is outside the vocabulary


class SimExecutor:
    """`Executor` that makes tokens up; keeps of a request only its prompt and how many tokens it has."""

    def __init__(self, vocab_size: int, *, output: str, step_seconds: float, token_seconds: float) -> None:
        self._vocab_size = vocab_size
        self._echo = output == "echo"
        self._step_seconds = step_seconds
        self._token_seconds = token_seconds
        self._states: dict[int, _State] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        for request_id in plan.dropped:
            self._states.pop(request_id, None)
        for request in plan.new_requests:
            prompt = request.token_ids[: request.num_prompt_tokens]
            broken = bool(prompt) and not 0 <= min(prompt) <= max(prompt) < self._vocab_size
            self._states[request.request_id] = _State(prompt, len(request.token_ids), request, broken)
        prepared = time.perf_counter()
        if plan.rows:  # a plan that only drops state computes nothing
            self._wait(began + self._step_seconds + self._token_seconds * sum(row.num_tokens for row in plan.rows))
        forwarded = time.perf_counter()
        result = self._results(plan)
        result.times = StepTimes(prepared - began, forwarded - prepared, time.perf_counter() - forwarded)
        return result

    def close(self) -> None:
        self._states.clear()

    @staticmethod
    def _wait(until: float) -> None:
        if (left := until - time.perf_counter()) > 0:
            time.sleep(left)

    def _results(self, plan: StepPlan) -> StepResult:
        result = StepResult(num_tokens=[], token_ids=[], scores={}, prompt_scores={}, errors=[])
        draws = self._draws(plan.rows)
        for row, drawn in zip(plan.rows, draws, strict=True):
            state = self._states.get(row.request_id)
            if state is None or state.broken:
                message = "unknown request" if state is None else "a token id is outside the vocabulary"
                result.errors.append(RowError(row.request_id, message))
                result.num_tokens.append(0)
                continue
            self._score_prompt(row, state, result)
            if not row.samples:
                result.num_tokens.append(0)
                continue
            tokens = self._tokens(row, state, drawn)
            state.num_tokens += len(tokens)
            result.num_tokens.append(len(tokens))
            result.token_ids += tokens
            if (logprobs := state.request.sampling.logprobs) is not None:
                result.scores[row.request_id] = [self._scores(token, logprobs) for token in tokens]
        return result

    def _draws(self, rows: list[PlanRow]) -> list[list[int]]:
        """Per row an id for each token that it may yield, uniform over the vocabulary; 0s when echoing."""
        counts = [1 + len(row.draft_token_ids) for row in rows]
        if self._echo:
            return [[0] * count for count in counts]
        states = [self._states.get(row.request_id) for row in rows]
        seeds = np.array([state.request.sampling.seed if state else 0 for state in states], dtype=np.int64)
        positions = np.array([state.num_tokens - len(state.prompt) if state else 0 for state in states], dtype=np.int64)
        ends = np.cumsum(counts)
        ahead = np.arange(ends[-1] if rows else 0) - np.repeat(ends - counts, counts)
        draws = uniforms(np.repeat(seeds, counts), np.repeat(positions, counts) + ahead) * self._vocab_size
        return [[int(draw) for draw in draws[end - count : end]] for end, count in zip(ends, counts, strict=True)]

    def _tokens(self, row: PlanRow, state: _State, drawn: list[int]) -> list[int]:
        """What the row yields: the next token, and as long as drafts are right the ones after them."""
        position, tokens = state.num_tokens - len(state.prompt), []
        for index, draw in enumerate(drawn):
            tokens.append(self._choose(state, position + index, draw))
            if row.draft_token_ids[index : index + 1] != tokens[-1:]:
                break
        return tokens

    def _choose(self, state: _State, position: int, drawn: int) -> int:
        sampling = state.request.sampling
        forced = [token for token, bias in sampling.logit_bias.items() if bias >= _FORCING_BIAS]
        masked = state.request.suppressed_until_min_tokens if position < sampling.min_tokens else ()
        token = state.prompt[position % len(state.prompt)] if self._echo and state.prompt else drawn
        token = next((choice for choice in forced if choice not in masked), token)
        return next(candidate for candidate in self._from(token) if candidate not in masked)

    def _from(self, token: int) -> Iterator[int]:
        """This id, then the ones after it, around the vocabulary; ends with the id itself."""
        yield from range(token, self._vocab_size)
        yield from range(token + 1)

    def _scores(self, token: int, num_top: int) -> TokenScores:
        """The token as the most likely one, followed by its neighbours."""
        top = [(token + offset) % self._vocab_size for offset in range(min(num_top, self._vocab_size))]
        return TokenScores(-_LOGPROB_STEP, 1, top, [-_LOGPROB_STEP * (rank + 1) for rank in range(len(top))])

    def _score_prompt(self, row: PlanRow, state: _State, result: StepResult) -> None:
        num_top = state.request.sampling.prompt_logprobs
        if num_top is None:
            return
        scored = state.prompt[row.start + 1 : row.start + row.num_tokens + 1]
        result.prompt_scores[row.request_id] = [self._scores(token, num_top) for token in scored]


def create_sim_executor(config: ServerConfig, vocab_size: int) -> tuple[SimExecutor, EngineFacts]:
    """The sim model and its facts. KV blocks are only numbers here; by default there are enough for every request,
    as long as the scheduler's books of them stay small."""
    max_model_len = config.model.max_model_len or _DEFAULT_MODEL_LEN
    block_size = config.cache.block_size
    blocks = config.cache.num_kv_blocks
    if not blocks:
        largest = -(-max_model_len // block_size)
        blocks = max(largest, min(config.scheduler.max_num_seqs * largest, _MAX_DEFAULT_BLOCKS))
    executor = SimExecutor(
        vocab_size,
        output=config.sim.sim_output,
        step_seconds=config.sim.sim_step_ms / 1e3,
        token_seconds=config.sim.sim_token_us / 1e6,
    )
    facts = EngineFacts(
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        num_blocks=blocks,
        block_size=block_size,
        dtype="none",
        device="sim",
        batch_invariant=True,
        attention_backend="sim",
    )
    return executor, facts

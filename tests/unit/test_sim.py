"""The sim model behind the executor seam: what it says, how it counts, and that it needs no torch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time

from nanoserve.config import ModelConfig, ServerConfig, SimConfig
from nanoserve.ipc.messages import SamplingParams
from nanoserve.runner.sim import SimExecutor, create_sim_executor
from nanoserve.sched.plan import NewRequest, PlanRow, StepPlan

VOCAB = 50


def make(output: str = "echo", **sim) -> SimExecutor:
    config = ServerConfig(model=ModelConfig(model="sim"), sim=SimConfig(sim_output=output, **sim))
    return create_sim_executor(config, VOCAB)[0]


def new(request_id: int, prompt: list[int], outputs: list[int] | None = None, **sampling) -> NewRequest:
    suppressed = sampling.pop("suppressed", ())
    return NewRequest(request_id, prompt + (outputs or []), len(prompt), SamplingParams(**sampling), suppressed)


def run(executor: SimExecutor, request: NewRequest, steps: int) -> list[int]:
    """The ids of `steps` steps of this request alone."""
    ids: list[int] = []
    length, start = len(request.token_ids), 0
    for step in range(steps):
        row = PlanRow(request.request_id, start, length - start, [], True)
        ids += executor.execute(StepPlan(step, [request] if step == 0 else [], [row], [])).token_ids
        start, length = length, length + 1
    return ids


def test_echo_repeats_the_prompt():
    assert run(make(), new(1, [5, 6, 7]), 7) == [5, 6, 7, 5, 6, 7, 5]


def test_echo_goes_on_after_a_preemption():
    assert run(make(), new(1, [5, 6, 7], [5, 6]), 3) == [7, 5, 6]


def test_random_ids_depend_on_seed_and_position_only():
    whole = run(make("random"), new(1, [1, 2], seed=9), 20)
    assert run(make("random"), new(8, [3], seed=9), 20) == whole
    assert run(make("random"), new(8, [3], whole[:12], seed=9), 8) == whole[12:]
    assert run(make("random"), new(8, [3], seed=10), 20) != whole
    assert all(0 <= token < VOCAB for token in whole)


def test_chunks_yield_no_token_and_rows_keep_their_order():
    executor = make()
    rows = [PlanRow(1, 0, 2, [], False), PlanRow(2, 0, 1, [], True), PlanRow(3, 0, 1, [], True)]
    result = executor.execute(StepPlan(0, [new(1, [1, 2, 3]), new(2, [4]), new(3, [9])], rows, []))
    assert (result.num_tokens, result.token_ids) == ([0, 1, 1], [4, 9])


def test_bias_forces_and_min_tokens_masks():
    assert run(make(), new(1, [5], logit_bias={9: 100.0}), 2) == [9, 9]
    ids = run(make(), new(2, [5, 6], min_tokens=3, suppressed=(6,)), 4)
    assert 6 not in ids[:3]
    assert ids[3] == 6


def test_logprobs_are_as_many_as_asked_for():
    executor = make()
    request = new(1, [5, 6, 7], logprobs=2, prompt_logprobs=1)
    result = executor.execute(StepPlan(0, [request], [PlanRow(1, 0, 3, [], True)], []))
    (scores,) = result.scores[1]
    assert scores.top_ids[0] == result.token_ids[0]
    assert len(scores.top_ids) == 2
    assert [score.top_ids[0] for score in result.prompt_scores[1]] == [6, 7]


def test_bad_ids_fail_alone():
    rows = [PlanRow(1, 0, 2, [], True), PlanRow(2, 0, 1, [], True), PlanRow(3, 0, 1, [], True)]
    result = make().execute(StepPlan(0, [new(1, [1, VOCAB]), new(2, [4])], rows, []))
    assert (result.num_tokens, result.token_ids) == ([0, 1, 0], [4])
    assert [error.request_id for error in result.errors] == [1, 3]


def test_a_step_takes_its_time():
    executor = make(sim_step_ms=20.0, sim_token_us=1000.0)
    began = time.perf_counter()
    executor.execute(StepPlan(0, [new(1, [1] * 10)], [PlanRow(1, 0, 10, [], True)], []))
    assert time.perf_counter() - began >= 0.030


def test_facts():
    config = ServerConfig(model=ModelConfig(model="sim", max_model_len=100))
    config = dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, max_num_seqs=3))
    facts = create_sim_executor(config, VOCAB)[1]
    assert (facts.max_model_len, facts.vocab_size, facts.num_blocks, facts.block_size) == (100, VOCAB, 21, 16)


def test_the_default_pool_stays_small_enough_to_keep_books_of_and_holds_the_longest_request():
    config = ServerConfig(model=ModelConfig(model="sim", max_model_len=1 << 20))
    assert create_sim_executor(config, VOCAB)[1].num_blocks == 1 << 17  # not 1 << 22, as 64 requests would like
    config = ServerConfig(model=ModelConfig(model="sim", max_model_len=1 << 24))
    assert create_sim_executor(config, VOCAB)[1].num_blocks == 1 << 20


def test_sim_imports_no_torch():
    code = "import sys, nanoserve.runner.sim; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

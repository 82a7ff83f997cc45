"""Draws made within the C++ engine's step: those that the same logits give afterwards, in any company and any team."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from nanoserve.runner import sampler
from nanoserve.runner.backend import ForwardBatch
from nanoserve.runner.batch import RequestTable
from nanoserve.runner.model_runner import ModelRunner
from nanoserve.runner.native.backend import NativeBackend
from nanoserve.runner.native.build import missing_cpu_features
from nanoserve.runner.sampler import SAMPLE_ROW, SampleRows
from tests.runner.native_models import VOCAB, make_native, make_spec
from tests.runner.plans import Driver

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_cpu_features()), reason="the CPU lacks what the engine needs"),
]


def random_batch(random: np.random.Generator, num_rows: int) -> ForwardBatch:
    """Prompts of random lengths from their beginning; logits of some tokens, of several in some rows."""
    counts = random.integers(1, 30, num_rows)
    row_starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    num_logits = int(random.integers(1, row_starts[-1] + 1))
    return ForwardBatch(
        token_ids=random.integers(0, VOCAB, row_starts[-1]).astype(np.int32),
        positions=np.concatenate([np.arange(count) for count in counts]).astype(np.int32),
        row_starts=row_starts,
        context_lens=counts.astype(np.int32),
        block_tables=random.permutation(2 * num_rows).astype(np.int32).reshape(num_rows, 2),
        logit_tokens=np.sort(random.choice(row_starts[-1], num_logits, replace=False)).astype(np.int32),
    )


def random_rows(random: np.random.Generator, num_logits: int) -> SampleRows:
    """Rows of all kinds, drawn from some of the logits."""
    drawn = np.flatnonzero(random.random(num_logits) < 0.8)
    size = len(drawn)
    asked = np.empty(size, dtype=SAMPLE_ROW)
    asked["seed"] = random.integers(-(2**62), 2**62, size)
    asked["position"] = random.integers(0, 2**40, size)
    asked["top_k"] = random.choice([0, 0, 1, 7, VOCAB + 5], size)
    asked["logit_row"] = drawn
    asked["temperature"] = random.choice([0.0, 0.7, 1.0, 3.0], size)
    asked["top_p"] = random.choice([1.0, 1.0, 0.9, 1e-9], size)
    asked["min_p"] = random.choice([0.0, 0.0, 0.05], size)
    return SampleRows(asked, [])


def alone_of(rows: SampleRows, index: int) -> SampleRows:
    asked = rows.asked[index : index + 1].copy()
    asked["logit_row"] = 0
    return SampleRows(asked, [])


@pytest.mark.rule(36)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_step_draws_what_its_logits_give_afterwards(name: str, threads: int) -> None:
    backend = make_native(make_spec(name), threads=threads)
    random = np.random.default_rng(threads)
    differing = total = 0
    for num_rows in (1, 2, 3, 9, 20, 40):
        batch = random_batch(random, num_rows)
        alone = backend.forward(batch).clone()
        rows = random_rows(random, len(alone))
        token_ids, logits = backend.forward_drawn(batch, rows)
        assert torch.equal(logits, alone) and np.array_equal(backend.greedy_ids, alone.argmax(1).numpy())
        assert np.array_equal(token_ids, backend.choose(alone, rows))
        for index, logit_row in enumerate(rows.asked["logit_row"].tolist()):
            assert token_ids[index] == backend.choose(alone[logit_row : logit_row + 1], alone_of(rows, index))[0]
        total += len(token_ids)
        differing += int((token_ids != sampler.choose(alone, rows)).sum())  # torch rounds otherwise
    assert total > 300 and differing <= 1


@pytest.mark.rule(36)
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_thread_that_loses_its_core_changes_no_draw(slow: int) -> None:
    backend = make_native(make_spec("llama"), threads=3)
    random = np.random.default_rng(slow)
    for num_rows in (1, 4, 12):
        batch = random_batch(random, num_rows)
        logits = backend.forward(batch).clone()
        rows = random_rows(random, len(logits))
        backend.slow_thread(slow, 300)
        assert np.array_equal(backend.forward_drawn(batch, rows)[0], backend.choose(logits, rows))
        backend.slow_thread(-1, 0)


def poisoned(backend: NativeBackend, token: int) -> None:
    """From now on this token's embedding is NaN."""
    size = backend._spec.hidden_size * 2
    start = backend._packed.sections["embedding"].offset + token * size
    backend._packed.memory[start : start + size] = 0xFF


def broken_rows(batch: ForwardBatch, rows: SampleRows) -> np.ndarray:
    """Which are drawn from row 5 of the batch; greedy ones and others."""
    tokens = batch.logit_tokens[rows.asked["logit_row"]]
    broken = (tokens >= batch.row_starts[5]) & (tokens < batch.row_starts[6])
    assert len(set(rows.asked["temperature"][broken].tolist())) > 1 and 0.0 in rows.asked["temperature"][broken]
    return broken


@pytest.mark.rule(35)
def test_a_row_without_numbers_gets_no_token_and_disturbs_nobody() -> None:
    backend = make_native(make_spec("llama"))
    random = np.random.default_rng(1)
    batch = random_batch(random, 12)
    batch.token_ids[batch.token_ids == VOCAB - 1] = 0
    rows = random_rows(random, len(batch.logit_tokens))
    rows.asked["temperature"][::2] = 0.0
    good, _ = backend.forward_drawn(batch, rows)
    poisoned(backend, VOCAB - 1)
    batch.token_ids[batch.row_starts[5]] = VOCAB - 1  # and so all of that row
    token_ids, _ = backend.forward_drawn(batch, rows)
    broken = broken_rows(batch, rows)
    assert (good >= 0).all() and (token_ids[broken] == -1).all()
    assert np.array_equal(token_ids[~broken], good[~broken])


@pytest.mark.rule(35)
@pytest.mark.parametrize("num_rows", [1, 3, 20])
@pytest.mark.parametrize("value", [0x7FC0, 0xFF80])
def test_an_output_layer_without_numbers_gives_no_token(value: int, num_rows: int) -> None:
    """NaN or infinite weights of one id, of half of them, of all. Other ids' logits are as good as ever."""
    backend = make_native(make_spec("llama"))
    head = backend._packed.sections["head"]
    weights = backend._packed.memory[head.offset : head.offset + head.num_bytes].view(np.uint16)
    random = np.random.default_rng(num_rows)
    batch = random_batch(random, num_rows)
    batch.logit_tokens = np.arange(len(batch.token_ids), dtype=np.int32)
    rows = random_rows(random, len(batch.logit_tokens))
    rows.asked["top_k"][::3] = 50
    for where in (slice(6, 7), slice(len(weights) // 2, None), slice(None)):
        weights[where] = value
        token_ids, logits = backend.forward_drawn(batch, rows)
        assert np.array_equal(token_ids, backend.choose(logits.clone(), rows))
        broken = ~torch.isfinite(logits.amax(1)).numpy()
        assert np.array_equal(backend.greedy_ids < 0, broken)
        assert np.array_equal(backend.forward_greedy(batch), backend.greedy_ids)
    assert broken.all()


@pytest.mark.rule(35)
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_thread_that_comes_late_does_not_take_the_last_step_for_this_one(slow: int) -> None:
    """With few rows each thread keeps its own copy of what the output layer gets: here NaN, of the step before."""
    backend = make_native(make_spec("llama"), threads=3)
    poisoned(backend, VOCAB - 1)
    batch = random_batch(np.random.default_rng(0), 1)
    batch = dataclasses.replace(
        batch,
        token_ids=np.array([1, 2, 3], np.int32),
        positions=np.arange(3, dtype=np.int32),
        row_starts=np.array([0, 3], np.int32),
        context_lens=np.array([3], np.int32),
        logit_tokens=np.arange(3, dtype=np.int32),
    )
    bad = dataclasses.replace(batch, token_ids=np.full(3, VOCAB - 1, np.int32))
    rows = random_rows(np.random.default_rng(2), 3)
    expected, _ = backend.forward_drawn(batch, rows)
    assert len(expected) and (expected >= 0).all()
    for _ in range(30):
        backend.slow_thread(-1, 0)
        assert (backend.forward_drawn(bad, rows)[0] == -1).all()
        backend.slow_thread(slow, 200)
        assert np.array_equal(backend.forward_drawn(batch, rows)[0], expected)


PARAMETERS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.3},
    {"temperature": 1.0, "logit_bias": {5: 4.0}, "logprobs": 1},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.2, "min_p": 0.05, "prompt_logprobs": 0},
]


def answers(how: dict[str, float] | None) -> Driver:
    """Two requests of each kind: in company, or (None) one after the other."""
    table = RequestTable(max_seqs=4, max_tokens=128, block_size=16, vocab_size=VOCAB)
    driver = Driver(ModelRunner(make_native(make_spec("llama")), table), num_blocks=160, block_size=16, seed=4)
    random = np.random.default_rng(8)
    for request_id in range(2 * len(PARAMETERS)):
        prompt = random.integers(0, VOCAB, int(random.integers(1, 50))).tolist()
        driver.add(request_id, prompt, 20, seed=request_id, **PARAMETERS[request_id % len(PARAMETERS)])
        if how is None:
            driver.run()
    if how is not None:
        driver.run(**how)
    return driver


@pytest.mark.rule(39)
@pytest.mark.parametrize("how", [{}, {"company": 0.5, "chunk": 9}, {"company": 0.7, "preempt": 0.1}])
def test_requests_of_all_kinds_get_the_same_alone_and_together(how: dict[str, float]) -> None:
    alone, together = answers(None), answers(how)
    assert together.outputs == alone.outputs
    assert together.scores == alone.scores and together.prompt_scores == alone.prompt_scores
    assert not together.errors

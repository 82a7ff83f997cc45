"""Whatever arrives and whatever is aborted: books in order after each step, nobody lost or doubled, outputs exact."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoserve.sched import drafts
from tests.factories import EOS
from tests.fakes import FakeExecutor
from tests.storms import Ask, Scenario, storm

VOCAB = 13
NUM_STORMS = 200


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    shared = draw(st.sampled_from([[], [2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 9, 9, 9, 9, 9]]))
    prompt = shared + draw(st.lists(st.integers(0, VOCAB - 1), min_size=0 if shared else 1, max_size=10))
    sampling = {
        "max_tokens": draw(st.integers(0, 24)),
        "min_tokens": draw(st.integers(0, 5)),
        "seed": draw(st.integers(0, 3)),
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.sampled_from([(), (3,), (4, EOS)])),
        "logprobs": draw(st.sampled_from([None, None, 0])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 0])),
    }
    return Ask(
        prompt,
        sampling,
        priority=draw(st.integers(0, 2)),
        arrival_step=draw(st.integers(0, 8)),
        abort_step=draw(st.none() | st.none() | st.integers(0, 25)),
        abort_in_flight=draw(st.booleans()),
        salt=draw(st.sampled_from(["", "", "", "s"])),
        resume_after=draw(st.sampled_from([0, 0, 0, 0, 1, 4])),
    )


limit_choices = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(2, 6),
        "max_num_batched_tokens": st.integers(2, 24),
        "prompt_tokens_per_stream": st.sampled_from([0, 0, 1, 3]),
        "base_prompt_tokens": st.integers(1, 6),
        "prompt_context_cost": st.sampled_from([0.0, 0.05, 1.0]),
        "max_num_queued": st.sampled_from([100, 100, 2]),
        "max_model_len": st.integers(8, 40),
        "num_blocks": st.integers(4, 16),
        "block_size": st.integers(1, 5),
        "vocab_size": st.just(VOCAB),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "prefix_cache": st.booleans(),
        "num_draft_tokens": st.sampled_from([0, 0, 1, 5]),
        "shortest_match": st.integers(1, 2),
    }
)


def fake_executor(limits: dict[str, Any], tokens_per_row: int, memory: int = 0) -> FakeExecutor:
    """Its rows yield up to `tokens_per_row` tokens."""
    return FakeExecutor(
        limits["block_size"],
        VOCAB,
        tokens_per_row=lambda position: 1 + position % tokens_per_row,
        memory=memory,
    )


@pytest.mark.rule(34)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(asks(), min_size=1, max_size=10), limit_choices, st.integers(1, 3), st.integers(0, 2))
def test_every_output_equals_the_solo_run(
    asked: list[Ask], limits: dict[str, Any], tokens_per_row: int, memory: int
) -> None:
    executor = fake_executor(limits, tokens_per_row, memory)
    scenario = Scenario(asked, limits, executor, fake_executor(limits, 1, memory))
    scenario.play()
    scenario.check()
    assert executor.states == {}


@pytest.mark.rule(30, 34)
def test_storms_with_equal_prompts_and_little_memory() -> None:
    preemptions = hits = 0
    for seed in range(NUM_STORMS):
        random = Random(seed)
        asked, limits = storm(random, vocab_size=VOCAB, block_size=random.choice([1, 2, 4, 5]))
        executor = fake_executor(limits, random.randint(1, 3))
        scenario = Scenario(asked, limits, executor, fake_executor(limits, 1))
        try:
            scenario.play()
            scenario.check()
            assert executor.states == {}
        except AssertionError as error:
            raise AssertionError(f"storm {seed}: {error}") from error
        preemptions += scenario.scheduler.counters.preemptions > 0
        hits += scenario.scheduler.counters.prefix_hit_tokens > 0
    assert preemptions > NUM_STORMS / 4, "these storms do not test preemption"
    assert hits > NUM_STORMS / 4, "these storms do not test the prefix cache"


def test_storms_with_drafts_say_the_same_in_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that repeat after a while, so that drafts are right and then wrong, in little memory."""
    monkeypatch.setattr(drafts, "MARGIN", 0.5)  # so that wrong ones are computed too, and beside many streams
    monkeypatch.setattr(drafts, "PRIOR_RATE", 0.6)
    preemptions = hits = accepted = rejected = 0
    for seed in range(NUM_STORMS):
        random = Random(seed)
        asked, limits = storm(random, vocab_size=VOCAB, block_size=random.choice([1, 2, 4, 5]))
        limits |= {"num_draft_tokens": random.randint(1, 6), "shortest_match": random.randint(1, 2)}
        memory = random.choice([0, 1, 2, 2])
        executor = fake_executor(limits, random.choice([1, 1, 2]), memory)
        scenario = Scenario(asked, limits, executor, fake_executor(limits, 1, memory))
        try:
            scenario.play()
            scenario.check()
            assert executor.states == {}
        except AssertionError as error:
            raise AssertionError(f"storm {seed}: {error}") from error
        counters, drafter = scenario.scheduler.counters, scenario.scheduler.drafter
        preemptions += counters.preemptions > 0
        hits += counters.prefix_hit_tokens > 0
        accepted += drafter.num_right
        rejected += drafter.num_drafts - drafter.num_right
    assert preemptions > NUM_STORMS / 4, "these storms do not test preemption"
    assert hits > NUM_STORMS / 4, "these storms do not test the prefix cache"
    assert min(accepted, rejected) > NUM_STORMS, f"{accepted} drafts were right, {rejected} wrong"

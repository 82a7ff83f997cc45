"""Drafts change when tokens come, never which: answers of real forward passes with drafts equal those without.

Bit by bit, scores included, on every backend that is batch invariant. Prompt lookup alone rarely drafts for requests
with penalties, so these tests also draft from the right answer, with mistakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.bench.texts import ALICE
from nanoserve.ipc.messages import EngineFacts
from nanoserve.runner.model_runner import ModelRunner
from nanoserve.sched import drafts
from nanoserve.sched.drafts import Drafting
from nanoserve.sched.ngram import NgramIndex
from nanoserve.sched.request import StepOutput
from nanoserve.sched.scheduler import Scheduler
from tests.factories import EOS, make_limits, make_request, run_to_end
from tests.integration.test_scheduler_with_model import BACKENDS, make_runner
from tests.storms import Scenario, storm

pytestmark = pytest.mark.slow

NUM_STORMS = 8
REPEATED = [7, 8, 9, 10, 11, 12] * 4
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 5},
    "seeded, cut": {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "seed": 6},
    "greedy, penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "seeded, penalties": {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.2, "frequency_penalty": -0.4},
    "bias": {"temperature": 1.0, "seed": 8, "logit_bias": {9: 4.0, 10: -100.0, 30: 3.0}},
    "min_tokens": {"temperature": 0.4, "seed": 9, "min_tokens": 40, "stop_token_ids": (9, 10)},
    "bad words": {"bad_words": ((8, 9), (11,), (1, 2, 3))},
    "scores": {"temperature": 0.5, "seed": 10, "logprobs": 3, "prompt_logprobs": 1},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Also holds the compiled engine: made once."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def runner(backend: str, model_dir: Path) -> tuple[ModelRunner, EngineFacts]:
    made, facts = make_runner(model_dir, backend, 64)
    if backend == "native" and facts.attention_backend != "native":
        pytest.skip("the C++ engine cannot run on this machine")
    assert facts.batch_invariant
    return made, facts


class KnowingIndex(NgramIndex):
    """Knows the answer and lies now and then."""

    def __init__(self, prompt: list[int], answer: list[int], vocab_size: int) -> None:
        super().__init__(1)
        self._text = prompt + answer + [0] * 9
        self._vocab_size = vocab_size
        self._random = Random(len(prompt))

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        truth = self._text[len(token_ids) : len(token_ids) + max(0, count)]
        return [token if self._random.random() < 0.8 else self._random.randrange(self._vocab_size) for token in truth]


def answers(
    runner: tuple[ModelRunner, EngineFacts],
    num_draft_tokens: int,
    asked: list[dict[str, Any]],
    known: Sequence[list[int]] = (),
) -> tuple[StepOutput, Scheduler]:
    """All of the asked run at the same time, drafted from `known` answers where there are any."""
    executor, facts = runner
    limits = make_limits(
        block_size=facts.block_size,
        vocab_size=facts.vocab_size,
        num_blocks=facts.num_blocks,
        max_num_seqs=len(asked),
        num_draft_tokens=num_draft_tokens,
        shortest_match=1,
    )
    scheduler = Scheduler(limits, (EOS,))
    for request_id, fields in enumerate(asked, start=1):
        request = make_request(request_id, **fields)
        if known:
            index = KnowingIndex(request.token_ids, known[request_id - 1], facts.vocab_size)
            request.drafting = Drafting(index, num_right=1e9, num_tried=1e9)  # drafts are worth it whatever comes
        assert scheduler.add(request, 0) is None
    return run_to_end(scheduler, executor), scheduler


def told(output: StepOutput, request_id: int) -> tuple[list[int], list[Any], list[Any]]:
    rows = [row for row in output.rows if row.request_id == request_id]
    scores = [score for row in rows for score in row.scores or []]
    prompt = [row.scores for row in output.prompt_scores if row.request_id == request_id]
    return [token for row in rows for token in row.token_ids], scores, prompt


@pytest.fixture(autouse=True)
def drafts_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that many are computed, wrong ones too and beside many streams: what they may change is the subject here."""
    monkeypatch.setattr(drafts, "MARGIN", 0.5)
    monkeypatch.setattr(drafts, "PRIOR_RATE", 0.6)


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
@pytest.mark.parametrize("name", SAMPLING)
def test_answers_equal_those_without_drafts(
    name: str, num_draft_tokens: int, runner: tuple[ModelRunner, EngineFacts]
) -> None:
    asked = [{"prompt": REPEATED, "max_tokens": 60, **SAMPLING[name]}]
    plain, alone = answers(runner, 0, asked)
    for known in ([], [told(plain, 1)[0]]):
        drafted, scheduler = answers(runner, num_draft_tokens, asked, known)
        assert told(drafted, 1) == told(plain, 1)
        assert drafted.finished[0].reason == plain.finished[0].reason
        assert scheduler.num_steps == alone.num_steps - scheduler.drafter.num_right, "a right draft saves a step"
    assert 2 * scheduler.num_steps < (2 if num_draft_tokens > 1 else 1.5) * alone.num_steps, "few drafts were right"
    assert scheduler.drafter.num_right < scheduler.drafter.num_drafts, "no draft was wrong"


def test_bad_words_are_banned_behind_drafts(runner: tuple[ModelRunner, EngineFacts]) -> None:
    """Words that the model would say, begun by drafts."""
    asked = {"prompt": REPEATED, "max_tokens": 60, "temperature": 0.8, "seed": 12}
    said = told(answers(runner, 0, [asked])[0], 1)[0]
    words = tuple(tuple(said[n : n + 2 + n % 2]) for n in range(3, 60, 4))
    asked["bad_words"] = words
    plain = told(answers(runner, 0, [asked])[0], 1)
    assert plain[0] != said
    drafted, scheduler = answers(runner, 5, [asked], [plain[0]])
    assert told(drafted, 1) == plain
    assert scheduler.drafter.num_right > 20


@pytest.mark.parametrize("is_known", [False, True])
def test_company_with_and_without_drafts(is_known: bool, runner: tuple[ModelRunner, EngineFacts]) -> None:
    """Requests of every kind in the same steps, with different numbers of drafts and none."""
    asked = [{"prompt": REPEATED[:n], "max_tokens": 30, **fields} for n, fields in enumerate(SAMPLING.values(), 5)]
    plain, alone = answers(runner, 0, asked)
    known = [told(plain, request_id)[0] for request_id in range(1, len(asked) + 1)] if is_known else []
    drafted, scheduler = answers(runner, 3, asked, known)
    for request_id in range(1, len(asked) + 1):
        assert told(drafted, request_id) == told(plain, request_id)
    assert scheduler.drafter.num_right > 0
    assert scheduler.num_steps <= alone.num_steps


def test_storms_with_drafts(runner: tuple[ModelRunner, EngineFacts], backend: str, model_dir: Path) -> None:
    """Preemptions, prefix hits, aborts and stops while drafts are right and wrong."""
    block_size = BACKENDS[backend][1]
    solo_runner, facts = runner
    preemptions = hits = right = wrong = 0
    for seed in range(NUM_STORMS):
        random = Random(seed)
        asked, limits = storm(random, vocab_size=facts.vocab_size, block_size=block_size, scale=max(1, block_size // 4))
        limits |= {"num_draft_tokens": random.randint(1, 6), "shortest_match": 1}
        small, _ = make_runner(model_dir, backend, limits["num_blocks"])
        scenario = Scenario(asked, limits, small, solo_runner)
        scenario.play()
        scenario.check()
        assert len(small._table) == 0
        preemptions += scenario.scheduler.counters.preemptions > 0
        hits += scenario.scheduler.counters.prefix_hit_tokens > 0
        right += scenario.scheduler.drafter.num_right
        wrong += scenario.scheduler.drafter.num_drafts - scenario.scheduler.drafter.num_right
    assert preemptions >= 1
    assert hits >= 2
    assert min(right, wrong) > 0, f"{right} drafts were right, {wrong} wrong"


@pytest.mark.timeout(300)  # may compile the engine and pack the weights
def test_texts_of_a_real_model_with_stop_strings_and_scores() -> None:
    """The whole ring in memory: rows of several tokens reach the detokenizer, which may stop inside one."""
    passage = ALICE[:600]
    prompts = [passage + "\n\n" + ALICE[: ALICE.index("sister on")]] * 4
    params = [
        SamplingParams(temperature=0.0, max_tokens=64, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=64, stop="conversations", ignore_eos=True),
        SamplingParams(temperature=0.7, seed=11, max_tokens=64, repetition_penalty=1.1, logprobs=0),
        SamplingParams(temperature=0.7, seed=12, max_tokens=64, top_p=0.9, stop=["her", "r s"], min_tokens=20),
    ]
    told = []
    for num_tokens in (0, 5):
        options = {"max_model_len": 512, "kv_cache_memory": "64MiB", "engine_threads": 1}
        llm = LLM("smollm2-135m", speculative_num_tokens=num_tokens, **options)
        told.append([llm.generate([prompt], [asked])[0].outputs for prompt, asked in zip(prompts, params, strict=True)])
        stats = llm.stats()
        llm.close()
    assert told[0] == told[1]
    assert stats.accepted_draft_tokens > 30
    assert told[0][1][0].stop_reason == "conversations"

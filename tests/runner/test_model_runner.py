"""The model runner through plans: outputs equal the solo run, broken requests fail alone, scores are the model's."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from nanoserve.ipc.messages import SamplingParams
from nanoserve.runner.backend import ForwardBatch
from nanoserve.runner.batch import RequestTable
from nanoserve.runner.model_runner import ModelRunner
from nanoserve.sched.plan import NewRequest, PlanRow, StepPlan, StepResult
from tests.runner import tiny

pytestmark = pytest.mark.slow
BLOCK = 4
NUM_BLOCKS = 400


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def reference(request):
    return tiny.make_reference(request.param)


def make_runner(reference) -> ModelRunner:
    backend = tiny.make_backend(reference, block_size=BLOCK, num_blocks=NUM_BLOCKS)
    return ModelRunner(backend, make_table(max_seqs=2))


def make_table(max_seqs: int = 4) -> RequestTable:
    return RequestTable(max_seqs=max_seqs, max_tokens=512, block_size=BLOCK, vocab_size=tiny.VOCAB)


class Driver:
    """Stands for the scheduler: random chunks, random company, preemptions; keeps every token and score."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.random = np.random.default_rng(seed)
        self.free = list(range(NUM_BLOCKS))
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
            missing = -(-(start + count) // BLOCK) - len(self.blocks[request_id])
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


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, tiny.VOCAB, int(random.integers(1, 70))).tolist() for _ in range(count)]


PARAMETERS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "presence_penalty": 0.5},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": {5: 4.0}},
    {"temperature": 1.0, "logprobs": 3, "prompt_logprobs": 2},
]


def run_all(reference, *, seed: int = 0, **how) -> Driver:
    driver = Driver(make_runner(reference), seed)
    for request_id, prompt in enumerate(prompts(9)):
        driver.add(request_id, prompt, 25, seed=request_id % 3, **PARAMETERS[request_id % len(PARAMETERS)])
    driver.run(**how)
    assert sorted(driver.free) == list(range(NUM_BLOCKS))
    return driver


@pytest.fixture(scope="module")
def solo(reference) -> Driver:
    """Every request alone, prompt in one piece."""
    driver = Driver(make_runner(reference))
    for request_id, prompt in enumerate(prompts(9)):
        driver.add(request_id, prompt, 25, seed=request_id % 3, **PARAMETERS[request_id % len(PARAMETERS)])
        driver.run()
    return driver


def test_greedy_is_the_largest_logit(reference, solo):
    ids = prompts(1)[0]
    for token in solo.outputs[0]:
        assert token == int(tiny.reference_logits(reference, ids)[-1].argmax())
        ids = [*ids, token]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "how",
    [{}, {"company": 0.5, "chunk": 7}, {"company": 0.7, "chunk": 30, "preempt": 0.1}],
    ids=["batch", "chunks", "preemption"],
)
def test_outputs_and_scores_equal_the_solo_run(reference, solo, how, seed):
    driver = run_all(reference, seed=seed, **how)
    assert driver.outputs == solo.outputs
    assert driver.scores == solo.scores
    assert driver.prompt_scores == solo.prompt_scores
    assert not driver.errors


def test_seeds_differ(reference):
    driver = Driver(make_runner(reference))
    for request_id in range(6):
        driver.add(request_id, [5, 6, 7], 12, seed=request_id // 2, temperature=20.0)
    driver.run()
    outputs = [tuple(driver.outputs[request_id]) for request_id in range(6)]
    assert outputs[0::2] == outputs[1::2]
    assert len(set(outputs)) == 3


def test_scores_are_log_softmax_of_the_raw_logits(reference, solo):
    request_id = 5
    prompt = prompts(9)[request_id]
    ids = prompt + solo.outputs[request_id]
    expected = torch.log_softmax(tiny.reference_logits(reference, ids), dim=-1)
    assert len(solo.scores[request_id]) == 25
    for index, score in enumerate(solo.scores[request_id]):
        position = len(prompt) + index
        assert score.logprob == pytest.approx(float(expected[position - 1, ids[position]]), abs=1e-4)
        assert len(score.top_ids) == 3
    assert sorted(solo.prompt_scores[request_id]) == list(range(1, len(prompt)))
    for position, score in solo.prompt_scores[request_id].items():
        assert score.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-4)
        assert score.top_logprobs == pytest.approx(expected[position - 1].topk(2).values.tolist(), abs=1e-4)


def test_min_tokens_masks_the_ends(reference):
    driver = Driver(make_runner(reference))
    everything_but = tuple(range(3, tiny.VOCAB))
    driver.add(0, [5, 6], 4, suppressed=everything_but, min_tokens=2, temperature=0.0)
    driver.run()
    assert all(token < 3 for token in driver.outputs[0][:2])


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": [5, tiny.VOCAB]},
        {"prompt": [-1]},
        {"prompt": [5], "logit_bias": {tiny.VOCAB: 1.0}},
        {"prompt": [5] * 600},
    ],
)
def test_a_request_with_bad_ids_fails_alone(reference, bad):
    driver = Driver(make_runner(reference))
    driver.add(0, [5, 6, 7], 5, temperature=0.0)
    driver.add(1, num_output=5, temperature=0.0, **bad)
    driver.add(2, [8, 9], 5, temperature=0.0)
    driver.run()
    assert list(driver.errors) == [1]
    alone = Driver(make_runner(reference))
    alone.add(2, [8, 9], 5, temperature=0.0)
    alone.run()
    assert driver.outputs[2] == alone.outputs[2]
    assert len(driver.outputs[0]) == 5
    driver.step([])  # carries the last drops
    assert len(driver.runner._table) == 0


def test_unknown_request_is_an_error_of_its_row(reference):
    result = make_runner(reference).execute(StepPlan(0, [], [PlanRow(77, 0, 1, [0], True)], [77, 78]))
    assert (result.num_tokens, result.token_ids, result.errors[0].request_id) == ([0], [], 77)


class FakeBackend:
    """Logits that prefer the token after the last one; NaN after token 13."""

    name, batch_invariant = "fake", True

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        last = torch.from_numpy(batch.token_ids[batch.logit_tokens].astype(np.int64))
        logits = torch.nn.functional.one_hot((last + 1) % tiny.VOCAB, tiny.VOCAB).float()
        logits[last == 13] = float("nan")
        return logits


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_p": 1e-9}, {"top_k": 1, "logprobs": 1}])
def test_a_row_without_numbers_fails_alone(sampling):
    driver = Driver(ModelRunner(FakeBackend(), make_table()))
    for request_id, start in enumerate([20, 10, 30]):
        driver.add(request_id, [1, start], 6, **sampling)
    driver.run()
    assert driver.outputs == {0: list(range(21, 27)), 1: [11, 12, 13], 2: list(range(31, 37))}
    assert list(driver.errors) == [1]


def test_table_grows_and_forgets():
    driver = Driver(ModelRunner(FakeBackend(), make_table(max_seqs=1)))
    for request_id in range(20):
        driver.add(request_id, [request_id + 30], 1 + request_id % 5, temperature=0.0)
    driver.run(company=0.6)
    assert all(driver.outputs[r] == list(range(r + 31, r + 32 + r % 5)) for r in range(20))
    driver.step([])
    assert len(driver.runner._table) == 0


def test_a_plan_that_would_write_into_foreign_blocks_is_refused():
    runner = ModelRunner(FakeBackend(), make_table())
    request = NewRequest(1, list(range(3, 12)), 9, SamplingParams())
    with pytest.raises(ValueError, match="blocks"):
        runner.execute(StepPlan(0, [request], [PlanRow(1, 0, 9, [0, 1], True)], []))
    with pytest.raises(ValueError, match="tokens"):
        runner.execute(StepPlan(0, [request], [PlanRow(1, 0, 10, [0, 1, 2], True)], []))

"""The model runner through plans: outputs equal the solo run, broken requests fail alone, scores are the model's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanoserve.ipc.messages import SamplingParams
from nanoserve.runner.backend import ForwardBatch
from nanoserve.runner.batch import RequestTable, StepRows
from nanoserve.runner.model_runner import ModelRunner
from nanoserve.runner.sampler import SampleRows, choose
from nanoserve.sched.plan import NewRequest, PlanRow, StepPlan
from tests.runner import tiny
from tests.runner.plans import Driver

pytestmark = pytest.mark.slow
BLOCK = 4
NUM_BLOCKS = 400


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def reference(request):
    return tiny.make_reference(request.param)


def make_runner(reference) -> ModelRunner:
    backend = tiny.make_backend(reference, block_size=BLOCK, num_blocks=NUM_BLOCKS)
    return ModelRunner(backend, make_table(max_seqs=2))


def make_driver(runner: ModelRunner, seed: int = 0) -> Driver:
    return Driver(runner, num_blocks=NUM_BLOCKS, block_size=BLOCK, seed=seed)


def make_table(max_seqs: int = 4) -> RequestTable:
    return RequestTable(max_seqs=max_seqs, max_tokens=512, block_size=BLOCK, vocab_size=tiny.VOCAB)


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
    driver = make_driver(make_runner(reference), seed)
    for request_id, prompt in enumerate(prompts(9)):
        driver.add(request_id, prompt, 25, seed=request_id % 3, **PARAMETERS[request_id % len(PARAMETERS)])
    driver.run(**how)
    assert sorted(driver.free) == list(range(NUM_BLOCKS))
    return driver


@pytest.fixture(scope="module")
def solo(reference) -> Driver:
    """Every request alone, prompt in one piece."""
    driver = make_driver(make_runner(reference))
    for request_id, prompt in enumerate(prompts(9)):
        driver.add(request_id, prompt, 25, seed=request_id % 3, **PARAMETERS[request_id % len(PARAMETERS)])
        driver.run()
    return driver


def test_greedy_is_the_largest_logit(reference, solo):
    ids = prompts(1)[0]
    for token in solo.outputs[0]:
        assert token == int(tiny.reference_logits(reference, ids)[-1].argmax())
        ids = [*ids, token]


@pytest.mark.rule(39)
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


@pytest.mark.rule(37)
def test_seeds_differ(reference):
    driver = make_driver(make_runner(reference))
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
    driver = make_driver(make_runner(reference))
    everything_but = tuple(range(3, tiny.VOCAB))
    driver.add(0, [5, 6], 4, suppressed=everything_but, min_tokens=2, temperature=0.0)
    driver.run()
    assert all(token < 3 for token in driver.outputs[0][:2])


@pytest.mark.rule(11, 35)
@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": [5, tiny.VOCAB]},
        {"prompt": [-1]},
        {"prompt": [5], "logit_bias": {tiny.VOCAB: 1.0}},
        {"prompt": [5], "bad_words": ((4, tiny.VOCAB),)},
        {"prompt": [5] * 600},
    ],
)
def test_a_request_with_bad_ids_fails_alone(reference, bad):
    driver = make_driver(make_runner(reference))
    driver.add(0, [5, 6, 7], 5, temperature=0.0)
    driver.add(1, num_output=5, temperature=0.0, **bad)
    driver.add(2, [8, 9], 5, temperature=0.0)
    driver.run()
    assert list(driver.errors) == [1]
    alone = make_driver(make_runner(reference))
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

    def forward_greedy(self, batch: ForwardBatch) -> np.ndarray:
        last = batch.token_ids[batch.logit_tokens]
        return np.where(last == 13, -1, (last + 1) % tiny.VOCAB)

    def forward_drawn(self, batch: ForwardBatch, rows: SampleRows) -> tuple[np.ndarray, torch.Tensor]:
        logits = self.forward(batch)
        return choose(logits, rows), logits

    def choose(self, logits: torch.Tensor, rows: SampleRows) -> np.ndarray:
        return choose(logits, rows)


@pytest.mark.rule(35)
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_p": 1e-9}, {"top_k": 1, "logprobs": 1}])
def test_a_row_without_numbers_fails_alone(sampling):
    driver = make_driver(ModelRunner(FakeBackend(), make_table()))
    for request_id, start in enumerate([20, 10, 30]):
        driver.add(request_id, [1, start], 6, **sampling)
    driver.run()
    assert driver.outputs == {0: list(range(21, 27)), 1: [11, 12, 13], 2: list(range(31, 37))}
    assert list(driver.errors) == [1]


def test_table_grows_and_forgets():
    driver = make_driver(ModelRunner(FakeBackend(), make_table(max_seqs=1)))
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
    for start, match in ((9, "tokens"), (-1, "tokens"), (8, "blocks")):
        with pytest.raises(ValueError, match=match):
            runner.execute(StepPlan(0, [request], [PlanRow(1, start, 1, [0, 1], True)], []))


def test_rows_of_one_token_are_built_like_any_others():
    """The short way of most steps gives the arrays of the long one, which prompts and drafts go through.

    Also where the same rows go on and get blocks, what the short way keeps being the same.
    """
    random = np.random.default_rng(5)
    table = make_table(max_seqs=8)
    lengths = [int(length) for length in random.integers(2, 60, 8)]
    for request_id, length in enumerate(lengths):
        ids = random.integers(3, tiny.VOCAB, length).tolist()
        table.add(NewRequest(request_id, ids, length, SamplingParams(temperature=0.5 * (request_id == 3))))
    free = iter(range(1000))
    for chosen in ([0], [5, 2, 7], [3, 1, 0, 6], list(range(8)), [5, 2, 7]):
        for _ in range(7 * BLOCK):
            plan = [
                PlanRow(
                    request_id,
                    lengths[request_id] - 1,
                    1,
                    [next(free) for _ in range(-(-lengths[request_id] // BLOCK) - table_blocks(table, request_id))],
                    True,
                )
                for request_id in chosen
            ]
            short = table.build(plan, [])
            long = table._build_any(plan, short.plan_index, short.places)
            compare(short, long)
            assert short.greedy == (3 not in chosen)
            for request_id in chosen:
                lengths[request_id] += 1
            table.append(short.places, short.ahead, random.integers(3, tiny.VOCAB, len(chosen)))


def test_what_is_kept_of_a_decode_step_does_not_outlive_other_steps():
    """A prompt beside the same rows, in which they get blocks, then those rows alone again."""
    table = make_table()
    for request_id in (0, 1, 2):
        table.add(NewRequest(request_id, list(range(3, 3 + 2 * BLOCK)), 2 * BLOCK, SamplingParams()))
    place = table._places
    last = 2 * BLOCK - 1
    table.build([PlanRow(0, last, 1, [10, 11], True), PlanRow(1, last, 1, [20, 21], True)], [])
    table.append(np.array([place[0], place[1]]), np.zeros(2, np.int64), np.array([5, 6]))
    beside = PlanRow(2, 0, BLOCK, [30], False)
    table.build([PlanRow(0, last + 1, 1, [12], True), PlanRow(1, last + 1, 1, [22], True), beside], [])
    table.append(np.array([place[0], place[1]]), np.zeros(2, np.int64), np.array([7, 8]))
    plan = [PlanRow(0, last + 2, 1, [], True), PlanRow(1, last + 2, 1, [], True)]
    short = table.build(plan, [])
    compare(short, table._build_any(plan, short.plan_index, short.places))
    assert short.forward.block_tables[:, :3].tolist() == [[10, 11, 12], [20, 21, 22]]


def test_what_is_kept_of_a_decode_step_does_not_outlive_its_requests():
    """The same id again, at another place and all but its last token found in the prefix cache."""
    table = make_table()
    table.add(NewRequest(0, [3, 4, 5], 3, SamplingParams()))
    assert table.build([PlanRow(0, 2, 1, [10], True)], []).forward.token_ids.tolist() == [5]
    table.drop(0)
    for request_id, ids in ((1, [6, 7, 8]), (0, [3, 4, 9])):
        table.add(NewRequest(request_id, ids, 3, SamplingParams()))
    step = table.build([PlanRow(0, 2, 1, [11], True)], [])
    assert step.forward.token_ids.tolist() == [9] and step.forward.block_tables[0, 0] == 11


def test_a_row_that_cannot_run_is_told_of_in_each_step():
    table = make_table()
    table.add(NewRequest(0, [3, 4, 5], 3, SamplingParams()))
    for new_blocks in ([10], []):
        errors = []
        step = table.build([PlanRow(77, 0, 1, [], True), PlanRow(0, 2, 1, new_blocks, True)], errors)
        assert [error.request_id for error in errors] == [77] and step.plan_index.tolist() == [1]
    assert table.build([PlanRow(0, 2, 1, [], True)], []).plan_index.tolist() == [0]


def compare(short: StepRows, long: StepRows) -> None:
    width = long.forward.block_tables.shape[1]  # the entries behind it are ignored
    np.testing.assert_array_equal(short.forward.block_tables[:, :width], long.forward.block_tables)
    for of_short, of_long in ((short.forward, long.forward), (short, long)):
        for name in of_short.__dataclass_fields__:
            left, right = getattr(of_short, name), getattr(of_long, name)
            if name in ("forward", "block_tables"):
                continue
            if isinstance(left, np.ndarray):
                assert left.dtype == right.dtype, name
                np.testing.assert_array_equal(left, right, err_msg=name)
            else:
                assert left == right, name


def table_blocks(table: RequestTable, request_id: int) -> int:
    return int(table._columns.num_blocks[table._places[request_id]])

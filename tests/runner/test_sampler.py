"""The sampler against a slow, readable reference, and the promises it makes: order, ties, independence of a row."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.ipc.messages import SamplingParams
from nanoserve.runner import sampler, scores
from nanoserve.runner.logit_edits import LogitEdits
from nanoserve.runner.native import draw as native_draw
from nanoserve.runner.native.build import NativeUnavailable, default_cache_dir, library_path
from nanoserve.runner.native.library import load_library
from nanoserve.runner.philox import uniforms
from nanoserve.runner.sampler import SAMPLE_ROW, SampleRows, add_edited
from nanoserve.runner.scores import score_tokens
from nanoserve.sched.plan import NewRequest

pytestmark = pytest.mark.slow

choose: sampler.Choose = sampler.choose


class Row:
    """One request at the moment it draws: prompt, output so far, parameters."""

    def __init__(self, prompt=(1,), output=(), suppressed=(), **sampling):
        self.request = NewRequest(1, [*prompt, *output], len(prompt), SamplingParams(**sampling), tuple(suppressed))
        self.prompt, self.output = list(prompt), list(output)
        self.sampling = self.request.sampling

    @property
    def edits(self) -> LogitEdits | None:
        return LogitEdits(self.request) if LogitEdits.needed(self.request) else None


@pytest.fixture(autouse=True, scope="module", params=["torch", "native"])
def way_to_choose(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test below runs with both."""
    global choose
    if request.param == "native":
        try:
            library = load_library(library_path(default_cache_dir()))
        except NativeUnavailable as error:
            pytest.skip(str(error))
        choose = functools.partial(native_draw.choose, library, None)
    yield request.param
    choose = sampler.choose


def draw(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    asked = as_rows(rows)
    return add_edited(choose(logits, asked.without_edits()), logits, asked, choose).tolist()


def as_rows(rows: list[Row]) -> SampleRows:
    asked = np.empty(len(rows), dtype=SAMPLE_ROW)
    for name in ("seed", "top_k", "temperature", "top_p", "min_p"):
        asked[name] = [getattr(row.sampling, name) for row in rows]
    asked["position"] = [len(row.output) for row in rows]
    asked["logit_row"] = np.arange(len(rows))
    return SampleRows(
        asked,
        [(index, row.edits, len(row.output)) for index, row in enumerate(rows) if row.edits],
    )


def reference_logits(logits: list[float], row: Row) -> list[float]:
    """Penalties, bias and mask, one id at a time."""
    sampling, out = row.sampling, list(logits)
    for token in set(row.prompt) | set(row.output):
        out[token] = (
            out[token] / sampling.repetition_penalty if out[token] > 0 else out[token] * sampling.repetition_penalty
        )
        count = row.output.count(token)
        out[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    for token, bias in sampling.logit_bias.items():
        out[token] += bias
    masked = row.request.suppressed_until_min_tokens if len(row.output) < sampling.min_tokens else ()
    forced = [t for t, bias in sampling.logit_bias.items() if bias >= 100 and t not in masked]
    for token in range(len(out)):
        banned = sampling.logit_bias.get(token, 0) <= -100 or token in masked
        if banned or (forced and token not in forced):
            out[token] = -math.inf
    return out


def reference_draw(logits: list[float], row: Row) -> tuple[int, float]:
    """The token, and how near the random number was to choosing another one (infinite for greedy)."""
    edited, sampling = reference_logits(logits, row), row.sampling
    order = sorted(range(len(edited)), key=lambda token: (-edited[token], token))
    if sampling.temperature < 1e-5:
        gap = edited[order[0]] - edited[order[1]]
        return order[0], gap if gap > 0 else math.inf
    weight = {token: math.exp((edited[token] - edited[order[0]]) / sampling.temperature) for token in order}
    edges = [abs(w - sampling.min_p) for w in weight.values() if sampling.min_p]
    weight = {token: w if w >= sampling.min_p else 0.0 for token, w in weight.items()}
    cut = 0 < sampling.top_k < len(logits) or sampling.top_p < 1
    kept = order[: sampling.top_k] if sampling.top_k else order
    mass, below, nucleus = sum(weight[token] for token in kept), 0.0, []
    for token in kept:
        edges.append(abs(below - sampling.top_p * mass) / mass if nucleus and sampling.top_p < 1 else math.inf)
        if nucleus and sampling.top_p < 1 and below >= sampling.top_p * mass:
            break
        nucleus.append(token)
        below += weight[token]
    candidates = nucleus if cut else sorted(nucleus)
    total = sum(weight[token] for token in candidates)
    target = float(uniforms(np.array([sampling.seed]), np.array([len(row.output)]))[0]) * total
    below, choice = 0.0, None
    for token in candidates:
        below += weight[token]
        edges.append(abs(below - target) / total)
        if choice is None and below > target:
            choice = token
    return choice, min(edges)


@st.composite
def rows(draw_value) -> Row:
    def token_lists(longest: int) -> list[int]:
        return draw_value(st.lists(st.integers(0, 79), min_size=1, max_size=longest))

    def pick(*values):
        return draw_value(st.sampled_from(values))

    return Row(
        prompt=token_lists(8),
        output=token_lists(8) if pick(True, False) else [],
        suppressed=pick((), (3, 7)),
        min_tokens=pick(0, 4),
        temperature=pick(0.0, 1e-6, 0.3, 1.0, 1.7),
        top_k=pick(0, 0, 1, 3, 40, 79, 500),
        top_p=pick(1.0, 1.0, 0.0, 1e-9, 0.5, 0.95),
        min_p=pick(0.0, 0.0, 0.1, 1.0),
        repetition_penalty=pick(1.0, 1.0, 1.3, 0.8),
        frequency_penalty=pick(0.0, 0.0, 1.5, -2.0),
        presence_penalty=pick(0.0, 0.0, 0.7),
        logit_bias=pick({}, {}, {5: 3.0, 6: -2.0}, {9: 100.0}, {4: -100.0, 11: 100.0, 3: 100.0}),
        seed=draw_value(st.integers(-(2**63), 2**63 - 1)),
    )


@pytest.mark.rule(36, 38)
@settings(max_examples=150, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=6), st.integers(0, 2**31))
def test_equals_the_reference(batch, seed):
    logits = torch.randn(len(batch), 80, generator=torch.Generator().manual_seed(seed)) * 4
    for token, row, row_logits in zip(draw(logits, batch), batch, logits.tolist(), strict=True):
        expected, margin = reference_draw(row_logits, row)
        assert token == expected or margin < 1e-5, (row.request, token, expected, margin)


@pytest.fixture
def two_threads():
    """With one, torch never splits a row's sum."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.rule(37, 39)
@pytest.mark.parametrize("vocab_size", [100, 5000, 49152])
def test_a_row_draws_the_same_alone_and_in_any_batch(two_threads, vocab_size):
    """And at every width of the sort: the logits are so flat that top_p needs thousands of candidates."""
    torch.manual_seed(1)
    logits = torch.randn(24, vocab_size)
    batch = [
        Row(
            output=[5] * (index % 7),
            seed=index,
            temperature=[1.0, 0.0, 0.5, 30.0][index % 4],
            top_p=[1.0, 0.9, 0.99, 1.0, 0.2][index % 5],
            top_k=[0, 0, 30, 900, 3000, 0][index % 6],
            min_p=[0.0, 0.05, 0.0][index % 3],
            presence_penalty=[0.0, 1.0][index % 2],
        )
        for index in range(24)
    ]
    together = draw(logits, batch)
    assert together == [draw(logits[i : i + 1], [batch[i]])[0] for i in range(24)]
    order = torch.randperm(24).tolist()
    assert draw(logits[order], [batch[i] for i in order]) == [together[i] for i in order]
    assert len(set(together)) > 10


@pytest.mark.rule(36)
def test_the_ways_to_say_greedy_agree_also_on_ties():
    logits = torch.randn(64, 300).round()  # many equal largest values
    logits[:8] = 0.0
    ways = [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-12}, {"temperature": 9.0, "top_k": 1}]
    expected = draw(logits, [Row(temperature=0.0)] * 64)
    assert expected == logits.argmax(dim=-1).tolist()
    for way in ways:
        assert draw(logits, [Row(seed=seed, **way) for seed in range(64)]) == expected


def test_close_logits_keep_their_order_at_high_temperature():
    """Their weights round to the same number; top_k=1 still takes the larger one."""
    logits = torch.full((1, 100), 0.0)
    logits[0, 60] = 1e-6
    assert draw(logits, [Row(temperature=100.0, top_k=1)]) == [60]


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    logits = probabilities.log().expand(4000, 4).contiguous()
    plain = np.bincount(draw(logits, [Row(seed=seed) for seed in range(4000)]), minlength=4) / 4000
    assert np.abs(plain - probabilities.numpy()).max() < 0.03
    cut = np.bincount(draw(logits, [Row(seed=seed, top_p=0.7) for seed in range(4000)]), minlength=4) / 4000
    assert np.abs(cut - np.array([2 / 3, 1 / 3, 0, 0])).max() < 0.03


@pytest.mark.rule(38)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_of_100_decides(temperature):
    logits = torch.randn(2, 50) * 200
    forced, banned = int(logits[0].argmin()), int(logits[1].argmax())
    batch = [
        Row(temperature=temperature, logit_bias={forced: 100.0}),
        Row(temperature=temperature, logit_bias={banned: -100.0}),
    ]
    first, second = draw(logits, batch)
    assert first == forced
    assert second != banned


def test_min_tokens_mask_is_stronger_than_bias():
    logits = torch.zeros(1, 10)
    row = {"suppressed": (4,), "min_tokens": 2, "logit_bias": {4: 100.0, 6: 100.0}, "temperature": 0.0}
    assert draw(logits, [Row(**row)]) == [6]
    assert draw(logits, [Row(output=[6, 6], **row)]) == [4]


@pytest.mark.rule(35)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_p": 0.9}, {"logit_bias": {3: 1.0}}, {"top_k": 5}])
def test_a_broken_row_fails_alone(value, sampling):
    logits = torch.randn(3, 100)
    whole = draw(logits, [Row(seed=1, **sampling)] * 3)
    logits[1] = value
    assert draw(logits, [Row(seed=1, **sampling)] * 3) == [whole[0], -1, whole[2]]
    logits[1] = torch.randn(100)
    logits[1, 77] = value
    broken = draw(logits, [Row(seed=1, **sampling)] * 3)[1]
    assert (broken == -1) == (value != float("-inf"))


def test_logits_are_left_as_they_are():
    logits = torch.randn(3, 100)
    before = logits.clone()
    draw(logits, [Row(logit_bias={1: 100.0}), Row(presence_penalty=1.0, top_k=3), Row()])
    assert torch.equal(before, logits)


@pytest.mark.rule(34)
def test_counts_grow_with_the_output():
    """Appending tokens one by one is the same as starting with them (a resumed request)."""
    sampling = SamplingParams(frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.1)
    tokens = [i * 7 % 90 for i in range(200)]
    grown = LogitEdits(NewRequest(1, tokens[:50], 50, sampling))
    for token in tokens[50:]:
        grown.append(token)
    whole = LogitEdits(NewRequest(1, tokens, 50, sampling))
    for one, other in zip(grown.penalties(), whole.penalties(), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.rule(36)
@pytest.mark.parametrize("spread", [0.3, 2.5, 8.0])
def test_both_ways_draw_the_same_but_for_rounding(way_to_choose: str, spread: float) -> None:
    """On whole vocabularies, flat and peaked."""
    num_rows = 60
    logits = torch.randn(num_rows, 49152, generator=torch.Generator().manual_seed(3)) * spread
    differing = 0
    for sampling in (
        {},
        {"temperature": 0.6, "min_p": 0.05},
        {"top_p": 0.95},
        {"top_p": 0.3, "min_p": 0.001},
        {"top_p": 0.999999},
        {"top_k": 50},
        {"top_k": 2000, "top_p": 0.9},
    ):
        rows = as_rows([Row(seed=seed, **sampling) for seed in range(num_rows)])
        differing += int((choose(logits, rows) != sampler.choose(logits, rows)).sum())
    assert differing <= (2 if way_to_choose == "native" else 0)


@pytest.mark.parametrize("vocab_size", [300, 49152])
def test_scores(two_threads, vocab_size):
    torch.manual_seed(0)
    logits = torch.randn(70, vocab_size) * 3
    rows = np.arange(70)[::-1].copy()
    tokens = np.random.default_rng(0).integers(0, vocab_size, 70)
    expected = torch.log_softmax(logits.double(), dim=-1)
    together = score_tokens(logits, rows, tokens, 4)
    for score, row, token in zip(together, rows.tolist(), tokens.tolist(), strict=True):
        assert score.logprob == pytest.approx(float(expected[row, token]), abs=1e-5)
        assert score.rank == 1 + int((logits[row] > logits[row, token]).sum())
        values, ids = expected[row].topk(4)
        assert score.top_ids == ids.tolist()
        assert score.top_logprobs == pytest.approx(values.tolist(), abs=1e-5)
        assert score_tokens(logits[row : row + 1], np.array([0]), np.array([token]), 4) == [score]


def test_scores_of_a_large_vocabulary_take_few_megabytes_at_a_time(monkeypatch):
    """Larger temporaries get fresh pages from the kernel each time, which took four fifths of the time."""
    sizes = []

    def recorded(logits, *rest, score_rows=scores._score_rows):
        sizes.append(logits.numel())
        return score_rows(logits, *rest)

    monkeypatch.setattr(scores, "_score_rows", recorded)
    logits = torch.zeros(9, 1 << 18)
    assert len(score_tokens(logits, np.arange(9), np.arange(9), 5)) == 9
    assert sum(sizes) == logits.numel()
    assert max(sizes) <= 1 << 20


@pytest.mark.rule(38)
def test_scores_are_finite_numbers():
    logits = torch.full((1, 20), float("-inf"))
    logits[0, 3] = 1.0
    (score,) = score_tokens(logits, np.array([0]), np.array([5]), 3)
    assert score.rank == 2
    assert math.isfinite(score.logprob)
    assert all(map(math.isfinite, score.top_logprobs))

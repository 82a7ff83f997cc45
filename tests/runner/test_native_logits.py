"""The C++ engine against the float32 oracle, and against itself: a row's logits are the same bits in any company."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from nanoserve.runner.backend import ForwardBatch
from nanoserve.runner.native.backend import NativeBackend, NativeOptions, unsupported_reason
from nanoserve.runner.native.build import missing_cpu_features
from nanoserve.runner.native.packing import Weights
from tests.runner.native_models import (
    CONFIGS,
    IDS,
    VOCAB,
    batch_of,
    check_broken_row,
    check_company,
    error_of,
    logits_of,
    make_native,
    make_spec,
    make_torch,
    make_weights,
)
from tests.runner.tiny import Sequences

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_cpu_features()), reason="the CPU lacks what the engine needs"),
]


@pytest.mark.parametrize("name", CONFIGS)
def test_no_further_from_float32_than_torch_in_bfloat16(name: str) -> None:
    """The yardstick is torch's own bfloat16 error on the same weights: 0.5 % to 7 % on these random models. The
    engine keeps the residual stream, norms and rotations in float32, so it must not be worse."""
    spec = make_spec(name)
    exact = logits_of(make_torch(spec, torch.float32), [300])
    rounded = error_of(logits_of(make_torch(spec, torch.bfloat16), [300]), exact)
    ours = error_of(logits_of(make_native(spec), [300]), exact)
    assert 0 < ours <= rounded


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_change_no_bit(name: str) -> None:
    backend = make_native(make_spec(name))
    whole = logits_of(backend, [560])
    assert torch.equal(logits_of(backend, [1, 2, 3, 5, 12, 13, 16, 48, 100, 57, *[1] * 3, 300]), whole)


@pytest.mark.parametrize("name", ["llama", "mistral-long-window", "gemma3"])
def test_contexts_split_over_threads_change_no_bit(name: str) -> None:
    """Single tokens, and a few together, behind the fifth cut of 256: each segment by whichever thread.

    Enough of them that another order of merging, whose float32 differences bfloat16 mostly hides, would show.
    """
    backend = make_native(make_spec(name))
    whole = logits_of(backend, [1400])
    assert torch.equal(logits_of(backend, [250, *[1] * 12, 900, 90, 5, 30, 13, *[1] * 100]), whole)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_block_size_change_no_bit(threads: int) -> None:
    spec = make_spec("llama")
    whole = logits_of(make_native(spec), [100])
    assert torch.equal(logits_of(make_native(spec, threads=threads), [40, 60]), whole)
    wide = make_native(spec, threads=threads, block_size=48, num_blocks=40)
    sequences = Sequences(wide, 48, 40)
    index = sequences.add(IDS[:100])
    assert torch.equal(torch.cat(sequences.run([(index, 0, 100)])), whole)


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_thread_that_loses_its_core_changes_no_bit(name: str, slow: int) -> None:
    """Phases do not wait for a thread without an item: others are layers ahead, or through, when it comes back."""
    spec = make_spec(name)
    whole = logits_of(make_native(spec), [330])
    backend = make_native(spec, threads=3)
    backend.slow_thread(slow, 300)
    assert torch.equal(logits_of(backend, [200, *[1] * 60, 3, 5, 62]), whole)
    sequences = Sequences(backend, 16, 160, slow)
    rows = [sequences.add(IDS[: 20 + i]) for i in range(14)]
    sequences.run([(row, 0, 19 + i) for i, row in enumerate(rows)])
    for i, part in enumerate(sequences.run([(row, 19 + i, 1) for i, row in enumerate(rows)])):
        assert torch.equal(part[0], whole[19 + i])
    greedy = backend.forward_greedy(batch_of(IDS[:4], [3], [5]))
    assert greedy[0] == int(backend.forward(batch_of(IDS[:4], [3], [5]))[0].argmax())


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "gemma3"])
def test_company_changes_no_bit(name: str) -> None:
    check_company(make_native(make_spec(name)))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_decode_batches_of_every_size_change_no_bit(name: str) -> None:
    """1 to 40 rows: every height of a register tile, few-row and many-row paths."""
    backend = make_native(make_spec(name))
    alone = logits_of(backend, [60])
    for size in (1, 2, 3, 4, 5, 7, 11, 12, 13, 24, 25, 40):
        sequences = Sequences(backend, 16, 160, size)
        rows = [sequences.add(IDS[: 20 + i]) for i in range(size)]
        sequences.run([(row, 0, 19 + i) for i, row in enumerate(rows)])
        for i, part in enumerate(sequences.run([(row, 19 + i, 1) for i, row in enumerate(rows)])):
            assert torch.equal(part[0], alone[19 + i])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_only_asked_logits_and_greedy_ids(name: str) -> None:
    backend = make_native(make_spec(name))
    for count in (3, 40):  # the few-row path normalizes in each thread
        table = [5, 9, 2][: -(-count // 16)]
        everything = backend.forward(batch_of(IDS[:count], list(range(count)), table)).clone()
        assert np.array_equal(backend.greedy_ids, everything.argmax(1).numpy())
        some = [0, 2, count - 1] if count > 3 else [2]
        assert torch.equal(backend.forward(batch_of(IDS[:count], some, table)), everything[some])
        assert np.array_equal(
            backend.forward_greedy(batch_of(IDS[:count], some, table)), everything[some].argmax(1).numpy()
        )
        assert backend.forward(batch_of(IDS[:count], [], table)).shape == (0, VOCAB)


def test_memory_for_the_logits_of_a_prompt_is_given_back() -> None:
    """A step's worth of prompt scores takes half a gigabyte with Gemma's vocabulary. Streams' own stays."""
    backend = make_native(make_spec("llama"))
    table = list(range(40))
    alone = backend.forward(batch_of(IDS[:600], [599], table)).clone()
    backend.forward(batch_of(IDS[:600], list(range(600)), table))
    assert backend._logits.memory.shape[0] == 600
    assert torch.equal(backend.forward(batch_of(IDS[:600], [599], table)), alone)
    assert backend._logits.memory.shape[0] == 1
    backend.forward(batch_of(IDS[:600], list(range(100)), table))
    assert torch.equal(backend.forward(batch_of(IDS[:600], [599], table)), alone)
    assert backend._logits.memory.shape[0] == 100


def test_keys_and_values_are_written_when_no_logits_are_asked() -> None:
    backend = make_native(make_spec("llama"))
    whole = logits_of(backend, [40])
    backend.allocate_kv(160)
    backend.forward(batch_of(IDS[:39], [], [7, 8, 9]))
    last = ForwardBatch(
        token_ids=np.array(IDS[39:40], np.int32),
        positions=np.array([39], np.int32),
        row_starts=np.array([0, 1], np.int32),
        context_lens=np.array([40], np.int32),
        block_tables=np.array([[7, 8, 9]], np.int32),
        logit_tokens=np.array([0], np.int32),
    )
    assert torch.equal(backend.forward(last)[0], whole[39])


def test_a_broken_row_fails_alone() -> None:
    check_broken_row(make_native(make_spec("llama")))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_scores_that_overflow_break_the_rows_that_see_them(kv_dtype: torch.dtype) -> None:
    """One token's keys are 1e30, its values are fine, and queries are 1e10: infinities of both signs add up to what is
    no number. A softmax that passed over it would answer as if the token were not there, segments later, too."""
    spec = make_spec("llama")
    weights, poison, column = make_weights(spec), VOCAB - 1, 7
    weights["model.embed_tokens.weight"][:, column] = 0
    weights["model.embed_tokens.weight"][poison, column] = 1
    attention = "model.layers.0.self_attn."
    weights[attention + "q_proj.weight"] *= 1e10
    weights[attention + "k_proj.weight"][:, column] *= 1e30
    options = NativeOptions(threads=2, kv_dtype=kv_dtype)
    backend = NativeBackend(spec, lambda: Weights(weights, {}), options)
    backend.allocate_kv(160)
    ids = [min(token, VOCAB - 2) for token in IDS[:700]]
    clean = backend.forward(batch_of(ids, list(range(700)), list(range(44)))).clone()
    ids[300] = poison
    broken = backend.forward(batch_of(ids, list(range(700)), list(range(44))))
    assert clean.isfinite().all() and torch.equal(broken[:300], clean[:300])
    assert broken[300:].isnan().all() and (backend.greedy_ids[300:] == -1).all()


def test_bad_indices_are_refused() -> None:
    backend = make_native(make_spec("llama"), num_blocks=8)
    for ids, table in (([VOCAB], [0]), ([-1], [0]), ([1], [8]), ([1], [-1]), ([1] * 17, [0])):
        with pytest.raises(ValueError, match=r"token id|block table"):
            backend.forward(batch_of(ids, [0], table))
    good = batch_of([1, 2], [0, 1], [3])
    for position in (-1, backend._max_positions):
        with pytest.raises(ValueError, match="position"):
            backend.forward(dataclasses.replace(good, positions=np.array([0, position], np.int32)))
    backend.forward(good)


def test_unsupported_models_say_why() -> None:
    spec = make_spec("llama")
    assert unsupported_reason(spec, torch.bfloat16, 16) is None
    assert "float32" in str(unsupported_reason(spec, torch.float32, 16))
    assert "block size 8" in str(unsupported_reason(spec, torch.bfloat16, 8))
    assert "head size 16" in str(unsupported_reason(make_spec("llama", head_dim=16), torch.bfloat16, 16))
    capped = make_spec("gemma3", final_logit_softcapping=5.0)
    assert "soft-capped" in str(unsupported_reason(capped, torch.bfloat16, 16))

"""`nanoserve.LLM`: the three parts in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest

import nanoserve
from nanoserve import LLM, SamplingParams
from nanoserve.errors import ConfigError, RequestError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sim() -> LLM:
    """Says the prompt's ids again."""
    return LLM("sim", max_num_seqs=4, max_model_len=256)


@pytest.fixture(scope="module")
def real() -> LLM:
    return LLM("smollm2-135m", max_model_len=512, kv_cache_memory="64MiB", engine_threads=1)


def test_answers_come_in_the_order_of_the_prompts(sim: LLM) -> None:
    words = [f"number {index} is not {index + 1}" for index in range(20)]
    answers = sim.generate(words, SamplingParams(temperature=0.0, max_tokens=100, stop_token_ids=(), ignore_eos=True))
    for word, answer in zip(words, answers, strict=True):
        assert answer.prompt == word
        assert len(answer.outputs[0].token_ids) == 100
        assert answer.text.startswith(word)
        assert answer.outputs[0].finish_reason == "length"


def test_ids_in_ids_out_and_parameters_for_each(sim: LLM) -> None:
    params = [SamplingParams(max_tokens=count, logprobs=1, ignore_eos=True) for count in (0, 1, 5)]
    answers = sim.generate([[5, 6, 7], [8, 9], [10]], params)
    assert [answer.outputs[0].token_ids for answer in answers] == [[], [8], [10] * 5]
    assert answers[0].prompt is None
    assert answers[2].outputs[0].logprobs is not None
    assert [entry.token_id for entry in answers[2].outputs[0].logprobs] == [10] * 5
    (single,) = sim.generate([5, 6, 7], SamplingParams(max_tokens=2))
    assert single.prompt_token_ids == [5, 6, 7]
    assert sim.generate([]) == []


def test_a_stop_string_ends_an_answer_before_it(sim: LLM) -> None:
    (answer,) = sim.generate("one two three four", SamplingParams(max_tokens=50, stop="three", ignore_eos=True))
    assert answer.text == "one two "
    assert (answer.outputs[0].finish_reason, answer.outputs[0].stop_reason) == ("stop", "three")


def test_one_bad_prompt_does_not_hurt_the_others(sim: LLM) -> None:
    answers = sim.generate([[5], [10**6], [2**40], [7] * 300, [6]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert [answer.outputs[0].finish_reason for answer in answers] == ["length", "error", "error", "error", "length"]
    assert answers[3].outputs[0].error is not None
    assert "maximum context length is 256 tokens" in answers[3].outputs[0].error


def test_nothing_is_left_behind(sim: LLM) -> None:
    sim.generate(["a b c"] * 9, SamplingParams(max_tokens=30, stop="b", n=2))
    assert sim._core.ledger.num_records == 0
    assert not sim._core.has_work
    sim._core.scheduler.check_invariants()
    assert sim._detok.num_states == 0


def test_an_interrupted_call_leaves_nothing_behind(sim: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    original, turns = sim._detok.process, iter(range(100))

    def interrupt(batches):
        if next(turns) == 3:
            raise KeyboardInterrupt
        return original(batches)

    monkeypatch.setattr(sim._detok, "process", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sim.generate(["a b c"] * 9, SamplingParams(max_tokens=50, ignore_eos=True))
    test_nothing_is_left_behind(sim)


@pytest.mark.parametrize("prompts", [5, None, ["a", 5], [[1, "2"]], [[1, True]], "\ud800", ["a", "b\udfff"]])
def test_what_is_no_prompt_is_refused_by_name(sim: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError) as caught:
        sim.generate(prompts)
    assert caught.value.param == "prompts"


@pytest.mark.parametrize(
    "given",
    [
        {"n": 0},
        {"max_tokens": -1},
        {"min_tokens": 9, "max_tokens": 8},
        {"top_k": -2},
        {"seed": 1 << 63},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"min_p": 7.0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -math.inf},
        {"repetition_penalty": 0.0},
    ],
)
def test_numbers_have_the_bounds_of_the_http_api(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert caught.value.param == next(iter(given))


def test_a_top_k_of_minus_one_is_none_at_all() -> None:
    assert SamplingParams(top_k=-1).to_wire(seed=1).top_k == 0


def test_wrong_use_is_said_in_one_line(sim: LLM) -> None:
    with pytest.raises(ConfigError, match=r"max.num.seq"):
        LLM("sim", max_num_sequences=3)
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        sim.generate(["x"], [SamplingParams(), SamplingParams()])
    with pytest.raises(RequestError, match="empty string"):
        SamplingParams(stop=["a", ""])
    with pytest.raises(AttributeError, match="no attribute 'Llama'"):
        nanoserve.Llama  # noqa: B018


def test_a_closed_one_says_so() -> None:
    llm = LLM("sim", max_num_seqs=4, max_model_len=256)
    llm.close()
    llm.close()
    for ask in (lambda: llm.generate("x"), lambda: llm.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(RequestError, match="closed"):
            ask()


def test_a_real_model_answers_alike_alone_and_in_company(real: LLM) -> None:
    prompts = ["The capital of France is", "Water boils at", "Once upon a time", "2 + 2 ="]
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    together = real.generate(prompts, greedy)
    for prompt, answer in zip(prompts, together, strict=True):
        (alone,) = real.generate(prompt, greedy)
        assert alone.outputs[0].token_ids == answer.outputs[0].token_ids
        shown = answer.outputs[0].token_ids[: -1 if answer.outputs[0].finish_reason == "stop" else None]
        assert answer.text == real.model.tokenizer.decode(shown)
    assert len({answer.text for answer in together}) == 4


def test_seeds_and_samples(real: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=7, n=3)
    first, again = real.generate(["Hello"] * 2, params)
    assert [output.text for output in first.outputs] == [output.text for output in again.outputs]
    assert len({output.text for output in first.outputs}) == 3


def test_chat_uses_the_template(real: LLM) -> None:
    (answer,) = real.chat(
        [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0.0, max_tokens=32)
    )
    assert answer.prompt is not None
    assert answer.prompt.endswith("<|im_start|>assistant\n")
    assert "Paris" in answer.text

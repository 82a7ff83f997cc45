"""The detokenizer's benchmarks run, and what they are run for holds."""

from __future__ import annotations

import json

import pytest

from nanoserve.bench import detok, detok_table
from nanoserve.config import ModelConfig, ServerConfig
from nanoserve.hub.resolve import prepare
from nanoserve.tokenizer import HFTokenizer, load_tokenizer
from tests.unit.detok_tokenizers import byte_level

pytestmark = pytest.mark.slow


def test_the_table_of_wrong_streams_sees_others_fail_and_ours_not() -> None:
    directory = prepare(ServerConfig(model=ModelConfig(model="sim", tokenizer="smollm2-135m")), lambda *_, **__: None)
    tokenizer = load_tokenizer(directory)
    assert isinstance(tokenizer, HFTokenizer)
    wrong = detok_table.count_wrong(tokenizer, num_strings=100)
    assert wrong["nanoserve"] == {"english": 0, "mixed": 0}
    assert wrong["naive per token"]["mixed"] > 90
    assert wrong["DecodeStream, as vLLM"]["mixed"] > 10  # a tail that is never flushed


def test_costs_are_measured_and_the_byte_decoder_is_the_cheap_one() -> None:
    seen = detok.measure(byte_level(), rounds=1)
    assert {"bytes_us_256", "window_us_256", "whole_bytes_us_256", "decode_stream_us"} <= seen.keys()
    assert seen["bytes_us_256"][0] * 2 < seen["window_us_256"][0]


def test_json_on_the_terminal_is_nothing_but_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(detok, "measure", lambda tokenizer: {"bytes_us_256": [0.2], "window_us_256": [0.8]})
    monkeypatch.setattr(detok, "measure_process", lambda *_: {"process_tokens_per_second": 7})
    monkeypatch.setattr(detok, "measure_vllm", lambda python, file: {"vllm_fast_us": [1.6]})
    assert detok.main(["--json", "-", "--vllm-python", "python"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bytes_us_256"] == 0.2 and said["vllm_fast_over_bytes"] == 8.0 and said["vllm_fast_over_window"] == 2.0

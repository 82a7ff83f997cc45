"""lm-eval's `local-completions`: log-likelihoods by echo and logprobs, equal to transformers' own; generation too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.config import ServerConfig
from nanoserve.hub.resolve import prepare
from tests.clients.conftest import library
from tests.e2e.harness import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of the data set libraries, by the dozen
]

QUESTIONS = [
    ("The capital of France is", [" Paris", " London", " a small fish"], 0),
    ("Two plus two is", [" five thousand", " four", " Monday"], 1),
    ("The opposite of hot is", [" cold", " wet paint", " seven"], 0),
    ("A week has seven", [" days", " legs", " 🔥🔥"], 0),
    ("She opened the door and", [" walked in", " in walked", " naïve café"], 0),
    ("Water freezes at", [" zero degrees", " degrees zero", " 日本"], 0),
]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def directory() -> Path:
    return prepare(ServerConfig(), lambda stage, part: None)


def evaluate(server: Server, directory: Path, tmp_path: Path, **config: Any) -> dict[str, Any]:
    """Runs lm-eval over the questions as a task of one file; its samples by document."""
    data = tmp_path / "questions.jsonl"
    rows = [{"question": question, "choices": choices, "answer": gold} for question, choices, gold in QUESTIONS]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path / "cache")
    task = library("lm_eval.api.task").ConfigurableTask(
        config={
            "task": "questions",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            **config,
        }
    )
    model = {
        "model": "smollm2-135m",
        "base_url": server.base_url + "/v1/completions",
        "tokenizer": str(directory),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_retries": 1,
        "max_length": 2048,
    }
    library("lm_eval.models")
    results: dict[str, Any] = library("lm_eval").simple_evaluate(
        model="local-completions",
        model_args=model,
        tasks=[task],
        task_manager=library("lm_eval.tasks").TaskManager(include_defaults=False),  # reading its own tasks takes 15 s
        batch_size=3,
        bootstrap_iters=0,
        log_samples=True,
    )
    return results


def reference_scores(directory: Path) -> list[list[tuple[float, bool]]]:
    """For each question and choice: its log-likelihood after the question, and whether greedy would say it."""
    transformers = library("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    scores = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the server's engine has the other core
    for question, choices, _ in QUESTIONS:
        row = []
        for choice in choices:
            ids = tokenizer(question + choice, add_special_tokens=False).input_ids
            start = len(tokenizer(question, add_special_tokens=False).input_ids)
            with torch.inference_mode():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            picked = [logprobs[at - 1, ids[at]].item() for at in range(start, len(ids))]
            greedy = all(logprobs[at - 1].argmax().item() == ids[at] for at in range(start, len(ids)))
            row.append((sum(picked), greedy))
        scores.append(row)
    torch.set_num_threads(threads)
    return scores


def test_loglikelihoods_are_those_of_transformers(server: Server, directory: Path, tmp_path: Path) -> None:
    results = evaluate(
        server, directory, tmp_path,
        output_type="multiple_choice", doc_to_choice="choices", doc_to_target="answer", target_delimiter="",
        metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    samples = sorted(results["samples"]["questions"], key=lambda sample: sample["doc_id"])
    expected = reference_scores(directory)
    assert len(samples) == len(expected) == len(QUESTIONS)
    for sample, row in zip(samples, expected, strict=True):
        got = [(float(score), str(greedy) == "True") for score, greedy in sample["filtered_resps"]]
        assert [greedy for _, greedy in got] == [greedy for _, greedy in row]
        for (score, _), (right, _) in zip(got, row, strict=True):
            assert abs(score - right) < TOLERANCE
    best = [max(range(3), key=lambda choice, row=row: row[choice][0]) for row in expected]  # type: ignore[misc]
    accuracy = sum(choice == gold for choice, (_, _, gold) in zip(best, QUESTIONS, strict=True)) / len(QUESTIONS)
    assert results["results"]["questions"]["acc,none"] == pytest.approx(accuracy)


def test_generation_stops_where_asked(server: Server, directory: Path, tmp_path: Path) -> None:
    results = evaluate(
        server, directory, tmp_path,
        output_type="generate_until", doc_to_target="{{choices[answer]}}", metric_list=[{"metric": "exact_match"}],
        generation_kwargs={"until": ["."], "max_gen_toks": 8, "do_sample": False},
    )  # fmt: skip
    for sample in results["samples"]["questions"]:
        question = sample["doc"]["question"]
        body = {"prompt": question, "max_tokens": 8, "temperature": 0, "stop": ["."]}
        assert sample["filtered_resps"] == [server.post("/v1/completions", body)[1]["choices"][0]["text"]]

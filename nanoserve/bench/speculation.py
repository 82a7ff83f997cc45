"""What prompt lookup speculation gains and costs on a real model: `python -m nanoserve.bench.speculation`.

Two engines in one process, with drafts and without, answer the same prompts in turns, so that a machine that changes
from minute to minute meets both alike; each turn's ratio is of two runs side by side. The answers must be equal, which
is checked in every round. Cases: `copy` (the text stands in the prompt once and begins again), `text` (a story goes
on), `random` (random ids, where nothing can be looked up), greedy or sampled. Medians with the range over the rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from random import Random

from nanoserve import bench
from nanoserve.bench.stats import spread
from nanoserve.bench.texts import ALICE
from nanoserve.bench.variants import QUANTIZATIONS
from nanoserve.ipc.messages import EngineStats
from nanoserve.offline import LLM, RequestOutput, SamplingParams

Clock = Callable[[], float]  # seconds
Case = tuple[Callable[[LLM, Random], list[int]], float]  # makes a prompt; temperature


def copy_prompt(llm: LLM, random: Random) -> list[int]:
    """A passage, and then its beginning."""
    ids = llm.model.tokenizer.encode_batch([ALICE], add_special_tokens=False)[0]
    start = random.randrange(len(ids) - 200)
    return ids[start : start + 200] + ids[start : start + 20]


def text_prompt(llm: LLM, random: Random) -> list[int]:
    ids = llm.model.tokenizer.encode_batch([ALICE], add_special_tokens=False)[0]
    start = random.randrange(len(ids) - 200)
    return ids[start : start + 200]


def random_prompt(llm: LLM, random: Random) -> list[int]:
    return [random.randrange(1000, 40_000) for _ in range(200)]


CASES: dict[str, Case] = {
    "copy-greedy": (copy_prompt, 0.0),
    "text-greedy": (text_prompt, 0.0),
    "text-sampled": (text_prompt, 0.8),
    "random-greedy": (random_prompt, 0.0),
    "random-sampled": (random_prompt, 1.0),
}


def answers(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, clock: Clock
) -> tuple[list[list[int]], float, EngineStats]:
    """Ids of the answers, output tokens a second (prompts included), and the engine's totals afterwards."""
    began = clock()
    outputs: list[RequestOutput] = llm.generate(list(prompts), params)
    seconds = clock() - began
    ids = [output.outputs[0].token_ids for output in outputs]
    return ids, sum(map(len, ids)) / seconds, llm.stats()


def run_case(name: str, engines: dict[str, LLM], streams: int, max_tokens: int, rounds: int, clock: Clock) -> str:
    """One line of the report. The first turn only warms up."""
    make_prompt, temperature = CASES[name]
    rates: dict[str, list[float]] = {mode: [] for mode in engines}
    begun = {mode: llm.stats() for mode, llm in engines.items()}
    for turn in range(rounds + 1):
        random = Random(turn)
        told = []
        for mode in (*engines,) if turn % 2 else (*reversed(engines),):
            llm = engines[mode]
            random.seed(turn)
            prompts = [make_prompt(llm, random) for _ in range(streams)]
            params = SamplingParams(temperature=temperature, seed=turn, max_tokens=max_tokens, ignore_eos=True)
            ids, rate, stats = answers(llm, prompts, params, clock)
            told.append(ids)
            if turn:
                rates[mode].append(rate)
            else:
                begun[mode] = stats
        if told[0] != told[1]:
            raise AssertionError(f"{name}, {streams} streams: drafts changed an answer")
    steps = {mode: llm.stats().steps - begun[mode].steps for mode, llm in engines.items()}
    drafts = engines["drafts"].stats().draft_tokens - begun["drafts"].draft_tokens
    right = engines["drafts"].stats().accepted_draft_tokens - begun["drafts"].accepted_draft_tokens
    ratios = [new / old for new, old in zip(rates["drafts"], rates["plain"], strict=True)]
    return (
        f"{name:16s} {streams:3d} streams   plain {spread(rates['plain']):24s} drafts {spread(rates['drafts']):24s} "
        f"tok/s   ratio {spread(ratios, 2):20s} steps x{steps['drafts'] / steps['plain']:.2f}   "
        f"right {right} of {drafts}\n"
    )


def main() -> None:
    parser = bench.parser("speculation", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafts", type=int, default=4, help="--speculative-num-tokens")
    parser.add_argument("--ngram-min", type=int, default=3, help="--speculative-ngram-min")
    parser.add_argument("--threads", type=int, default=0, help="--engine-threads")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="auto")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cpu-time", action="store_true", help="the calling thread's CPU time (with --threads 1, on a busy machine)"
    )
    args = parser.parse_args()
    clock = time.thread_time if args.cpu_time else time.perf_counter
    common = {"engine_threads": args.threads, "quantization": args.quantization, "max_model_len": 2048}
    plain = LLM(args.model, speculative_num_tokens=0, **common)
    drafts = LLM(args.model, speculative_num_tokens=args.drafts, speculative_ngram_min=args.ngram_min, **common)
    for streams in args.streams:
        for name in args.case:
            engines = {"plain": plain, "drafts": drafts}
            sys.stdout.write(run_case(name, engines, streams, args.max_tokens, args.rounds, clock))
            sys.stdout.flush()


if __name__ == "__main__":
    main()

"""How close the CPU engine is to float32: `python -m nanoserve.bench.accuracy`.

The torch backend in float32 is the truth; torch in bfloat16 shows what that type costs anyway. Logits over a text in
the public domain: relative and largest error, share of equal argmax, KL divergence, loss. Then greedy answers to many
prompts (pieces of the text): share of tokens before the first that differs from float32's.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import numpy as np
import torch
from tokenizers import Tokenizer

from nanoserve import bench
from nanoserve.bench.texts import ALICE
from nanoserve.bench.variants import HELP, QUANTIZATIONS, TORCH, variant
from nanoserve.config import ServerConfig
from nanoserve.hub.model_files import ModelFiles, read_model_files
from nanoserve.hub.resolve import prepare
from nanoserve.runner.backend import ForwardBackend, ForwardBatch
from nanoserve.runner.kv_cache import choose_kv_dtype
from nanoserve.runner.loader import load_weights
from nanoserve.runner.models import read_model_spec
from nanoserve.runner.models.spec import ModelSpec
from nanoserve.runner.native.backend import NativeOptions
from nanoserve.runner.native.open import open_native
from nanoserve.runner.torch_backend import TorchBackend

_BLOCK = 16


def _open(name: str, files: ModelFiles, spec: ModelSpec) -> ForwardBackend:
    """`name` is a quantization of the engine, or torch-float32, torch-bfloat16; ":int8" behind it: an int8 KV cache."""
    name, _, kv_dtype = name.partition(":")

    def read(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return load_weights(files.weight_files, spec, dtype, lambda part: None)

    if name.startswith("torch-"):
        dtype = torch.float32 if name.endswith("32") else torch.bfloat16
        kv = choose_kv_dtype(kv_dtype or "auto", dtype)
        return TorchBackend(spec, read(dtype), block_size=_BLOCK, dtype=dtype, device=torch.device("cpu"), kv_dtype=kv)
    options = NativeOptions(quantization=name, kv_dtype=choose_kv_dtype(kv_dtype or "auto", torch.bfloat16))
    return open_native(files, spec, options, read, lambda stage, part: None)


def _batch(rows: list[tuple[int, list[int], int]], width: int, *, last_only: bool = False) -> ForwardBatch:
    """Rows (block table row, ids so far, how many of them are new); logits of all new tokens, or of each row's last."""
    news = [count for _, _, count in rows]
    return ForwardBatch(
        token_ids=np.array([token for _, ids, count in rows for token in ids[-count:]], np.int32),
        positions=np.array([p for _, ids, count in rows for p in range(len(ids) - count, len(ids))], np.int32),
        row_starts=np.cumsum([0, *news]).astype(np.int32),
        context_lens=np.array([len(ids) for _, ids, _ in rows], np.int32),
        block_tables=np.array([[row * width + i for i in range(width)] for row, _, _ in rows], np.int32),
        logit_tokens=(np.cumsum(news) - 1 if last_only else np.arange(sum(news))).astype(np.int32),
    )


def _greedy(backend: ForwardBackend, prompts: list[list[int]], length: int, width: int) -> np.ndarray:
    """Answers [prompts, length], all prompts in one batch."""
    texts = [list(prompt) for prompt in prompts]
    batch = _batch([(i, ids, len(ids)) for i, ids in enumerate(texts)], width, last_only=True)
    answers = [backend.forward(batch).argmax(-1).tolist()]
    while len(answers) < length:
        for ids, token in zip(texts, answers[-1], strict=True):
            ids.append(token)
        logits = backend.forward(_batch([(i, ids, 1) for i, ids in enumerate(texts)], width))
        answers.append(logits.argmax(-1).tolist())
    return np.array(answers).T


def _report(name: str, logits: torch.Tensor, exact: torch.Tensor, ids: list[int], same_tokens: float) -> None:
    ours, truth = torch.log_softmax(logits, -1), torch.log_softmax(exact, -1)
    target = torch.tensor(ids[1:])
    loss, least = (float(torch.nn.functional.nll_loss(scores[:-1], target)) for scores in (ours, truth))
    sys.stdout.write(
        f"| {name} | {float((logits - exact).norm() / exact.norm()):.4f} | {float((logits - exact).abs().max()):.3f} "
        f"| {float((logits.argmax(-1) == exact.argmax(-1)).float().mean()):.3f} "
        f"| {float((truth.exp() * (truth - ours)).sum(-1).mean()):.5f} | {loss:.4f} ({(loss - least) / least:+.2%}) "
        f"| {same_tokens:.3f} |\n"
    )
    sys.stdout.flush()


def _at_least_two(text: str) -> int:
    """An argparse type: a token's loss is told by the one before it."""
    if bench.positive(text) < 2:
        raise argparse.ArgumentTypeError("a text of one token has no next one to compare")
    return int(text)


def main() -> None:
    parser = bench.parser("accuracy", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--variants",
        nargs="+",
        type=variant(*TORCH),
        default=["torch-bfloat16", *QUANTIZATIONS],
        metavar="NAME",
        help=f"{', '.join((*TORCH, *QUANTIZATIONS))}; {HELP}",
    )
    parser.add_argument("--tokens", type=_at_least_two, default=480, help="length of the text")
    parser.add_argument("--prompts", type=bench.positive, default=50)
    parser.add_argument("--answer", type=bench.positive, default=16, help="tokens of each greedy answer")
    args = parser.parse_args()
    config = ServerConfig()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, model=args.model))
    files = read_model_files(prepare(config, lambda stage, part: None))
    spec = read_model_spec(files.config)
    ids = Tokenizer.from_file(str(files.path / "tokenizer.json")).encode(ALICE).ids[: args.tokens]
    stride = max(1, (len(ids) - 24) // args.prompts)
    prompts = [ids[i * stride : i * stride + 24] for i in range(args.prompts)]
    width = -(-max(len(ids), 24 + args.answer) // _BLOCK)
    sys.stdout.write(
        "| | relative error | largest | same argmax | KL | loss | greedy tokens |\n|---|---|---|---|---|---|---|\n"
    )
    exact = answers = None
    for name in ["torch-float32", *args.variants]:
        backend = _open(name, files, spec)
        backend.allocate_kv(width * args.prompts)
        logits = backend.forward(_batch([(0, ids, len(ids))], width)).float().clone()
        greedy = _greedy(backend, prompts, args.answer, width)
        if exact is None or answers is None:
            exact, answers = logits, greedy
        same = np.minimum.accumulate(greedy == answers, axis=1).mean()
        _report(name, logits, exact, ids, float(same))


if __name__ == "__main__":
    main()

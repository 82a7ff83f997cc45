"""The C++ engine on real weights: SmolLM2-135M from its GGUF package, against the float32 oracle."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from nanoserve.bench.texts import ALICE
from nanoserve.config import ServerConfig
from nanoserve.errors import ConfigError, StartupError
from nanoserve.hub.model_files import ModelFiles, read_model_files
from nanoserve.hub.resolve import prepare
from nanoserve.runner.backend import ForwardBackend, ForwardBatch
from nanoserve.runner.loader import load_weights
from nanoserve.runner.models import read_model_spec
from nanoserve.runner.models.spec import ModelSpec
from nanoserve.runner.native.backend import NativeBackend, NativeOptions
from nanoserve.runner.native.build import missing_cpu_features
from nanoserve.runner.native.open import open_native
from nanoserve.runner.torch_backend import TorchBackend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing_cpu_features()), reason="the CPU lacks what the engine needs"),
]
_TOKENS = 256


@dataclass
class Model:
    files: ModelFiles
    spec: ModelSpec
    ids: np.ndarray
    exact: torch.Tensor  # float32 logits of every position

    def read(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return load_weights(self.files.weight_files, self.spec, dtype, lambda part: None)

    def open(self, quantization: str) -> NativeBackend:
        options = NativeOptions(quantization=quantization, threads=2)
        backend = open_native(self.files, self.spec, options, self.read, lambda stage, part: None)
        backend.allocate_kv(32)
        return backend


def _quiet(stage: str, part: float) -> None:
    """Nobody looks at the progress."""


def _run(backend: ForwardBackend, ids: np.ndarray, start: int, stop: int) -> torch.Tensor:
    batch = ForwardBatch(
        token_ids=ids[start:stop],
        positions=np.arange(start, stop, dtype=np.int32),
        row_starts=np.array([0, stop - start], np.int32),
        context_lens=np.array([stop], np.int32),
        block_tables=np.arange(31, -1, -1, dtype=np.int32)[None],
        logit_tokens=np.arange(stop - start, dtype=np.int32),
    )
    return backend.forward(batch).clone()


@pytest.fixture(scope="module")
def model() -> Model:
    try:
        files = read_model_files(prepare(ServerConfig(), lambda stage, part: None))
    except StartupError as error:
        pytest.skip(str(error))
    spec = read_model_spec(files.config)
    ids = np.array(Tokenizer.from_file(str(files.path / "tokenizer.json")).encode(ALICE).ids[:_TOKENS], np.int32)
    made = Model(files, spec, ids, torch.empty(0))
    device = torch.device("cpu")
    oracle = TorchBackend(spec, made.read(torch.float32), block_size=16, dtype=torch.float32, device=device)
    oracle.allocate_kv(32)
    made.exact = _run(oracle, ids, 0, _TOKENS)
    return made


def _agreement(model: Model, logits: torch.Tensor) -> tuple[float, float, float]:
    """Share of equal argmax, KL divergence from the oracle, difference of the mean log-likelihood of the text."""
    ours, exact = torch.log_softmax(logits, -1), torch.log_softmax(model.exact, -1)
    same = (logits.argmax(-1) == model.exact.argmax(-1)).float().mean()
    divergence = (exact.exp() * (exact - ours)).sum(-1).mean()
    target = torch.from_numpy(model.ids[1:].astype(np.int64))
    loss, least = (torch.nn.functional.nll_loss(scores[:-1], target) for scores in (ours, exact))
    return float(same), float(divergence), float((loss - least).abs() / least)


@pytest.mark.parametrize(
    ("quantization", "least_same", "most_divergence"),
    [("none", 0.98, 0.001), ("int8", 0.95, 0.004), ("int8-dynamic", 0.96, 0.003)],
)
def test_agrees_with_float32(model: Model, quantization: str, least_same: float, most_divergence: float) -> None:
    """Torch's own bfloat16 has a divergence of about 0.001 here; the 8-bit forms must agree in 95 % of the argmaxes."""
    same, divergence, loss = _agreement(model, _run(model.open(quantization), model.ids, 0, _TOKENS))
    assert same >= least_same and divergence <= most_divergence and loss <= 0.002


def test_gguf_blocks_give_the_logits_of_bfloat16(model: Model) -> None:
    """Bit for bit, with many rows and with one; "auto" has both forms and must not show which one it took."""
    plain, blocks, both = (model.open(name) for name in ("none", "gguf", "auto"))
    expected = _run(plain, model.ids, 0, 200)
    for backend in (blocks, both):
        assert torch.equal(_run(backend, model.ids, 0, 190), expected[:190])
        for position in range(190, 193):
            assert torch.equal(_run(backend, model.ids, position, position + 1)[0], expected[position])
        assert torch.equal(_run(backend, model.ids, 193, 200), expected[193:])
    assert blocks.weights_bytes < 0.5 * plain.weights_bytes < 0.75 * both.weights_bytes


def test_weights_that_are_not_the_files_own_take_no_blocks_from_it(model: Model) -> None:
    """Dummy weights: panels of the real model beside them would be taken where rows are few."""
    both, plain = (
        open_native(
            model.files, model.spec, NativeOptions(quantization=name, threads=2), model.read, _quiet, has_blocks=False
        )
        for name in ("auto", "none")
    )
    assert both.weights_bytes == plain.weights_bytes
    with pytest.raises(ConfigError, match="dummy weights have no blocks"):
        options = NativeOptions(quantization="gguf", threads=2)
        open_native(model.files, model.spec, options, model.read, _quiet, has_blocks=False)


@pytest.mark.parametrize("quantization", ["gguf", "int8-dynamic"])
def test_a_model_whose_file_is_gone_is_not_served_with_other_weights(
    model: Model, quantization: str, tmp_path: Path
) -> None:
    """Rounded values instead of blocks would be other answers under the same name and fingerprint."""
    (tmp_path / "source.json").write_text(json.dumps({"parts": [str(tmp_path / "gone.gguf")]}))
    moved = Model(dataclasses.replace(model.files, path=tmp_path), model.spec, model.ids, model.exact)
    with pytest.raises(ConfigError, match=f"--quantization {quantization}.* is gone"):
        moved.open(quantization)

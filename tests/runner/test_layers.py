"""The shared layers: equal to torch's own where torch has them, and row by row, to the last bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nanoserve.runner.layers import GatedMLP, RMSNorm, Rotary, rotate
from nanoserve.runner.models.spec import RopeSpec

pytestmark = pytest.mark.slow


@pytest.fixture(params=[1, 2, 3], autouse=True)
def threads(request):
    """Torch splits work over threads, and the elements at the seams may take another path."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def make_mlp(activation: str, size: int = 75) -> GatedMLP:
    """gate and up are the input's own halves, so that only the activation is under test."""
    return GatedMLP(torch.eye(2 * size), torch.cat((torch.eye(size), torch.zeros(size, size))), activation)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_are_torchs(activation):
    x = torch.randn(50, 150) * 6
    gate, up = x.chunk(2, dim=-1)
    expected = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    assert torch.allclose(make_mlp(activation)(x)[:, :75], expected * up, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_do_not_depend_on_the_number_of_rows(activation):
    """The product with unit matrices is exact, so a difference is the activation's."""
    x = torch.randn(700, 150) * 3
    mlp = make_mlp(activation)
    whole = mlp(x)
    for count in (1, 2, 5, 8, 31, 229, 479, 485, 699):
        assert torch.equal(mlp(x[:count]), whole[:count]), count


def test_norm_and_rotation_do_not_depend_on_the_number_of_rows():
    x = torch.randn(700, 6, 18)
    norm = RMSNorm(torch.randn(18), 1e-6, 1.0)
    rotary = Rotary(RopeSpec(theta=10000.0), 18, torch.device("cpu"))
    positions = torch.randint(0, 8000, (700,))
    whole = rotate(norm(x), rotary.angles(positions))
    for count in (1, 2, 5, 8, 31, 229, 479, 699):
        assert torch.equal(rotate(norm(x[:count]), rotary.angles(positions[:count])), whole[:count]), count


def test_rotation_keeps_lengths_and_turns_by_differences():
    """The scores of a pair depend on the distance of its positions only."""
    rotary = Rotary(RopeSpec(theta=10000.0), 16, torch.device("cpu"))
    query, key = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(query_position: int, key_position: int) -> float:
        turned = [
            rotate(x, rotary.angles(torch.tensor([position])))
            for x, position in ((query, query_position), (key, key_position))
        ]
        assert turned[0].norm() == pytest.approx(float(query.norm()), rel=1e-5)
        return float((turned[0] * turned[1]).sum())

    assert score(10, 3) == pytest.approx(score(107, 100), abs=1e-4)
    assert score(10, 3) != pytest.approx(score(10, 4), abs=1e-3)

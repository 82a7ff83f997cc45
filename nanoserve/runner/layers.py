"""The arithmetic that all families share: RMSNorm, rotary embedding, gated MLP. Plain torch, any device.

Used by `decoder`. Norms and rotations are computed in float32 whatever the compute type is.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from nanoserve.runner.models.spec import RopeSpec


class RMSNorm:
    """x / rms(x) * (offset + weight) over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, weight: torch.Tensor, eps: float, offset: float) -> None:
        self._weight = weight.float() + offset
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self._eps)
        return (wide * scale * self._weight).to(x.dtype)


class Rotary:
    """Rotary embedding in the "half" layout: dimension i is paired with i + head_dim/2."""

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._frequencies = torch.tensor(rope.inverse_frequencies(head_dim), dtype=torch.float32, device=device)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, head_dim/2] of positions [T]; computed once per step."""
        angle = positions.to(torch.float32)[:, None, None] * self._frequencies
        return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x [T, heads, head_dim] turned by its position's angles."""
    cos, sin = angles
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class GatedMLP:
    """down(activation(gate(x)) * up(x)); gate and up are one matrix."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: str) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self._gate_up).float().chunk(2, dim=-1)
        gate = _gelu_tanh(gate) if self._activation == "gelu_tanh" else _silu(gate)
        return F.linear((gate * up).to(x.dtype), self._down)

    def matrices(self) -> list[torch.Tensor]:
        return [self._gate_up, self._down]


# F.silu and F.gelu take a scalar path, with other last bits, for the elements that do not fill a vector; which
# elements these are depends on the batch. exp and tanh do not (tested), so the activations are spelled out.


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))

"""Tokens of SmolLM2's vocabulary with their texts, and the way to let a model say nothing else."""

from __future__ import annotations

from typing import Any

YES, TWO, DAY, SEMICOLON, AB, SPACES, TABS = 9805, 827, 1194, 8544, 369, 289, 1656
FIRE = (10813, 238, 115)  # 🔥 is F0 9F, 94, A5
E2, FILE_SEP = 173, 5


def force(*ids: int) -> dict[str, Any]:
    """Request fields: only these tokens can come out."""
    return {"logit_bias": {str(token_id): 100 for token_id in ids}}

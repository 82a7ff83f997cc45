"""nanoserve: an LLM server in three small processes. See README.md for the tree and a reading order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoserve.offline import LLM, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Offline use is imported on demand: every process imports this package, and only one of them needs torch."""
    if name in ("LLM", "SamplingParams"):
        from nanoserve import offline

        return getattr(offline, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

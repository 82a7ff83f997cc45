"""Models of the Hugging Face hub: the snapshot in its local cache, or a download.

Called by `hub.resolve`. `cached_snapshot` only looks at the disk and imports nothing; `download` imports
huggingface_hub, which brings the settings people know (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoserve.errors import StartupError

HUB_ID = re.compile(r"(?![.-])[\w.-]+/(?![.-])[\w.-]+")  # not ./directory

_TOKENIZER_PATTERNS = ("tokenizer*", "tekken*.json", "vocab*", "merges.txt", "special_tokens_map.json",
                       "added_tokens.json", "chat_template*", "config.json", "generation_config.json")  # fmt: skip
_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
# Whole copies of the weights in other forms, which some repositories carry beside the standard one.
_IGNORED = ("original/*", "consolidated*.safetensors", "*/*")


def cached_snapshot(repo: str, revision: str) -> Path | None:
    """The snapshot of a branch, tag or commit in the hub's local cache, None when there is none; it may be partial.

    A branch is not compared with the hub: once downloaded, a model stays as it is until its cache is removed or
    another --revision is asked for, so restarts are quick and serve the same weights.
    """
    folder = _hub_cache() / f"models--{repo.replace('/', '--')}"
    revision = revision or "main"
    try:
        commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = revision
    snapshot = folder / "snapshots" / commit
    return snapshot if re.fullmatch(r"[0-9a-f]{40}", commit) and snapshot.is_dir() else None


def download(repo: str, revision: str, progress: Callable[[float], None], *, weights: bool) -> Path:
    """Downloads what is missing of the snapshot and returns its directory; `progress` gets the done part, 0..1.

    Raises StartupError, one line, when the hub cannot be reached, refuses, or has no such model.
    """
    from huggingface_hub import errors, snapshot_download

    patterns = [*_TOKENIZER_PATTERNS, *(_WEIGHT_PATTERNS if weights else ())]
    try:
        path = snapshot_download(
            repo,
            revision=revision or None,
            allow_patterns=patterns,
            ignore_patterns=list(_IGNORED),
            tqdm_class=_progress_class(progress),
        )
    except errors.GatedRepoError as exc:
        raise StartupError(f"{repo} is gated: accept its terms on the hub and set HF_TOKEN") from exc
    except errors.RepositoryNotFoundError as exc:
        raise StartupError(f"no model {repo} on the hub, or HF_TOKEN may not read it") from exc
    except (errors.RevisionNotFoundError, errors.HFValidationError) as exc:
        raise StartupError(f"{repo} has no revision {revision!r} on the hub") from exc
    except errors.LocalEntryNotFoundError as exc:
        offline = isinstance(exc.__cause__, errors.OfflineModeIsEnabled)
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        raise StartupError(f"{repo} is not in the local hub cache, and {why}") from exc
    except Exception as exc:  # any transport's or disk's own error, in the middle of a download
        text = " ".join(str(exc).split())[:200]
        raise StartupError(f"cannot download {repo}: {text or type(exc).__name__}") from exc
    return Path(path)


def _hub_cache() -> Path:
    """Where huggingface_hub keeps its cache, by its own rules."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "huggingface" / "hub"


def _progress_class(report: Callable[[float], None]) -> type[Any]:
    """A silent stand-in for the progress bars of huggingface_hub, which counts the bytes written to disk."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        best = 0.0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts = kwargs.get("unit") == "B"  # not the bar that counts files
            self.done = 0.0
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.done += n or 0
            if self.counts and self.total:
                # The total grows while files are opened, so the part done could seem to shrink.
                Bar.best = max(Bar.best, min(1.0, self.done / self.total))
                report(Bar.best)
            return None

    return Bar

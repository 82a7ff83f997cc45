"""Names of weights and KV caches on command lines of benchmarks: a --quantization, and `:int8` behind it or not."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from nanoserve.cli import options

_CHOICES = {option.name: tuple(option.metadata["choices"]) for option in options()}
QUANTIZATIONS: tuple[str, ...] = _CHOICES["quantization"]
KV_DTYPES: tuple[str, ...] = _CHOICES["kv_cache_dtype"]
TORCH = ("torch-float32", "torch-bfloat16")  # the plain torch backend, in accuracy
HELP = "with :int8 behind it: an int8 KV cache"


def variant(*more: str) -> Callable[[str], str]:
    """An argparse type: NAME or NAME:KV, where NAME is a --quantization of the server or one of `more`."""
    names = (*more, *QUANTIZATIONS)

    def check(text: str) -> str:
        name, colon, kv_dtype = text.partition(":")
        if name not in names or (colon and kv_dtype not in KV_DTYPES):
            known = f"{', '.join(names)}, each also with {' or '.join(f':{kind}' for kind in KV_DTYPES)} behind it"
            raise argparse.ArgumentTypeError(f"{text!r} is none of {known}")
        return text

    return check

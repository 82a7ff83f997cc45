"""The seam between the model runner and the arithmetic: one ragged forward over paged KV memory.

A backend owns the weights in the layout it likes and the KV blocks. The plain torch backend is the oracle and runs
on any device; faster ones replace it whole, never in part, and must agree with it in tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from nanoserve.runner.sampler import SampleRows

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class ForwardBatch:
    """R rows with T tokens in all; prefill chunks and decodes lie side by side.

    Row r owns tokens row_starts[r] .. row_starts[r+1]-1 of the flat arrays; they are the newest of its
    context_lens[r] tokens, and their keys and values are written to the row's blocks before attention reads them.
    """

    token_ids: Int32  # [T]
    positions: Int32  # [T]
    row_starts: Int32  # [R+1]
    context_lens: Int32  # [R] tokens in the KV cache after this step
    block_tables: Int32  # [R, max_blocks]; entries past a row's context are ignored
    logit_tokens: Int32  # [S] flat token indices whose logits are asked for, ascending


class ForwardBackend(Protocol):
    batch_invariant: bool  # a row's logits are bit-equal alone and in any batch
    name: str

    @property
    def weights_bytes(self) -> int:
        """Memory that the weights take, in the form the backend keeps them."""
        ...

    def kv_bytes_per_block(self) -> int: ...

    def allocate_kv(self, num_blocks: int) -> None:
        """Makes the KV memory; called once, before the first forward."""
        ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Runs one step. Returns float32 logits [S, vocab_size] on the backend's device, valid until the next call."""
        ...

    def forward_greedy(self, batch: ForwardBatch) -> Int32:
        """Runs one step of which only the likeliest id of each logit row is wanted, the lowest of equals.

        Returns [S]; -1 for a row whose largest logit is not a finite number.
        """
        ...

    def forward_drawn(self, batch: ForwardBatch, rows: SampleRows) -> tuple[npt.NDArray[np.integer], torch.Tensor]:
        """Runs one step and draws a token for each of `rows` from its logits, as `choose` does.

        Returns the tokens, and the logits as `forward` does.
        """
        ...

    def close(self) -> None:
        """Ends its threads and gives the KV memory back. The backend is not used afterwards."""
        ...

    def choose(self, logits: torch.Tensor, rows: SampleRows) -> npt.NDArray[np.integer]:
        """Draws a token for each row from logits [N, vocab_size], as `sampler.choose` does; -1 where there is none."""
        ...

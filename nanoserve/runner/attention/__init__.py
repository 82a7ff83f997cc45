"""Attention over paged keys and values.

`paged.TorchPagedAttention` is the plain torch path: the oracle that other kernels are tested against, and the
fallback on any device. `interface` is what the decoder needs of an implementation.
"""

"""The hash of sketches, dithers and their seeds; and a fingerprint of a tensor, which detects
changes without keeping a copy."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# Coprime, so no two places within their product have the same weights in both sums.
WIDTHS = (1024, 1021)
REST_SHIFT = 17
MASK = 0xFFFFFFFF


def fmix32(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer, a bijection, on an int64 tensor that holds uint32 values."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)


def take_fingerprint(
    x: Tensor, sums: Tensor, before: Tensor, changed: Tensor | None = None
) -> None:
    """Take a fingerprint, or compare it with an earlier one.

    Args:
        x: ``[n]``, contiguous, of 2 or 4 bytes an element.
        sums: ``[3]`` int64 zeros, which a kernel uses, and leaves as zeros.
        before: ``[2]`` int64: where to write :func:`fingerprint`, or the earlier one.
        changed: boolean, ``[1]``: becomes true if they differ.
    """
    now = fingerprint(x)
    if changed is None:
        before.copy_(now)
    else:
        changed.logical_or_((now != before).any())


def fingerprint(values: Tensor) -> Tensor:
    """Two weighted sums over the bits of ``values`` ``[n]``, 8 bytes at a time: int64 ``[2]``,
    modulo ``2**64``.

    The weights are odd and depend on the place modulo 1024 and 1021. A change of one word changes
    both sums. If many words change or move, at least one sum changes almost certainly. This does
    not protect against deliberate changes.

    On a CPU, sums of columns take a tenth of the time of one weight per element.
    """
    lanes = 8 // values.element_size()
    if values.storage_offset() % lanes:  # a shard in FSDP's larger buffer
        values = values.clone()
    whole = values.numel() // lanes * lanes
    words = values[:whole].view(torch.int64)
    rest = values[whole:].view({2: torch.int16, 4: torch.int32}[values.element_size()])
    # Past the second width's columns the weights are zero, whatever the memory holds.
    columns = torch.empty(2, WIDTHS[0], dtype=torch.int64, device=values.device)
    for i, width in enumerate(WIDTHS):
        rows = words.numel() // width
        sums_of, last = columns[i, :width], words[rows * width :]
        torch.sum(words[: rows * width].view(rows, width), 0, out=sums_of)
        if last.numel():
            sums_of[: last.numel()].add_(last)  # `+=` would also copy the sum to itself
    sums = (columns * _weights(values.device)).sum(1)
    if rest.numel():
        # Each of the last few elements gets its own word.
        places = torch.arange(1, 2 * rest.numel() + 1, 2, device=values.device)
        sums += ((rest.to(torch.int64) << REST_SHIFT) * places).sum()
    return sums


@cache
def _weights(device: torch.device) -> Tensor:
    """On a GPU every small tensor that is made in a step is a launch."""
    with torch.inference_mode(False):
        weights = torch.zeros(2, WIDTHS[0], dtype=torch.int64, device=device)
        for i, width in enumerate(WIDTHS):
            weights[i, :width] = torch.arange(1, 2 * width + 1, 2, device=device)
        return weights

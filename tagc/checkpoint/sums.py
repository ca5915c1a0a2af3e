"""Sums over the bits of a tensor, which its state's digest is made of.

They are taken where the tensor lies, so a GPU's residuals are not hashed by the host.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

WIDTH = 1 << 14
"""Words of a row."""
# So that products take 32 MiB at most.
_ROWS = 256


def sums_of(tensor: Tensor) -> Tensor:
    """Two sums for every row of ``WIDTH`` 32-bit words of a tensor's elements in order: int64
    ``[rows, 2]`` on the tensor's device, the same on any device.

    A sum is ``x[0] * w[0] + x[1] * w[1] + ...`` modulo ``2**64``, for words ``x``, and weights
    ``w`` that are as good as random. For a given change of a row, at most one in ``2**33`` choices
    of weights leaves a sum as it was, and one in ``2**66`` leaves both: the family MULTILINEAR
    of Lemire and Kaser (Strongly universal string hashing is fast, 2014). The weights are public,
    so this detects damage, not changes on purpose.
    """
    numel = tensor.numel()
    # A single element counts as contiguous with any stride, but such a stride allows no view.
    content = tensor.detach().contiguous().as_strided((numel,), (1,)).view(torch.uint8)
    if content.storage_offset() % 4:
        content = content.clone()
    whole = content.numel() // (4 * WIDTH) * (4 * WIDTH)
    parts = [content[:whole].view(torch.int32).view(-1, WIDTH)]
    if whole < content.numel():
        last = functional.pad(content[whole:], (0, -content.numel() % 4))
        parts.append(last.view(torch.int32)[None])
    add_up = _on_host if tensor.device.type == "cpu" else on_device
    return torch.cat([add_up(part) for part in parts])


def on_device(rows: Tensor) -> Tensor:
    """The sums of ``rows`` ``[n, words]`` int32: int64 ``[n, 2]``."""
    weights = _weights(rows.device)[:, : rows.shape[1]]
    sums = torch.empty(len(rows), 2, dtype=torch.int64, device=rows.device)
    for first in range(0, len(rows), _ROWS):
        some = rows[first : first + _ROWS]
        for i in range(2):
            sums[first : first + _ROWS, i] = (some * weights[i]).sum(1)
    return sums


def _on_host(rows: Tensor) -> Tensor:
    from tagc.checkpoint.host_sums import add_up  # imports numba

    sums = torch.empty(len(rows), 2, dtype=torch.int64, device="cpu")
    add_up(rows.numpy(), _weights(rows.device).numpy(), sums.numpy())
    return sums


@cache
def _weights(device: torch.device) -> Tensor:
    """int64 ``[2, WIDTH]``: the first outputs of SplitMix64 (Steele, Lea and Flood, Fast splittable
    pseudorandom number generators, 2014) from seed 0."""
    z = np.arange(1, 2 * WIDTH + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return torch.from_numpy(z.view(np.int64).reshape(2, WIDTH)).to(device)

"""The digest that detects a damaged state of a rank, and the copies of tensors that it is made of.

A digest hashes sums over the bits of a tensor. They are taken where the tensor lies, so a GPU's
residuals are not hashed by the host.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

DIGEST = "digest"

WIDTH = 1 << 14
"""Words of a row."""
# So that products take 32 MiB of a device at most, and fit a CPU's cache.
_ROWS, _ROWS_ON_CPU = 256, 16


class Copies(NamedTuple):
    """Contiguous copies on the host, by name.

    A GPU's tensors go to pinned memory one by one, so it holds one more tensor at most. Nothing
    waits for them: synchronize before you read the copies.

    Attributes:
        tensors: the copies.
        sums: :func:`sums_of` each.
    """

    tensors: dict[str, Tensor]
    sums: dict[str, Tensor]

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor that nothing else changes. One on the CPU is taken as it is."""
        packed = tensor.detach().contiguous()
        self.sums[name] = _on_host(sums_of(packed))
        self.tensors[name] = _on_host(packed)


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    pinned = tensor.is_cuda
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    return out.copy_(tensor, non_blocking=pinned)


def with_digest(
    metadata: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    sums: Mapping[str, Tensor] | None = None,
) -> dict[str, str]:
    """The metadata of a rank's tensors, with ``digest``: the SHA-256 of the metadata and of the
    tensors' names, dtypes, shapes and sums.

    Args:
        sums: :func:`sums_of` each tensor, on the CPU, if they are known.
    """
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update((sums_of(tensor).cpu() if sums is None else sums[name]).numpy().data)
    return {**metadata, DIGEST: digest.hexdigest()}


def matches_digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bool:
    """Whether metadata and tensors match the digest in the metadata; False without digest."""
    rest = {name: value for name, value in metadata.items() if name != DIGEST}
    return metadata == with_digest(rest, tensors)


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
    weights = _weights(tensor.device)
    return torch.cat([_sums_of_rows(part, weights[:, : part.shape[1]]) for part in parts])


def _sums_of_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """The sums of ``rows`` ``[n, words]`` int32: int64 ``[n, 2]``."""
    sums = torch.empty(len(rows), 2, dtype=torch.int64, device=rows.device)
    count = _ROWS_ON_CPU if rows.device.type == "cpu" else _ROWS
    for first in range(0, len(rows), count):
        some = rows[first : first + count]
        for i in range(2):
            sums[first : first + count, i] = (some * weights[i]).sum(1)
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

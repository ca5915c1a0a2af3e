"""Numbers that are the same everywhere, and hashes of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def fixed(shape: Iterable[int], *seed: int | str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of either sign with 7 significant bits, which every floating-point dtype holds, from
    2**-13 to 2**3: a hash of their places and of ``seed``."""
    shape = tuple(shape)
    start = int.from_bytes(hashlib.sha256(repr(seed).encode()).digest()[:4], "little")
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.int64) + start
    for shift, factor in ((16, 0x45D9F3B), (15, 0x2C1B3C6D), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    digits, octaves = (x & 0xFF) - 128, (x >> 8) % 10
    return (digits.double() * 2.0 ** (octaves - 13).double()).to(dtype).view(shape)


def content(tensor: Tensor) -> bytes:
    """Dtype, shape and bits."""
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} ".encode() + bits


def digest(parts: Iterable[bytes]) -> str:
    """SHA-256, in hex, of all of them."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()

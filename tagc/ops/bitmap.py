"""Bitmaps of present groups in int32 words: group ``g`` is bit ``g % 32`` of word ``g // 32``."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.symbols import wrap_int32


def to_bitmap(present: Tensor) -> Tensor:
    """``[..., groups]`` bool to ``[..., words]`` int32."""
    words = -(-present.shape[-1] // 32)
    padded = torch.nn.functional.pad(present, (0, words * 32 - present.shape[-1]))
    bits = padded.unflatten(-1, (words, 32)).to(torch.int64)
    return wrap_int32((bits << torch.arange(32, device=present.device)).sum(-1))


def from_bitmap(words: Tensor, groups: int) -> Tensor:
    """``[..., words]`` int32 to ``[..., groups]`` bool."""
    bits = (words[..., None] >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1
    return bits.flatten(-2)[..., :groups].bool()

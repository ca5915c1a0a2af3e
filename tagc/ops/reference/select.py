"""What operators share: numbers and codes in words, the selection of groups, what stays in a
residual, and sums of messages."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tagc.ops.symbols import wrap_int32


def grouped(x: Tensor, size: int) -> Tensor:
    """``[..., n]`` to ``[..., groups, size]``, padded with zeros."""
    groups = -(-x.shape[-1] // size)
    return pad(x, (0, groups * size - x.shape[-1])).unflatten(-1, (groups, size))


def packed(numbers: Tensor, bits: int) -> Tensor:
    """``[..., n]`` int64 numbers of ``bits`` bits to ``[..., words]`` int32, neighbours in the same
    word, the first in the lowest bits."""
    lanes = grouped(numbers, 32 // bits)
    return wrap_int32((lanes << bits * torch.arange(32 // bits, device=lanes.device)).sum(-1))


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of :func:`packed`: ``[..., words]`` to ``[..., count]`` int64."""
    shift = bits * torch.arange(32 // bits, device=words.device)
    return ((words[..., None].long() >> shift) & ((1 << bits) - 1)).flatten(-2)[..., :count]


def spread(codes: Tensor, bits: int, words: int) -> Tensor:
    """``[R, rows, n]`` int64 codes of ``bits`` bits to ``[R, rows * words]`` int32, neighbours in
    neighbouring words of their row."""
    places = 32 // bits
    full = pad(codes, (0, places * words - codes.shape[-1])).unflatten(-1, (places, words))
    shift = bits * torch.arange(places, device=codes.device)
    return wrap_int32(((full & ((1 << bits) - 1)) << shift[:, None]).sum(-2)).flatten(1)


def gathered(words: Tensor, bits: int, row_words: int) -> Tensor:
    """The inverse of :func:`spread`: ``[..., rows * row_words]`` int32 to ``[..., rows, codes]``
    int32, as many signed codes as words hold."""
    places = torch.arange(32 // bits, device=words.device, dtype=torch.int32)
    shifted = words.unflatten(-1, (-1, 1, row_words)) << (32 - bits - bits * places)[:, None]
    return (shifted >> (32 - bits)).flatten(-2)


def select_groups(
    groups: Tensor, threshold: Tensor, capacity: int
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Select the groups of a row to keep.

    Args:
        groups: ``[groups, elements]`` float32.
        threshold: scalar.

    Returns:
        ``[groups]`` bool, kept; ``[groups]`` bool, finite; and the numbers of groups above the
        threshold and of finite groups that are not all zero.
    """
    finite = groups.isfinite().all(-1)
    size = groups.abs().amax(-1).masked_fill(~finite, 0.0)
    above = finite & (size >= threshold)
    kept = size > 0
    if capacity < len(groups):
        # The largest; a stable order gives ties to the lower index.
        order = torch.argsort(size.masked_fill(~above, -1.0), descending=True, stable=True)
        kept = torch.zeros_like(above)
        kept[order[:capacity]] = True
        kept &= above
    return kept, finite, (above.sum(), (size > 0).sum())


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in the dtype of a residual; finite values stay finite."""
    largest = torch.finfo(dtype).max
    return torch.where(x.isfinite(), x.clamp(-largest, largest), x).to(dtype)


def keep(residual: Tensor, left: Tensor, average: float, stay: Tensor) -> None:
    """Update a residual with what is ``left`` of it, except where it should ``stay``."""
    if average:
        kept, fresh = (left.new_tensor(share) for share in (average, 1 - average))
        left = kept * residual.float() + fresh * left
    residual.copy_(torch.where(stay, residual, rounded(left, residual.dtype)))


def add_up(values: Tensor, out: Tensor, divisor: int, add: bool) -> None:
    """Write or add the sums of ``values`` ``[K, R, numel]`` over ``R``, in order, divided."""
    total, *others = values.unbind(1)
    for row in others:
        total = total + row
    # Divided by a tensor: by a number, CUDA multiplies with the reciprocal.
    x = total / torch.full_like(total, divisor)
    out.copy_(out.float() + x if add else x)


def patterns(x: Tensor) -> Tensor:
    """The bit patterns of 16-bit floats, from 0 on."""
    return x.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF

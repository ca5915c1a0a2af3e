"""The operators of packed exponents."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tagc.ops.exponents import ABOVE_MEAN, BLOCK, CHUNK, EXCEPTION, HEAD, ZERO, ExponentLayout
from tagc.ops.reference.select import patterns

_HALF = BLOCK // 2


def pack_exponents(rows: Tensor, message: Tensor, *, layout: ExponentLayout) -> None:
    """Write the messages of rows.

    Args:
        rows: ``[n, numel]`` bfloat16.
        message: ``[n, raw_words]`` int32. A row that travels as it is fills its message; of the
            others the first ``words`` are written.
    """
    missing = layout.blocks * BLOCK - layout.numel
    bits = pad(patterns(rows), (0, missing)).view(len(rows), -1, BLOCK)
    exponent = bits >> 7 & 255
    top = _tops(exponent)
    code = top - exponent
    code = torch.where((code < 0) | (code >= ZERO), EXCEPTION, code)
    code = torch.where(exponent == 0, ZERO, code)
    low = bits >> 8 & 0x80 | bits & 0x7F
    spare, fits = _spare(exponent, code == EXCEPTION)
    halves = code[..., :_HALF] | code[..., _HALF:] << 4
    parts = torch.cat([t.flatten(1) for t in (low, halves, top, spare)], dim=-1)
    for row, part, row_fits, out in zip(rows, parts, fits.tolist(), message, strict=True):
        end = layout.words if row_fits else layout.raw_words
        out[:end] = 0
        out[0] = int(not row_fits)
        sent = part.to(torch.uint8) if row_fits else row.contiguous().view(torch.uint8)
        out[HEAD:end].view(torch.uint8)[: len(sent)] = sent


def _tops(exponent: Tensor) -> Tensor:
    """``top`` of blocks, ``[n, blocks, 1]``."""
    if not exponent.numel():
        return exponent[..., :1]
    there = exponent > 0
    high = exponent.amax(-1, keepdim=True)
    mean = exponent.sum(-1, keepdim=True) // there.sum(-1, keepdim=True).clamp(min=1)

    def exceptions(top: Tensor) -> Tensor:
        outside = (exponent > top) | (exponent <= top - ZERO)
        return (there & outside).sum(-1, keepdim=True)

    other = mean + ABOVE_MEAN
    return torch.where(exceptions(other) < exceptions(high), other, high)


def _spare(exponent: Tensor, exception: Tensor) -> tuple[Tensor, Tensor]:
    """The spare bytes ``[n, blocks]``, and whether all exceptions of a row fit."""
    n, blocks, _ = exponent.shape
    whole = -(-blocks // CHUNK) * CHUNK
    gap = (0, 0, 0, whole - blocks)
    exponent, exception = (
        pad(t, gap).view(n, -1, CHUNK * BLOCK) for t in (exponent, exception.to(torch.int64))
    )
    room = exponent.new_full((whole // CHUNK,), CHUNK)
    room[-1:] -= whole - blocks
    fits = (exception.sum(-1) <= room).all(-1)
    rank = exception.cumsum(-1) - exception
    # Others, and exceptions past the last spare byte, go to one more byte.
    place = torch.where(exception > 0, rank.clamp(max=CHUNK), CHUNK)
    spare = exponent.new_zeros(n, whole // CHUNK, CHUNK + 1).scatter_(-1, place, exponent)
    return spare[..., :CHUNK].flatten(1)[:, :blocks], fits


def unpack_exponents(message: Tensor, rows: Tensor, *, layout: ExponentLayout) -> None:
    """Read the rows of messages. A damaged message makes any numbers of its own row.

    Args:
        message: ``[n, words]`` or ``[n, raw_words]`` int32.
        rows: ``[n, numel]`` bfloat16, written.
    """
    for words, row in zip(message, rows, strict=True):
        sent = words[HEAD:].contiguous().view(torch.uint8)
        if int(words[0]) == 1 and len(words) >= layout.raw_words:
            row.copy_(sent[: 2 * layout.numel].view(row.dtype))
        else:
            row.copy_(_unpacked(sent, layout))


def _unpacked(sent: Tensor, layout: ExponentLayout) -> Tensor:
    """``[numel]`` bfloat16."""
    blocks = layout.blocks
    sizes = [blocks * BLOCK, blocks * _HALF, blocks, blocks]
    low, halves, top, spare = sent[: sum(sizes)].to(torch.int64).split(sizes)
    halves = halves.view(-1, _HALF)
    code = torch.cat([halves & 15, halves >> 4], dim=-1)
    whole = -(-blocks // CHUNK) * CHUNK
    exception = pad((code == EXCEPTION).to(torch.int64), (0, 0, 0, whole - blocks))
    exception = exception.view(-1, CHUNK * BLOCK)
    rank = (exception.cumsum(-1) - exception).clamp(max=CHUNK)
    spare = pad(pad(spare, (0, whole - blocks)).view(-1, CHUNK), (0, 1))
    of_spare = spare.gather(-1, rank).view(-1, BLOCK)[:blocks]
    exponent = torch.where(code == ZERO, 0, top[:, None] - code & 255)
    exponent = torch.where(code == EXCEPTION, of_spare, exponent).flatten()
    bits = (low & 0x80) << 8 | exponent << 7 | low & 0x7F
    return bits[: layout.numel].to(torch.int16).view(torch.bfloat16)

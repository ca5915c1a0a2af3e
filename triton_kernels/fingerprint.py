"""Fingerprint: weighted sums over the bits of a shard, compared with earlier ones, in one launch.

Programs add their parts of both sums to ``sums``; integers have the same sum in any order. The last
one, by a counter, takes the result, and leaves zeros for the next launch. See
:mod:`tagc.ops.fingerprint` for the weights.

Worked example (float32): the elements with the bits 1 and 0, then 2, are the word 1 and a rest. The
sums are both 1 * 1 + (2 << 17) * 1 = 262145.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tagc.ops.fingerprint import REST_SHIFT, WIDTHS

from .jit import cdiv, constant, jit, on_device_of, tl

# Of a warp, words of 8 bytes: 16 elements a thread, whose sums take 64 registers.
_EACH, _WARPS = 128, 8
# Of all programs, as many as a large GPU runs at once.
_ALL_WARPS = 8448
_FIRST, _SECOND = constant(WIDTHS[0]), constant(WIDTHS[1])
_SHIFT = constant(REST_SHIFT)


@jit
def fingerprint_part(
    pid, x, sums, before, changed, words, rest, programs,
    TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What the program ``pid`` of ``programs`` adds."""
    BITS: tl.constexpr = 64 // LANES
    MASK: tl.constexpr = (1 << BITS) - 1
    first = tl.zeros([TILE, LANES], tl.int64)
    second = tl.zeros([TILE, LANES], tl.int64)
    lane = tl.arange(0, LANES)[None, :]
    for tile in range(pid, tl.cdiv(words, TILE), programs):
        word = tile * TILE + tl.arange(0, TILE)[:, None]  # of a shard below 16 GiB
        at = word.to(tl.int64) * LANES + lane
        bits = tl.load(x + at, mask=word < words, other=0).to(tl.int64)
        part = (bits & MASK) << (lane * BITS)
        first += part * (2 * (word % _FIRST) + 1)
        second += part * (2 * (word % _SECOND) + 1)
    total_first, total_second = tl.sum(first), tl.sum(second)
    if pid == 0:
        end = tl.cast(words, tl.int64) * LANES
        bits = tl.load(x + end + lane, mask=lane < rest, other=0).to(tl.int64)
        left = tl.sum((bits << _SHIFT) * (2 * lane + 1))
        total_first += left
        total_second += left
    tl.atomic_add(sums, total_first)
    tl.atomic_add(sums + 1, total_second)
    if tl.atomic_add(sums + 2, 1) == programs - 1:
        total_first = tl.atomic_xchg(sums, 0)
        total_second = tl.atomic_xchg(sums + 1, 0)
        tl.atomic_xchg(sums + 2, 0)
        if changed is None:
            tl.store(before, total_first)
            tl.store(before + 1, total_second)
        else:
            if (total_first != tl.load(before)) | (total_second != tl.load(before + 1)):
                tl.store(changed, 1)


@jit
def fingerprint_kernel(
    bits, sums, before, changed, words, rest, parts, SUMMED: tl.constexpr, OF_WORD: tl.constexpr
):
    part = tl.program_id(0)
    fingerprint_part(part, bits, sums, before, changed, words, rest, parts, SUMMED, OF_WORD)


@on_device_of("x")
def fingerprint(x: Tensor, sums: Tensor, before: Tensor, changed: Tensor | None = None) -> None:
    """See :func:`tagc.ops.reference.fingerprint`."""
    flag = None if changed is None else changed.view(torch.int8)
    arguments = fingerprint_arguments(x, _WARPS)
    fingerprint_kernel[(arguments["parts"],)](
        sums=sums, before=before, changed=flag, **arguments, num_warps=_WARPS
    )


def fingerprint_arguments(x: Tensor, warps: int) -> dict[str, Any]:
    """Of kernels that call :func:`fingerprint_part`: ``x`` as integers, its words and the elements
    after them, programs, their tile, and the lanes of a word."""
    lanes, tile = 8 // x.element_size(), _EACH * warps
    words, rest = divmod(x.numel(), lanes)
    return {
        "bits": x.view(torch.int16 if lanes == 4 else torch.int32), "words": words, "rest": rest,
        "parts": max(1, min(_ALL_WARPS // warps, cdiv(words, tile))), "SUMMED": tile,
        "OF_WORD": lanes,
    }  # fmt: skip

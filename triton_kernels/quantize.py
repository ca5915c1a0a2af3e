"""Quantize: accumulate gradient and residual, write scales and codes of blocks, keep the rest.

It is one pass. In each block of ``x = float32(grad) + float32(residual)``, the largest magnitude
gives the scale; :mod:`.codes` describes the codes and what they leave. The residual becomes
``left``, or ``average * residual + (1 - average) * left`` in three roundings. A block with a
non-finite x has the scale NaN and codes 0, and leaves its residual as it was.

Worked example (bits 4, levels 7): a block with x = (28, -7, 21, 2, ...) has the scale 4 and the
codes (7, -2, 5, 0, ...) and leaves (0, 1, 1, 2, ...); with average 0.75 and the old residual (2, 2,
2, 2, ...), the residual becomes (1.5, 1.75, 1.75, 2, ...).

Scales are stored one by one, as int16, because a word of two scales may belong to two programs. If
the number of blocks is odd, the first block past the last one writes the padding. Every other
access is 16 bytes wide if rows are 16-byte aligned and 16 divides ``numel``.

After a row's blocks come programs for its uncompressed pieces, if there are any (see
:mod:`.dense`), and then for its fingerprint (see :mod:`.fingerprint`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tagc.ops.blocks import BlockLayout

from .codes import blocks_and_warps, dither_of, quantize_tile, store_message
from .dense import put_or_note
from .jit import cdiv, jit, on_device_of, row_stride, tl
from .scalar import fmix32, widen

# Arguments whose alignment makes no difference.
_PLAIN = [
    "seeds", "blocks", "scales", "scales_stride", "stamp", "table", "pieces", "tiles", "messages",
    "puts", "words", "rest", "parts",
]  # fmt: skip


@jit(do_not_specialize=_PLAIN)
def quantize_kernel(
    grad, residual, scales, codes, seeds, n, blocks, kept, fresh,
    grad_stride, residual_stride, scales_stride, codes_stride,
    BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, AVERAGE: tl.constexpr,
    rows=None, elements=None, stamps=None, stamp=None, table=None, pieces=None, tiles=None,
    messages=None, rows_stride=None, elements_stride=None, stamps_stride=None,
    puts=None, bits=None, sums=None, before=None, words=None, rest=None, parts=None,
    UNIT: tl.constexpr = 1, OF_WORDS: tl.constexpr = 1, HALF: tl.constexpr = False,
    TILE: tl.constexpr = 1, STAMPS: tl.constexpr = 1, SUMMED: tl.constexpr = 1,
    OF_WORD: tl.constexpr = 1,
):  # fmt: skip
    LANES: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = BLOCK // LANES
    r = tl.program_id(1).to(tl.int64)
    if rows is not None:
        part = tl.program_id(0) - tl.cdiv(blocks + blocks % 2, BLOCKS)
        if part >= 0:
            put_or_note(
                part, r, rows, elements, stamps, stamp, table, pieces, tiles, messages, rows_stride,
                elements_stride, stamps_stride, puts, bits, sums, before, words, rest, parts,
                UNIT, OF_WORDS, HALF, TILE, STAMPS, SUMMED, OF_WORD,
            )  # fmt: skip
            return
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    start = first * BLOCK
    b = tl.arange(0, BLOCKS)
    of_block = b[:, None, None] * BLOCK
    word = tl.arange(0, WORDS)[None, None, :]
    grad += r * grad_stride + start
    if residual is not None:
        residual += r * residual_stride + start
    salt = None
    if seeds is not None:
        salt = fmix32(tl.load(seeds + r).to(tl.uint32, bitcast=True))
    x, old, dither = (), (), ()
    for lane in tl.static_range(LANES):
        j = of_block + lane * WORDS + word
        inside = j < n - start
        some = widen(tl.load(grad + j, mask=inside, other=0.0))
        if residual is not None:
            old += (widen(tl.load(residual + j, mask=inside, other=0.0)),)
            some += old[lane]
        x += (some,)
        if seeds is not None:
            pair = (of_block + lane * WORDS) // 2 + tl.arange(0, WORDS // 2)[None, None, :]
            # The number of a pair wraps after 2**32 pairs.
            dither += (dither_of((start // 2 + pair).to(tl.uint32), salt),)
    scale, words, left, finite = quantize_tile(x, BITS, None if seeds is None else dither)
    store_message(
        scales + r * scales_stride, codes + r * codes_stride, scale, words, first, blocks,
        BLOCKS, WORDS,
    )  # fmt: skip
    if residual is not None:
        for lane in tl.static_range(LANES):
            j = of_block + lane * WORDS + word
            stays = left[lane]
            if AVERAGE:
                stays = kept * old[lane] + fresh * stays
            stays = stays.to(residual.dtype.element_ty)
            tl.store(residual + j, stays, mask=(j < n - start) & finite[:, None, None])


@on_device_of("grad")
def quantize(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    *,
    layout: BlockLayout,
    average: float,
    dither: Tensor | None = None,
) -> None:
    """See :meth:`tagc.ops.blocks.BlockOps.quantize`."""
    if layout.blocks:
        quantize_blocks(grad, residual, message, dither, layout, average)


def quantize_blocks(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    dither: Tensor | None,
    layout: BlockLayout,
    average: float,
    more: int = 0,
    **pieces: Any,
) -> None:
    """Launch blocks, and ``more`` programs for each row."""
    blocks, warps = blocks_and_warps(layout.block)
    scales, codes = message.view(torch.int16), message[:, layout.scale_words :]
    quantize_kernel[(cdiv(2 * layout.scale_words, blocks) + more, grad.shape[0])](
        grad, residual, scales, codes, dither, layout.numel, layout.blocks, average, 1 - average,
        grad.stride(0), row_stride(residual), scales.stride(0), codes.stride(0),
        BITS=layout.bits, BLOCKS=blocks, BLOCK=layout.block, AVERAGE=average != 0, **pieces,
        num_warps=warps,
    )  # fmt: skip

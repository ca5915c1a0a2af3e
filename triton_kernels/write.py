"""Write: dequantize the cells of a direct layout into this rank's shard, front to back.

Elements are ``float32(sum of q) * step / divisor``, 0 in absent groups. The step is a power of two,
so the product is exact and the division rounds once. If the divisor is also a power of two,
multiplying by its inverse gives the same bits. If any rank's poison word is set, everything is NaN.

Worked example (int8x4, step 0.5, divisor 2): symbol 511 has the lanes (-1, 2, 0, 0), which become
(-0.25, 0.5, 0, 0).
"""

from __future__ import annotations

from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .jit import cdiv, division, jit, tl
from .scalar import bits_of, lane_sums, load_words, popcount
from .table import Table

_WORDS = 16
_WARPS = 4


@jit(do_not_specialize=["words", "divisor", "step", "stats"])
def write_kernel(
    union, cells, step, out, stats, n, words, divisor,
    LANES: tl.constexpr, WORDS: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * WORDS
    w = tl.arange(0, WORDS)
    word = load_words(union + first + w, w < words - first)
    total = tl.sum(popcount(word), 0)
    if total > 0:
        tl.atomic_add(stats, total, sem="relaxed")
    group = tl.expand_dims(w, 1) * 32 + tl.arange(0, 32)  # [WORDS, 32]
    value = tl.load(cells + first * 32 + group, mask=bits_of(word), other=0)
    x = lane_sums(value, LANES).to(tl.float32) * tl.load(step)  # [WORDS, 32, LANES]
    x = tl.div_rn(x, tl.zeros_like(x) + divisor) if DIVIDE else x * divisor
    poison = tl.load(union + words) != 0
    x = tl.where(poison, float("nan"), x)
    j = tl.expand_dims(group, 2) * LANES + tl.arange(0, LANES)
    start = first * (32 * LANES)
    tl.store(out + start + j, x.to(out.dtype.element_ty), mask=j < n - start)


def write(
    cells: Tensor,
    step: Tensor,
    out: Tensor,
    stats: Tensor,
    table: Table,
    *,
    layout: SketchLayout,
    divisor: int,
) -> None:
    """Write ``out`` ``[n]``, and the number of keys to ``stats[0]``."""
    if layout.numel == 0:
        return
    factor, divide = division(divisor)
    write_kernel[(cdiv(layout.words, _WORDS),)](
        table.open, cells, step, out, stats, layout.numel, layout.words, factor,
        LANES=layout.symbol.lanes, WORDS=_WORDS, DIVIDE=divide, num_warps=_WARPS,
    )  # fmt: skip

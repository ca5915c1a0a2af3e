"""Estimate: count what peeling left behind, and owe its estimate through the residual.

An unresolved key's estimate is the mean over its cells of what is left in the cell, shared equally
among the keys left in it: ``Σᵢ (left[cᵢ] * step / degree[cᵢ]) / hashes``, in float32, in the order
of the partitions, and is added to the owner's residual.

Worked example (2 hashes, step 1): keys 0 and 1, symbols 5 and 7, share cells 0 and 2, both of which
keep (12, 2). Each key's estimate is (12 / 2 + 12 / 2) / 2 = 6.
"""

from __future__ import annotations

import triton
from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .jit import jit, tl
from .peel import PROGRAMS
from .scalar import cell_of, lane_sums, magnitude, narrow, narrow_finite, widen
from .table import Table

_BLOCK = 128
_WARPS = 4


@jit(do_not_specialize=["partition", "n", "seed", "step", "stats"])
def estimate_kernel(
    entry, degree, keys, stats, seed, step, residual, n, partition,
    BLOCK: tl.constexpr, LANES: tl.constexpr, HASHES: tl.constexpr,
):  # fmt: skip
    total = tl.load(stats)
    seed_value = tl.load(seed)
    unit = tl.load(step)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(begin, total, tl.num_programs(0) * BLOCK):
        slot = start + tl.arange(0, BLOCK)
        key = tl.load(keys + slot, mask=slot < total, other=-1)
        stuck = key >= 0
        count = tl.sum(stuck.to(tl.int32), 0)
        if count > 0:
            tl.atomic_add(stats + 1, count, sem="relaxed")
            if residual is not None:
                share = tl.zeros([BLOCK, LANES], tl.float32)
                for i in tl.static_range(HASHES):
                    cell = cell_of(key.to(tl.uint32, bitcast=True), seed_value, partition, i)
                    left = tl.load(entry + cell, mask=stuck, other=0)
                    if degree is None:
                        sharing = left.to(tl.int32).to(tl.float32)
                        x = lane_sums((left >> 32).to(tl.int32), LANES).to(tl.float32) * unit
                    else:
                        sharing = tl.load(degree + cell, mask=stuck, other=1).to(tl.float32)
                        x = tl.expand_dims(left.to(tl.float32), 1)
                    share += tl.div_rn(x, tl.zeros_like(x) + tl.expand_dims(sharing, 1))
                share = tl.div_rn(share, tl.zeros_like(share) + HASHES)
                j = tl.expand_dims(key.to(tl.int64), 1) * LANES + tl.arange(0, LANES)
                owed = tl.expand_dims(stuck, 1) & (j < n)
                x = widen(tl.load(residual + j, mask=owed, other=0.0)) + share
                dtype: tl.constexpr = residual.dtype.element_ty
                finite = magnitude(x) < 0x7F800000
                x = tl.where(finite, narrow_finite(x, dtype), narrow(x, dtype))
                tl.store(residual + j, x, mask=owed)


def estimate(
    step: Tensor,
    seed: Tensor,
    residual: Tensor | None,
    stats: Tensor,
    table: Table,
    *,
    layout: SketchLayout,
) -> None:
    """Write ``stats[1]``, the number of unresolved keys; add their estimates to ``residual``."""
    if layout.groups == 0:
        return
    programs = min(PROGRAMS, max(1, triton.cdiv(layout.keys, _BLOCK)))
    estimate_kernel[(programs,)](
        table.entry, table.degree, table.keys, stats, seed, step, residual, layout.numel,
        layout.partition, BLOCK=_BLOCK, LANES=layout.symbol.lanes, HASHES=layout.hashes,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip

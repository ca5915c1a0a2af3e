"""Undo the lag of error feedback, in one pass over the owner's shard.

Every element of the shard is ``out = (decoded - (1 - lead) * sent) / lead`` in float32, each
operation rounded by itself, and ``sent`` becomes ``decoded``. Where ``decoded`` is not finite,
``out`` is NaN and ``sent`` 0.

Worked example (a lead of 1/2): decoded 3 and sent 1 give 5.
"""

from __future__ import annotations

from torch import Tensor

from .jit import cdiv, jit, on_device_of, tl

# A division is a call, which keeps a thread's values in registers: with more values they spill.
_BLOCK = 1024
_WARPS = 4


@jit
def without_lag(x, last, late, lead):
    """``(x - last * late) / lead``, each operation rounded."""
    return tl.div_rn(x - last * late, tl.zeros_like(x) + lead)


@jit
def undo_lag_kernel(decoded, sent, out, late, lead, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    j = tl.arange(0, BLOCK)
    inside = j < n - start
    x = tl.load(decoded + start + j, mask=inside, other=0.0)
    last = tl.load(sent + start + j, mask=inside, other=0.0)
    finite = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    x = tl.where(finite, x, 0.0)
    ahead = without_lag(x, last, late, lead)
    tl.store(sent + start + j, x, mask=inside)
    ahead = tl.where(finite, ahead, float("nan"))
    tl.store(out + start + j, ahead.to(out.dtype.element_ty), mask=inside)


@on_device_of("out")
def undo_lag(decoded: Tensor, sent: Tensor, out: Tensor, *, lead: float) -> None:
    """See :func:`tagc.ops.reference.undo_lag`."""
    if not out.numel():
        return
    undo_lag_kernel[(cdiv(out.numel(), _BLOCK),)](
        decoded, sent, out, 1 - lead, lead, out.numel(), BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip

"""Steer thresholds: one launch for all segments and destinations of a unit.

A thread has one threshold and its state. See :func:`tagc.ops.reference.steer` for the
formulas.

Worked example: 100 groups should be kept, and 400 are above the threshold, as in the last step. The
exponent grows from 1/4 to 5/16, so the threshold is multiplied by
(11/16 + 21/16 * 4) / (21/16 + 11/16 * 4), which is 95/65.
"""

from __future__ import annotations

from torch import Tensor

from tagc.ops import thresholds as of
from tagc.ops.sketch import ABOVE, KEPT, NONZERO, SATURATED

from .jit import cdiv, constant, jit, on_device_of, tl

_BLOCK = 128
_WARPS = 4
_PLAIN = [
    *("thresholds", "destinations", "counts_segment", "counts_destination"),
    *("state_row", "state_segment"),
]
_ABOVE, _NONZERO = constant(ABOVE), constant(NONZERO)
_KEPT, _SATURATED = constant(KEPT), constant(SATURATED)
_THRESHOLD, _BOOST, _BIAS = constant(of.THRESHOLD), constant(of.BOOST), constant(of.BIAS)
_EXPONENT, _SIDE, _STEP = constant(of.EXPONENT), constant(of.SIDE), constant(of.STEP)
_COARSER, _FINER = constant(of.COARSER), constant(of.FINER)
_NONZERO_SHARE, _NOTHING_ABOVE = constant(of.NONZERO_SHARE), constant(of.NOTHING_ABOVE)
_MAX_RATIO, _NEAR = constant(of.MAX_RATIO), constant(of.NEAR)
_BIAS_RATE, _MAX_BIAS = constant(of.BIAS_RATE), constant(of.MAX_BIAS)
_SHORTER, _LONGER = constant(of.SHORTER), constant(of.LONGER)
_MIN_EXPONENT, _MAX_EXPONENT = constant(of.MIN_EXPONENT), constant(of.MAX_EXPONENT)
_MIN_THRESHOLD, _MAX_THRESHOLD = constant(of.MIN_THRESHOLD), constant(of.MAX_THRESHOLD)


@jit(do_not_specialize=_PLAIN)
def steer_kernel(
    counts, target, max_boost, scale, state, thresholds, destinations,
    counts_segment, counts_destination, state_row, state_segment, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < thresholds
    segment = i // destinations
    destination = i - segment * destinations
    found = counts + segment * counts_segment + destination * counts_destination
    above = tl.load(found + _ABOVE, mask=inside, other=0).to(tl.float32)
    nonzero = tl.load(found + _NONZERO, mask=inside, other=0).to(tl.float32)
    kept = tl.load(found + _KEPT, mask=inside, other=0).to(tl.float32)
    saturated = tl.load(found + _SATURATED, mask=inside, other=0).to(tl.float32)
    wanted = tl.load(target + segment, mask=inside, other=1.0)
    most = tl.load(max_boost + segment, mask=inside, other=1.0)
    scale = tl.load(scale + segment, mask=inside, other=0.0)
    state += segment * state_segment + destination
    threshold = tl.load(state + _THRESHOLD * state_row, mask=inside, other=1.0)
    boost = tl.load(state + _BOOST * state_row, mask=inside, other=1.0)
    bias = tl.load(state + _BIAS * state_row, mask=inside, other=1.0)
    exponent = tl.load(state + _EXPONENT * state_row, mask=inside, other=1.0)
    last = tl.load(state + _SIDE * state_row, mask=inside, other=0.0)

    finer = tl.where(saturated * _FINER < kept, 0.5, 1.0)
    boost *= tl.where(saturated * _COARSER > kept, 2.0, finer)
    boost = tl.minimum(tl.maximum(boost, 1.0), most)
    goal = tl.maximum(tl.minimum(wanted, nonzero * _NONZERO_SHARE), 0.5)
    ratio = tl.minimum(tl.div_rn(above, goal * bias), _MAX_RATIO)
    near = (ratio > 1 / _NEAR) & (ratio < _NEAR)
    learnt = tl.where(near, tl.div_rn((goal - kept) * _BIAS_RATE, goal), 0.0)
    bias = tl.minimum(tl.maximum(bias * (learnt + 1.0), 1.0), _MAX_BIAS)

    side = tl.where(ratio > 1.0, 1.0, tl.where(ratio < 1.0, -1.0, 0.0))
    exponent *= tl.where(side * last < 0.0, _SHORTER, _LONGER)
    exponent = tl.minimum(tl.maximum(exponent, _MIN_EXPONENT), _MAX_EXPONENT)
    less, more = 1.0 - exponent, 1.0 + exponent
    factor = tl.div_rn(less + more * ratio, more + less * ratio)
    factor = tl.where(above > 0.0, factor, _NOTHING_ABOVE)
    factor = tl.where(nonzero > 0.0, factor, 1.0)
    threshold = tl.minimum(tl.maximum(threshold * factor, _MIN_THRESHOLD), _MAX_THRESHOLD)
    power = (threshold.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = power * scale
    step = tl.where(step > 0.0, step, 1.0) * boost

    tl.store(state + _THRESHOLD * state_row, threshold, mask=inside)
    tl.store(state + _BOOST * state_row, boost, mask=inside)
    tl.store(state + _BIAS * state_row, bias, mask=inside)
    tl.store(state + _EXPONENT * state_row, exponent, mask=inside)
    tl.store(state + _SIDE * state_row, side, mask=inside)
    tl.store(state + _STEP * state_row, step, mask=inside)


@on_device_of("state")
def steer(counts: Tensor, target: Tensor, max_boost: Tensor, scale: Tensor, state: Tensor) -> None:
    """See :func:`tagc.ops.reference.steer`."""
    _, segments, destinations = state.shape
    steer_kernel[(cdiv(segments * destinations, _BLOCK),)](
        counts, target, max_boost, scale, state, segments * destinations, destinations,
        counts.stride(0), counts.stride(1), state.stride(0), state.stride(1),
        BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip

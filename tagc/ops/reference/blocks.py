"""The operators of block quantization."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.blocks import MIN_SCALE, BlockLayout
from tagc.ops.fingerprint import MASK, fmix32
from tagc.ops.reference.select import add_up, gathered, grouped, keep, packed, patterns, spread

_LARGEST = torch.finfo(torch.bfloat16).max


def quantize(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    dither: Tensor | None = None,
    *,
    layout: BlockLayout,
    average: float,
) -> None:
    """Accumulate and quantize rows; the residual keeps the quantization error.

    Per block of ``x = float32(grad) + float32(residual)`` with largest magnitude ``m``:

    1. The scale is ``s = bfloat16(m * float32(1 / levels))``, rounded to nearest even. With
       ``dither`` it is rounded up, except that a ``m * float32(1 / levels)`` which exceeds a
       bfloat16 by at most 2 units in the last place is rounded down to it. The scale is at most
       the largest finite bfloat16, 0 if it would be below ``MIN_SCALE``, and NaN (0x7FC0) if
       ``m`` is not finite. A block with a NaN scale has codes 0, and its residual stays as it
       was.
    2. Codes are ``q = rint(clip(x * (1 / s), -levels, levels))``, 0 where ``s`` is 0. With
       ``dither`` they are ``rint(clip(...) + v)``, where element ``j`` of a row with the seed
       ``d`` has ``v = (h + 1/2) / 2**16 - 1/2`` (exact), and ``h`` is the lower half of
       ``fmix32((j >> 1) ^ fmix32(d))`` if ``j`` is even, else the upper half (``fmix32`` is
       MurmurHash3's finalizer). Then ``q * s`` is ``x`` on average: with the scale rounded up,
       clipping removes only what rounding adds, at most ``2**-21`` of ``x``, and what exceeds
       the largest bfloat16.
    3. With ``left = x - q * s`` (exact), the residual becomes ``left`` if ``average`` is 0,
       else ``float32(average) * residual + float32(1 - average) * left`` (three roundings, no
       fused multiply-add), rounded to nearest even in its dtype (finite stays finite).

    Args:
        grad: ``[R, numel]`` float32, bfloat16 or float16.
        residual: ``[R, numel]`` float32 or bfloat16, updated in place; None for no feedback.
        message: ``[R, words]`` int32, written; padding in codes and scales is 0.
        dither: ``[R]`` int32, a seed for each row, only without a residual; None rounds to
            nearest.
        average: share of the old residual that stays, in [0, 1); LoCo's beta.
    """
    x = grad.float() if residual is None else grad.float() + residual.float()
    scale, q, left = quantize_rows(x, layout, dither)
    scales, codes = packed(patterns(scale), 16), spread(q, layout.bits, layout.block_words)
    message.copy_(torch.cat([scales, codes], dim=-1))
    if residual is not None:
        stay = scale.isnan().repeat_interleave(layout.block, dim=-1)[:, : layout.numel]
        keep(residual, left, average, stay)


def dequantize(
    message: Tensor, out: Tensor, *, layout: BlockLayout, divisor: int, add: bool = False
) -> None:
    """Add up messages: ``out[k] = (sum over r of q * s) / divisor``.

    Products are exact in float32; they are added in float32 in the order of ``r``, starting
    from the first, then divided (IEEE), then rounded to ``out``'s dtype. A NaN scale makes
    its whole block NaN.

    Args:
        message: ``[K, R, words]`` int32.
        out: ``[K, numel]`` float32, bfloat16 or float16, written.
        add: whether the quotient is added to what ``out`` holds, in float32, and the sum
            rounded once.
    """
    add_up(dequantize_rows(message, layout), out, divisor, add)


def quantize_rows(
    x: Tensor, layout: BlockLayout, dither: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, codes and quantization errors.

    Args:
        x: ``[R, numel]`` float32.
        dither: ``[R]`` int32, seeds.

    Returns:
        ``[R, blocks]`` bfloat16, ``[R, blocks, block]`` int64, ``[R, numel]`` float32.
    """
    blocks = grouped(x, layout.block)
    largest = blocks.abs().amax(-1)
    scale = largest * x.new_tensor(1 / layout.levels)
    scale = scale.clamp(max=_LARGEST).to(torch.bfloat16) if dither is None else _rounded_up(scale)
    scale = torch.where(scale < MIN_SCALE, 0.0, scale)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    s = scale.float()[..., None]
    inverse = torch.where(s > 0, 1 / s, 0.0)
    q = (blocks * inverse).clamp(-layout.levels, layout.levels)
    if dither is not None:
        q = q + dither_of(dither, layout.blocks * layout.block).view_as(q)
    q = q.round()
    q = torch.where(s > 0, q, 0.0)
    left = (blocks - q * s).flatten(1)[:, : layout.numel]
    return scale, q.to(torch.int64), left


def _rounded_up(x: Tensor) -> Tensor:
    """The least bfloat16 that a positive float32 exceeds by at most 2 units in its last place;
    finite, unless ``x`` is not."""
    up = ((x.view(torch.int32) + 0xFFFD) >> 16 << 16).view(torch.float32)
    return torch.where(x.isfinite(), up.clamp(max=_LARGEST), x).to(torch.bfloat16)


def dither_of(seeds: Tensor, n: int) -> Tensor:
    """Offsets to add before codes are rounded: ``[R]`` int32 seeds to ``[R, n]`` float32."""
    salts = fmix32(seeds.to(torch.int64) & MASK)
    pairs = torch.arange((n + 1) // 2, device=seeds.device, dtype=torch.int64)
    h = fmix32(pairs ^ salts[:, None])
    h = torch.stack([h & 0xFFFF, h >> 16], dim=-1).flatten(-2)[:, :n]
    return (2 * h + 1 - (1 << 16)).float() * 2.0**-17


def dequantize_rows(message: Tensor, layout: BlockLayout) -> Tensor:
    """``[..., words]`` int32 to ``[..., numel]`` float32."""
    scales, codes = message[..., : layout.scale_words], message[..., layout.scale_words :]
    bits = torch.stack([scales << 16, scales & ~0xFFFF], dim=-1).flatten(-2)
    scale = bits.view(torch.float32)[..., : layout.blocks]
    values = gathered(codes, layout.bits, layout.block_words).float() * scale[..., None]
    return values.flatten(-2)[..., : layout.numel]

"""The operators of quantized matrices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tagc.ops.matrix import (
    CENTRE,
    COLUMN_BIAS,
    COLUMN_LANES,
    LARGEST,
    MIN_EXPONENT,
    NOT_FINITE,
    NOTHING,
    AnyMatrices,
    MatrixLayout,
    parts_of,
)
from tagc.ops.reference.select import add_up, gathered, grouped, keep, packed, spread, unpacked


def quantize_matrix(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    *,
    layout: AnyMatrices,
    average: float,
) -> None:
    """Accumulate and quantize matrices for each destination; the residual keeps the
    quantization error.

    Per destination and matrix, all in float32, with ``x = float32(grad) + float32(residual)``
    and ``u``, the magnitude of ``x``, at most ``LARGEST``, or 0 where ``x`` is not finite:

    1. Sum ``u`` over each column, in ``COLUMN_LANES`` lanes.
    2. With ``t`` the float32 bits of a column's sum plus 2**21, shifted right by 22, the
       column's 4 bits are ``t - max(t) + 15``, at least 0.
    3. ``a``, about the biased exponent of an element's mean magnitude in units of ``v``, is
       ``max(t)`` shifted right by 1, minus the logarithm of the number of rows, rounded down.
       The base is ``8 * a - CENTRE`` (it includes finite elements of rows that are not finite).
       If ``a`` is below ``MIN_EXPONENT``, the base is 0, and all finite rows are ``NOTHING``.
    4. A row's scale is the sum of ``u * v`` divided by that of ``v * v`` if ``fitted``, else
       the sum of ``u`` divided by that of ``v`` (in the order of
       :attr:`MatrixLayout.word_lanes`), times ``float32(distance)``. With ``t`` the bits of the
       scale plus 2**19, shifted right by 20, the row's byte is ``t - base``, at most 254. It is
       ``NOTHING`` if that is below 1, and ``NOT_FINITE`` if the row has an element that is not
       finite. Rows with ``NOTHING`` or ``NOT_FINITE`` have codes 0.
    5. Codes are ``floor(y * 0.5)``, clipped, with ``y = (x * (1 / f)) * (1 / v)``, which rounds
       four times.
    6. ``left = x - (2 q + 1) * f * v``, rounded once. It becomes the residual as in
       :func:`tagc.ops.reference.quantize`. Rows that are not finite keep their residual.

    Args:
        grad: ``[D, numel]`` float32, bfloat16 or float16.
        residual: ``[D, numel]`` float32 or bfloat16, updated in place; None
            for no feedback.
        message: ``[D, words]`` int32, written; padding is 0.
        average: share of the old residual that stays, in [0, 1); LoCo's beta.
    """
    for one, columns, words in parts_of(layout):
        left = None if residual is None else residual[:, columns]
        _quantize(grad[:, columns], left, message[:, words], one, average)


def dequantize_matrix(
    message: Tensor, out: Tensor, *, layout: AnyMatrices, divisor: int, add: bool = False
) -> None:
    """Add up messages: ``out[k] = (sum over r of the values of message k, r) / divisor``.

    Terms are exact in float32; they are added in the order of ``r``, starting from the first,
    then divided (IEEE), then rounded to ``out``'s dtype. Rows that are ``NOTHING`` are +0. Rows
    that are ``NOT_FINITE`` are NaN.

    Args:
        message: ``[K, R, words]`` int32.
        out: ``[K, numel]`` float32, bfloat16 or float16, written.
        add: as in :func:`tagc.ops.reference.dequantize`.
    """
    for one, columns, words in parts_of(layout):
        _dequantize(message[..., words], out[:, columns], one, divisor, add)


def _quantize(
    grad: Tensor, residual: Tensor | None, message: Tensor, layout: MatrixLayout, average: float
) -> None:
    """Quantize one matrix for each destination."""
    if not layout.rows:
        return
    x = grad.float() if residual is None else grad.float() + residual.float()
    x = x.unflatten(-1, (layout.rows, layout.columns))
    columns, top = _columns(x)
    v = _column_scales(columns)[:, None].expand_as(x)
    base = _base(top, layout.rows)
    rows = _rows(x, v, base, layout)
    f = _row_scales(rows, base)[..., None]
    sends = f > 0
    f = torch.where(sends, f, 1.0)
    half = 1 << (layout.bits - 1)
    q = (x * (1 / f) * (1 / v) * 0.5).floor().clamp(-half, half - 1)
    left = torch.where(sends, x - (2 * q + 1) * (f * v), x)
    codes = spread(torch.where(sends, q, 0).to(torch.int64), layout.bits, layout.row_words)
    message.copy_(torch.cat([base, packed(columns, 4), packed(rows, 8), codes], dim=-1))
    if residual is not None:
        stay = (rows == NOT_FINITE)[..., None].expand_as(left)
        keep(residual, left.flatten(1), average, stay.flatten(1))


def _dequantize(
    message: Tensor, out: Tensor, layout: MatrixLayout, divisor: int, add: bool
) -> None:
    """Add up messages of one matrix each."""
    if layout.rows:
        add_up(_values(message, layout).flatten(2), out, divisor, add)


def _bounded(x: Tensor) -> Tensor:
    """Magnitudes, at most ``LARGEST``; 0 where ``x`` is not finite."""
    return torch.where(x.isfinite(), x.abs().clamp(max=LARGEST), 0.0)


def _lane_sum(x: Tensor, lanes: int) -> Tensor:
    """Sum over the last dimension, in the format's order."""
    parts = grouped(x, lanes)
    total = parts[..., 0, :]
    for k in range(1, parts.shape[-2]):
        total = total + parts[..., k, :]
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return total[..., 0]


def _upper(x: Tensor, bits: int) -> Tensor:
    """The upper bits of float32, rounded, as int64."""
    below = 32 - bits
    return (x.contiguous().view(torch.int32).long() + (1 << (below - 1))) >> below


def _float(upper: Tensor, bits: int) -> Tensor:
    """The float32 with these upper bits (int64); the lower bits are 0."""
    return (upper << (32 - bits)).to(torch.int32).view(torch.float32)


def code_sum(c: Tensor, layout: MatrixLayout) -> Tensor:
    """Sum over the columns, the last dimension, in the order of :attr:`MatrixLayout.word_lanes`."""
    places, words = layout.places, layout.row_words
    chunks = -(-words // layout.word_lanes)
    c = pad(c, (0, places * words - layout.columns)).unflatten(-1, (places, words))
    c = pad(c, (0, chunks * layout.word_lanes - words))
    total, *rest = c.unflatten(-1, (chunks, layout.word_lanes)).unbind(-2)
    for chunk in rest:
        total = total + chunk
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    total = total[..., 0]
    while total.shape[-1] > 1:
        first, second = total.chunk(2, dim=-1)
        total = first + second
    return total[..., 0]


def _columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """``[D, rows, columns]`` to ``[D, columns]`` int64, the scales' codes, and ``[D, 1]`` int64,
    the upper bits of the largest sum."""
    t = _upper(_lane_sum(_bounded(x).mT, COLUMN_LANES), 10)
    top = t.amax(-1, keepdim=True)
    return (t - top + 15).clamp(min=0), top


def _column_scales(columns: Tensor) -> Tensor:
    """``[..., columns]`` int64, the scales' codes, to ``[..., columns]`` float32."""
    return _float(columns + COLUMN_BIAS, 10)


def _base(top: Tensor, rows: int) -> Tensor:
    """The matrices' bases, ``[D, 1]`` int64, from the upper bits of the largest columns' sums."""
    exponent = (top >> 1) - (rows.bit_length() - 1)
    return torch.where(exponent < MIN_EXPONENT, 0, 8 * exponent - CENTRE)


def _rows(x: Tensor, v: Tensor, base: Tensor, layout: MatrixLayout) -> Tensor:
    """``[D, rows]`` int64, the scales' bytes."""
    u = _bounded(x)
    if layout.fitted:
        u, v = u * v, v * v
    fit = code_sum(u, layout) / code_sum(v, layout)
    byte = (_upper(fit * x.new_tensor(layout.distance), 12) - base).clamp(max=254)
    byte = torch.where((byte < 1) | (base == 0), NOTHING, byte)
    return torch.where(x.isfinite().all(-1), byte, NOT_FINITE)


def _row_scales(rows: Tensor, base: Tensor) -> Tensor:
    """``[..., rows]`` int64, the scales' bytes, to ``[..., rows]`` float32: 0 for ``NOTHING``, NaN
    for ``NOT_FINITE``."""
    f = _float(rows + base, 12)
    f = torch.where(rows == NOTHING, 0.0, f)
    return torch.where(rows == NOT_FINITE, torch.nan, f)


def _values(message: Tensor, layout: MatrixLayout) -> Tensor:
    """The values of messages ``[..., words]`` int32: ``[..., rows, columns]`` float32."""
    sizes = [*layout.head, layout.rows * layout.row_words]
    base, columns, rows, words = message.split(sizes, dim=-1)
    v = _column_scales(unpacked(columns, 4, layout.columns))[..., None, :]
    rows = unpacked(rows, 8, layout.rows)
    f = _row_scales(rows, base.long())[..., None]
    code = gathered(words, layout.bits, layout.row_words)[..., : layout.columns]
    value = (2 * code + 1).float()
    value = torch.where((rows != NOTHING)[..., None], value * (f * v), 0.0)
    return torch.where(f.isnan(), torch.nan, value)

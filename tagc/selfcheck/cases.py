"""Makes small inputs for a call of an operator: random, with zeros, large and non-finite values.

The reference makes the messages to be decoded.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tagc.ops import ABOVE, COUNTS, SATURATED, Ops, get_ops
from tagc.ops.bitmap import to_bitmap
from tagc.ops.blocks import BlockLayout
from tagc.ops.matrix import MatrixLayout
from tagc.ops.packed import PackedLayout, index_of
from tagc.ops.sketch import SketchLayout
from tagc.ops.thresholds import BIAS, BOOST, EXPONENT, SIDE, STATES, STEP, THRESHOLD
from tagc.selfcheck.calls import Call
from tagc.selfcheck.small import (
    small_blocks,
    small_matrices,
    small_matrix,
    small_packed,
    small_sketch,
)

# Destinations of an encoding. Except for matrices, only a row's stride depends on their number.
_DESTINATIONS = 2
_GARBAGE = 0x5A5A5A5A


@dataclass(frozen=True)
class Case:
    """Arguments of one call.

    Attributes:
        call: the call, with small layouts.
        tensors: its tensors by argument, on the CPU; outputs hold garbage, or values to update.
        written: names of the outputs.
    """

    call: Call
    tensors: dict[str, Tensor | None]
    written: tuple[str, ...]

    def run(self, ops: Ops, place: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Run the operator of ``ops``. Returns the tensors that it writes or returns, on the CPU.

        Args:
            place: copies a tensor to its device and placement.
        """
        placed = {name: None if x is None else place(x) for name, x in self.tensors.items()}
        returned = getattr(ops, self.call.operator)(**placed, **dict(self.call.options))
        results = {name: x for name in self.written if (x := placed[name]) is not None}
        results |= {f"result {i}": x for i, x in enumerate(returned or ())}
        return {name: x.cpu() for name, x in results.items()}


def case_of(call: Call) -> Case:
    """The case of a call; its inputs are the same every time."""
    generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(str(call).encode()))
    return _MAKERS[call.operator](_Maker(call, generator))


class _Maker:
    """Makes the tensors of one call."""

    def __init__(self, call: Call, generator: torch.Generator) -> None:
        self.call, self._generator = call, generator
        self.reference = get_ops("cpu", "reference")

    def case(
        self, tensors: dict[str, Tensor | None], written: Iterable[str], **options: object
    ) -> Case:
        """A case of the call, with these options instead of its own."""
        merged = tuple((dict(self.call.options) | options).items())
        return Case(replace(self.call, options=merged), tensors, tuple(written))

    def values(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Normal numbers, whose scale differs widely between rows, with a few zeros."""
        x = self._normal(*shape)
        x *= torch.exp(2 * self._normal(*shape[:-1], 1))
        x[self.uniform(*shape) < 0.05] = 0
        return x.to(dtype)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float32, device="cpu", generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        """Float32 in ``[0, 1)``."""
        return torch.rand(*shape, dtype=torch.float32, generator=self._generator, device="cpu")

    def optional(self, *shape: int, dtype: torch.dtype | None) -> Tensor | None:
        """:meth:`values`, or None without a dtype."""
        return None if dtype is None else self.values(*shape, dtype=dtype)

    def spoilt(self, x: Tensor) -> Tensor:
        """``x`` ``[R, n]`` with an infinity in the last row."""
        if x.numel():
            x[-1, x.shape[-1] // 3] = torch.inf
        return x

    def bits(self, rows: int, groups: int, marked: int) -> Tensor:
        """Bitmaps ``[rows, ...]`` in which ``marked`` of ``groups`` bits are set."""
        order = self.uniform(rows, groups).argsort(-1)
        return to_bitmap(order < marked)

    def garbage(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """An output's content before the call."""
        if dtype.is_floating_point:
            return torch.full(shape, torch.nan, dtype=dtype, device="cpu")
        return torch.full(shape, _GARBAGE, dtype=dtype, device="cpu")

    def threshold(self, x: Tensor, share: float) -> Tensor:
        """Thresholds ``[R]``; about ``share`` of a row's elements are above its threshold."""
        size = x.float().abs().nan_to_num(0, 0, 0)
        n = size.shape[-1]
        place = max(1, n - round(share * n))
        return size.kthvalue(place, -1).values.clamp(min=2.0**-20) if n else x.new_ones(len(x))


def _quantize(m: _Maker) -> Case:
    case = _elementwise(m, small_blocks(m.call.option("layout")))
    if m.call.given("dither") is not None:
        # Both signs, and a different one for each row.
        case.tensors["dither"] = torch.tensor(
            [_GARBAGE, ~_GARBAGE], dtype=torch.int32, device="cpu"
        )
    return case


def _quantize_matrix(m: _Maker) -> Case:
    return _elementwise(m, *small_matrices(m.call.option("layout"), m.call.rows[0]))


def _elementwise(
    m: _Maker, layout: BlockLayout | MatrixLayout, destinations: int = _DESTINATIONS
) -> Case:
    shape = (destinations, layout.numel)
    tensors = {
        "grad": m.spoilt(m.values(*shape, dtype=m.call.dtype("grad"))),
        "residual": m.optional(*shape, dtype=m.call.given("residual")),
        "message": m.garbage(destinations, layout.words),
    }
    return m.case(tensors, ["residual", "message"], layout=layout)


def _dequantize(m: _Maker) -> Case:
    layout = small_blocks(m.call.option("layout"))
    K, R = min(m.call.rows[0], 2), m.call.rows[1]
    x = m.spoilt(m.values(K * R, layout.numel, dtype=torch.float32))
    message = m.garbage(K * R, layout.words)
    m.reference.quantize(x, None, message, layout=layout, average=0.0)
    out = m.garbage(K, layout.numel, dtype=m.call.dtype("out"))
    tensors: dict[str, Tensor | None] = {"message": message.view(K, R, -1), "out": out}
    return m.case(tensors, ["out"], layout=layout)


def _dequantize_matrix(m: _Maker) -> Case:
    layout = small_matrix(m.call.option("layout"))
    K, R = min(m.call.rows[0], 2), m.call.rows[1]
    x = m.spoilt(m.values(K * R, layout.numel, dtype=torch.float32))
    message = m.garbage(K * R, layout.words)
    m.reference.quantize_matrix(x, None, message, layout=layout, average=0.0)
    tensors: dict[str, Tensor | None] = {
        "message": message.view(K, R, -1),
        "out": m.garbage(K, layout.numel, dtype=m.call.dtype("out")),
    }
    return m.case(tensors, ["out"], layout=layout)


def _share_of(layout: PackedLayout | SketchLayout, capacity: int) -> float:
    """A share of the groups that exceeds the capacity, so that some are dropped."""
    return min(1.0, 1.2 * capacity / max(1, layout.groups))


def _pack(m: _Maker) -> Case:
    layout, R = small_packed(m.call.option("layout")), _DESTINATIONS
    grad = m.values(R, layout.numel, dtype=m.call.dtype("grad"))
    tensors = {
        "grad": m.spoilt(grad),
        "residual": m.optional(R, layout.numel, dtype=m.call.given("residual")),
        "threshold": m.threshold(grad, _share_of(layout, layout.capacity) / layout.group),
        "message": m.garbage(R, layout.words),
        "counts": m.garbage(R, COUNTS),
    }
    return m.case(tensors, ["residual", "message", "counts"], layout=layout)


def _select(m: _Maker) -> Case:
    layout, R = small_packed(m.call.option("layout")), _DESTINATIONS
    x = m.values(R, layout.numel, dtype=m.call.dtype("x"))
    tensors: dict[str, Tensor | None] = {
        "x": m.spoilt(x),
        "threshold": m.threshold(x, _share_of(layout, layout.capacity) / layout.group),
        "bitmap": m.garbage(R, layout.bitmap_words),
        "counts": m.garbage(R, COUNTS),
    }
    return m.case(tensors, ["bitmap", "counts"], layout=layout)


def _messages(m: _Maker, layout: PackedLayout, R: int) -> Tensor:
    x = m.values(R, layout.numel, dtype=torch.float32)
    message, counts = m.garbage(R, layout.words), m.garbage(R, COUNTS)
    threshold = m.threshold(x, 0.9 * _share_of(layout, layout.capacity) / layout.group)
    m.reference.pack(x, None, threshold, message, counts, layout=layout)
    return message


def _unpack(m: _Maker) -> Case:
    layout = small_packed(m.call.option("layout"))
    (R,) = m.call.rows
    tensors: dict[str, Tensor | None] = {
        "message": _messages(m, layout, R),
        "out": m.garbage(layout.numel, dtype=m.call.dtype("out")),
    }
    return m.case(tensors, ["out"], layout=layout)


def _write_index(m: _Maker) -> Case:
    layout, R = small_packed(m.call.option("layout")), m.call.rows[0]
    tensors: dict[str, Tensor | None] = {
        "bitmap": m.bits(R, layout.groups, layout.capacity),
        "index": m.garbage(R, layout.index_words),
    }
    return m.case(tensors, ["index"], layout=layout)


def _read_index(m: _Maker) -> Case:
    layout, R = small_packed(m.call.option("layout")), m.call.rows[0]
    tensors: dict[str, Tensor | None] = {
        "index": index_of(_messages(m, layout, R), layout).clone(),
        "bitmap": m.garbage(R, layout.bitmap_words),
    }
    return m.case(tensors, ["bitmap"], layout=layout)


def _encoding(m: _Maker, layout: SketchLayout, capacity: int, levels: int, call: Call) -> Case:
    W = _DESTINATIONS
    shape = (W, layout.numel)
    grad = m.values(*shape, dtype=call.dtype("grad"))
    given = call.given("support") is not None
    threshold = m.threshold(grad, _share_of(layout, capacity) / layout.symbol.lanes)
    tensors = {
        "grad": m.spoilt(grad),
        "residual": m.optional(*shape, dtype=call.given("residual")),
        "threshold": threshold,
        "step": torch.exp2(torch.log2(threshold).floor() - 2),
        "seed": torch.tensor(
            [zlib.crc32(str(call).encode()) % 2**31], dtype=torch.int32, device="cpu"
        ),
        "index": m.garbage(W, layout.index_words),
        "cells": m.garbage(W, layout.cells),
        "counts": m.garbage(W, COUNTS),
        "support": m.bits(W, layout.groups, capacity) if given else None,
    }
    written = ["residual", "index", "cells", "counts"]
    return m.case(tensors, written, layout=layout, levels=levels, capacity=capacity)


def _encode(m: _Maker) -> Case:
    layout, capacity = small_sketch(m.call.option("layout"), m.call.option("capacity"))
    return _encoding(m, layout, capacity, m.call.option("levels"), m.call)


def _decode(m: _Maker) -> Case:
    large = m.call.option("layout")
    layout, keys = small_sketch(large, large.keys)
    W, symbol = max(2, m.call.rows[0]), layout.symbol
    out, residual = m.call.dtype("out"), m.call.given("residual")
    # The messages of W ranks, encoded as rows for W destinations.
    x = m.values(W, layout.numel, dtype=torch.float32)
    levels = symbol.levels(W)
    threshold = m.threshold(x, 0.5 * _share_of(layout, keys // W) / symbol.lanes)
    index = m.garbage(W, layout.index_words)
    cells = m.garbage(W, layout.cells)
    step = torch.exp2(torch.log2(threshold.mean()).floor() - 2).expand(W).contiguous()
    seed = torch.tensor([12345], dtype=torch.int32, device="cpu")
    m.reference.encode(
        x, None, threshold, step, seed, index, cells, m.garbage(W, COUNTS),
        layout=layout, levels=levels, capacity=keys // W,
    )  # fmt: skip
    tensors = {
        "index": index,
        "cells": cells.sum(0, dtype=cells.dtype),
        "step": step[:1].clone(),
        "seed": seed,
        "out": m.garbage(layout.numel, dtype=out),
        "residual": m.optional(layout.numel, dtype=residual),
        "stats": m.garbage(2),
    }
    return m.case(tensors, ["out", "residual", "stats"], layout=layout)


def _symbols(m: _Maker, layout: SketchLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Symbols, bitmap and seed."""
    symbols = (4 * m.values(1, layout.groups, dtype=torch.float32)[0]).to(torch.int32)
    bitmap = m.bits(1, layout.groups, layout.keys)[0]
    return symbols, bitmap, torch.tensor([54321], dtype=torch.int32, device="cpu")


def _insert(m: _Maker) -> Case:
    layout, _ = small_sketch(m.call.option("layout"), 0)
    symbols, bitmap, seed = _symbols(m, layout)
    tensors: dict[str, Tensor | None] = {
        "symbols": symbols,
        "index": bitmap,
        "seed": seed,
        "cells": m.garbage(layout.cells),
    }
    return m.case(tensors, ["cells"], layout=layout)


def _peel(m: _Maker) -> Case:
    layout, _ = small_sketch(m.call.option("layout"), 0)
    symbols, bitmap, seed = _symbols(m, layout)
    cells = m.garbage(layout.cells)
    m.reference.insert(symbols, bitmap, seed, cells, layout=layout)
    tensors: dict[str, Tensor | None] = {"cells": cells, "index": bitmap, "seed": seed}
    return m.case(tensors, [], layout=layout)


def _undo_lag(m: _Maker) -> Case:
    n = 4 * 1024 + 16 + m.call.rest
    tensors: dict[str, Tensor | None] = {
        "decoded": m.spoilt(m.values(1, n, dtype=torch.float32))[0],
        "sent": m.values(n, dtype=torch.float32),
        "out": m.garbage(n, dtype=m.call.dtype("out")),
        "weights": torch.tensor([0.65, 0.35], dtype=torch.float32, device="cpu"),
    }
    return m.case(tensors, ["sent", "out"])


def _steer(m: _Maker) -> Case:
    segments, destinations = m.call.rows
    # More than one program has threads for.
    segments += 128 // destinations
    shape = segments, destinations
    # Counts near the target, far from it, and zero; few or many saturated.
    counts = m.uniform(*shape, COUNTS) * torch.exp2(11 * m.uniform(*shape, 1))
    counts[..., SATURATED] *= torch.exp2(-12 * m.uniform(*shape))
    counts[m.uniform(*shape) < 0.1] = 0
    counts[m.uniform(*shape) < 0.1, ABOVE] = 0
    scale = torch.exp2((4 * m.uniform(segments)).floor())
    scale[::7] = 0
    state = torch.empty(STATES, *shape, dtype=torch.float32, device="cpu")
    state[THRESHOLD] = torch.exp2(20 * m.uniform(*shape) - 15)
    state[BOOST] = torch.exp2((3 * m.uniform(*shape)).floor())
    state[BIAS], state[EXPONENT] = 1 + m.uniform(*shape), 1 / 32 + m.uniform(*shape) / 3
    state[SIDE] = (3 * m.uniform(*shape)).floor() - 1
    state[STEP] = torch.nan
    tensors: dict[str, Tensor | None] = {
        "counts": counts.int(),
        "target": 700 * (0.5 + m.uniform(segments)),
        "max_boost": torch.exp2((3 * m.uniform(segments)).floor()),
        "scale": scale,
        "state": state,
    }
    return m.case(tensors, ["state"])


_MAKERS: dict[str, Callable[[_Maker], Case]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "quantize_matrix": _quantize_matrix,
    "dequantize_matrix": _dequantize_matrix,
    "pack": _pack,
    "unpack": _unpack,
    "select": _select,
    "write_index": _write_index,
    "read_index": _read_index,
    "undo_lag": _undo_lag,
    "steer": _steer,
    "encode": _encode,
    "decode": _decode,
    "insert": _insert,
    "peel": _peel,
}

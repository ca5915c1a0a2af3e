"""Small inputs for a call of an operator: random, with zeros, large ones and what is not finite.

Messages to be decoded are made by the reference. The check before training takes the usual inputs;
tests take others, too (:class:`Inputs`).
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
from tagc.selfcheck.placement import GARBAGE, is_intact
from tagc.selfcheck.small import (
    small_blocks,
    small_matrices,
    small_matrix,
    small_packed,
    small_sketch,
)

# What gradients have here and there: beyond sums, next to zero, and not finite.
_ROUGH = (torch.nan, torch.inf, -torch.inf, 3.4028234e38, -3.4028234e38, 1e-45, -0.0)
# A threshold that nothing reaches.
_OUT_OF_REACH = 2.0**100


@dataclass(frozen=True)
class Inputs:
    """What is in the tensors of a case.

    Attributes:
        kind: ``usual``, or ``rough`` with magnitudes of all sizes and whatever is not finite, or
            ``ties`` of few different numbers, all finite.
        above: share of a row's groups that reach the threshold; default: a fifth more than fit.
        destinations: rows of an encoding; what depends on them is a row's stride, but for matrices.
        elements: of a row, where no layout says it; default: those of a few programs.
        small: whether layouts are made small, see :mod:`tagc.selfcheck.small`.
        share: part of the gradient that is sent at once, of which the lag is undone.
        seed: other numbers for another one.
    """

    kind: str = "usual"
    above: float | None = None
    destinations: int = 2
    elements: int | None = None
    small: bool = True
    share: float = 0.35
    seed: int = 0


USUAL = Inputs()


@dataclass(frozen=True)
class Case:
    """Arguments of one call.

    Attributes:
        call: with layouts that are small.
        tensors: by argument, on the CPU; those written hold garbage, or what is updated.
        written: names of those.
        scratch: names of those that may hold anything afterwards.
    """

    call: Call
    tensors: dict[str, Tensor | None]
    written: tuple[str, ...]
    scratch: tuple[str, ...] = ()

    def run(self, ops: Ops, place: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """What the operator of ``ops`` returns, and its arguments afterwards, on the CPU.

        Args:
            place: copies a tensor to where it is to be.

        Raises:
            RuntimeError: if the operator wrote beside a tensor.
        """
        placed = {name: None if x is None else place(x) for name, x in self.tensors.items()}
        returned = getattr(ops, self.call.operator)(**placed, **dict(self.call.options))
        results = {name: x for name, x in placed.items() if x is not None}
        for name, x in results.items():
            if not is_intact(x):
                raise RuntimeError(f"it wrote beside {name!r}")
        results |= {f"result {i}": x for i, x in enumerate(returned or ())}
        return {name: x.cpu() for name, x in results.items() if name not in self.scratch}


def case_of(call: Call, inputs: Inputs = USUAL) -> Case:
    """The same inputs every time."""
    name = str(call) if inputs == USUAL else f"{call} {inputs}"
    generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(name.encode()))
    return _MAKERS[call.operator](_Maker(call, inputs, generator))


class _Maker:
    """Makes the tensors of one call."""

    def __init__(self, call: Call, inputs: Inputs, generator: torch.Generator) -> None:
        self.call, self.inputs, self._generator = call, inputs, generator
        self.reference = get_ops("cpu", "reference")

    def blocks(self) -> BlockLayout:
        """The layout of the call, made small if it is to be; and so on."""
        layout = self.call.option("layout")
        return small_blocks(layout) if self.inputs.small else layout

    def packed(self) -> PackedLayout:
        layout = self.call.option("layout")
        return small_packed(layout) if self.inputs.small else layout

    def sketch(self, capacity: int) -> tuple[SketchLayout, int]:
        layout = self.call.option("layout")
        return small_sketch(layout, capacity) if self.inputs.small else (layout, capacity)

    def case(
        self, tensors: dict[str, Tensor | None], written: Iterable[str], **options: object
    ) -> Case:
        """A case of the call, with these options instead of its own."""
        merged = tuple((dict(self.call.options) | options).items())
        return Case(replace(self.call, options=merged), tensors, tuple(written))

    def values(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Normal numbers of very different sizes with a few zeros; all finite."""
        x = self._normal(*shape)
        x *= torch.exp(2 * self._normal(*shape[:-1], 1))
        if self.inputs.kind == "rough":
            x *= torch.exp2(120 * self.uniform(*shape) - 60)
        if self.inputs.kind == "ties":
            x = (2 * x).round().clamp(-8, 8) / 2
        x[self.uniform(*shape) < 0.05] = 0
        largest = torch.finfo(dtype).max
        return x.clamp(-largest, largest).to(dtype)

    def matrices(self, D: int, layout: MatrixLayout, dtype: torch.dtype) -> Tensor:
        """Likewise, ``[D, numel]``; rows and columns have sizes of their own."""
        shape = D, layout.count, layout.rows, layout.columns
        x = self.values(*shape, dtype=torch.float32)
        if self.inputs.kind != "ties":
            x *= torch.exp(self._normal(*shape[:2], 1, shape[3]))
        largest = torch.finfo(dtype).max
        return x.flatten(1).clamp(-largest, largest).to(dtype)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float32, device="cpu", generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        """Float32 in ``[0, 1)``."""
        return torch.rand(*shape, dtype=torch.float32, generator=self._generator, device="cpu")

    def optional(self, *shape: int, dtype: torch.dtype | None) -> Tensor | None:
        """:meth:`values`, or None without a dtype."""
        return None if dtype is None else self.values(*shape, dtype=dtype)

    def spoilt(self, x: Tensor) -> Tensor:
        """``x`` ``[R, n]`` with one element of the last row that is not finite, or with what rough
        inputs have, or as it is where all are to be finite."""
        if x.numel() and self.inputs.kind == "usual":
            x[-1, x.shape[-1] // 3] = torch.inf
        if x.numel() and self.inputs.kind == "rough":
            places = (x.numel() * self.uniform(len(_ROUGH))).long()
            x.view(-1)[places] = torch.tensor(_ROUGH, dtype=torch.float32, device="cpu").to(x.dtype)
        return x

    def bits(self, rows: int, groups: int, marked: int) -> Tensor:
        """Bitmaps ``[rows, ...]`` with ``marked`` of ``groups`` bits each."""
        order = self.uniform(rows, groups).argsort(-1)
        return to_bitmap(order < marked)

    def support(self, rows: int, groups: int, marked: int) -> Tensor:
        """Likewise, and the bits past the last group, which mean nothing."""
        bitmap = self.bits(rows, groups, marked)
        if groups % 32:
            bitmap[:, -1] |= torch.tensor(-1 << groups % 32, dtype=torch.int32, device="cpu")
        return bitmap

    def garbage(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """What an output holds before."""
        if dtype.is_floating_point:
            return torch.full(shape, torch.nan, dtype=dtype, device="cpu")
        return torch.full(shape, GARBAGE, dtype=dtype, device="cpu")

    def threshold(self, x: Tensor, share: float, lanes: int) -> Tensor:
        """``[R]``, which about ``share`` of a row's groups of ``lanes`` reach, or the share that
        the inputs ask for."""
        if self.inputs.above is not None:
            share = self.inputs.above
        size = x.float().abs().nan_to_num(0, 0, 0)
        n = size.shape[-1]
        if share == 0:
            return torch.full((len(x),), _OUT_OF_REACH, dtype=torch.float32, device="cpu")
        share /= lanes
        place = max(1, n - round(share * n))
        if not n:
            return torch.ones(len(x), dtype=torch.float32, device="cpu")
        return size.kthvalue(place, -1).values.clamp(min=2.0**-20)


def _quantize(m: _Maker) -> Case:
    layout, R = m.blocks(), m.inputs.destinations
    case = _elementwise(m, layout, R, lambda dtype: m.values(R, layout.numel, dtype=dtype))
    if m.call.given("dither") is not None:
        # Of either sign, and another for each row.
        case.tensors["dither"] = torch.tensor(
            [GARBAGE, ~GARBAGE][: m.inputs.destinations], dtype=torch.int32, device="cpu"
        )
    return case


def _quantize_matrix(m: _Maker) -> Case:
    layout, (D,) = m.call.option("layout"), m.call.rows
    if m.inputs.small:
        layout, D = small_matrices(layout, D)
    return _elementwise(m, layout, D, lambda dtype: m.matrices(D, layout, dtype))


def _elementwise(
    m: _Maker,
    layout: BlockLayout | MatrixLayout,
    destinations: int,
    values: Callable[[torch.dtype], Tensor],
) -> Case:
    residual = m.call.given("residual")
    tensors = {
        "grad": m.spoilt(values(m.call.dtype("grad"))),
        "residual": None if residual is None else values(residual),
        "message": m.garbage(destinations, layout.words),
    }
    return m.case(tensors, ["residual", "message"], layout=layout)


def _dequantize(m: _Maker) -> Case:
    layout = m.blocks()
    return _sent(m, layout, lambda D: m.values(D, layout.numel, dtype=torch.float32))


def _dequantize_matrix(m: _Maker) -> Case:
    layout = small_matrix(m.call.option("layout")) if m.inputs.small else m.call.option("layout")
    return _sent(m, layout, lambda D: m.matrices(D, layout, torch.float32))


def _sent(m: _Maker, layout: BlockLayout | MatrixLayout, values: Callable[[int], Tensor]) -> Case:
    """Messages for at most two results."""
    K, R = min(m.call.rows[0], 2), m.call.rows[1]
    message = m.garbage(K * R, layout.words)
    quantize = getattr(m.reference, m.call.operator.removeprefix("de"))
    quantize(m.spoilt(values(K * R)), None, message, layout=layout, average=0.0)
    tensors: dict[str, Tensor | None] = {
        "message": message.view(K, R, -1),
        "out": m.garbage(K, layout.numel, dtype=m.call.dtype("out")),
    }
    return m.case(tensors, ["out"], layout=layout)


def _share_of(layout: PackedLayout | SketchLayout, capacity: int) -> float:
    """More than fit, so that some have to go."""
    return min(1.0, 1.2 * capacity / max(1, layout.groups))


def _pack(m: _Maker) -> Case:
    layout, R = m.packed(), m.inputs.destinations
    grad = m.values(R, layout.numel, dtype=m.call.dtype("grad"))
    tensors = {
        "grad": m.spoilt(grad),
        "residual": m.optional(R, layout.numel, dtype=m.call.given("residual")),
        "threshold": m.threshold(grad, _share_of(layout, layout.capacity), layout.group),
        "message": m.garbage(R, layout.words),
        "counts": m.garbage(R, COUNTS),
    }
    return m.case(tensors, ["residual", "message", "counts"], layout=layout)


def _select(m: _Maker) -> Case:
    layout, R = m.packed(), m.inputs.destinations
    x = m.values(R, layout.numel, dtype=m.call.dtype("x"))
    tensors: dict[str, Tensor | None] = {
        "x": m.spoilt(x),
        "threshold": m.threshold(x, _share_of(layout, layout.capacity), layout.group),
        "bitmap": m.garbage(R, layout.bitmap_words),
        "counts": m.garbage(R, COUNTS),
    }
    return m.case(tensors, ["bitmap", "counts"], layout=layout)


def _messages(m: _Maker, layout: PackedLayout, R: int) -> Tensor:
    x = m.values(R, layout.numel, dtype=torch.float32)
    message, counts = m.garbage(R, layout.words), m.garbage(R, COUNTS)
    threshold = m.threshold(x, 0.9 * _share_of(layout, layout.capacity), layout.group)
    m.reference.pack(x, None, threshold, message, counts, layout=layout)
    return message


def _unpack(m: _Maker) -> Case:
    layout = m.packed()
    (R,) = m.call.rows
    tensors: dict[str, Tensor | None] = {
        "message": _messages(m, layout, R),
        "out": m.garbage(layout.numel, dtype=m.call.dtype("out")),
    }
    return m.case(tensors, ["out"], layout=layout)


def _write_index(m: _Maker) -> Case:
    layout, R = m.packed(), m.call.rows[0]
    tensors: dict[str, Tensor | None] = {
        "bitmap": m.bits(R, layout.groups, layout.capacity),
        "index": m.garbage(R, layout.index_words),
    }
    return m.case(tensors, ["index"], layout=layout)


def _read_index(m: _Maker) -> Case:
    layout, R = m.packed(), m.call.rows[0]
    tensors: dict[str, Tensor | None] = {
        "index": index_of(_messages(m, layout, R), layout).clone(),
        "bitmap": m.garbage(R, layout.bitmap_words),
    }
    return m.case(tensors, ["bitmap"], layout=layout)


def _encoding(m: _Maker, layout: SketchLayout, capacity: int, levels: int, call: Call) -> Case:
    W = m.inputs.destinations
    shape = (W, layout.numel)
    grad = m.values(*shape, dtype=call.dtype("grad"))
    given = call.given("support") is not None
    threshold = m.threshold(grad, _share_of(layout, capacity), layout.symbol.lanes)
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
        "support": m.support(W, layout.groups, capacity) if given else None,
    }
    written = ["residual", "index", "cells", "counts"]
    return m.case(tensors, written, layout=layout, levels=levels, capacity=capacity)


def _encode(m: _Maker) -> Case:
    layout, capacity = m.sketch(m.call.option("capacity"))
    return _encoding(m, layout, capacity, m.call.option("levels"), m.call)


def _decode(m: _Maker) -> Case:
    layout, keys = m.sketch(m.call.option("layout").keys)
    W, symbol = max(2, m.call.rows[0]), layout.symbol
    out, residual = m.call.dtype("out"), m.call.given("residual")
    # What that many ranks send, encoded like the rows for that many destinations.
    x = m.values(W, layout.numel, dtype=torch.float32)
    levels = symbol.levels(W)
    threshold = m.threshold(x, 0.5 * _share_of(layout, keys // W), symbol.lanes)
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
    return replace(m.case(tensors, ["out", "residual", "stats"], layout=layout), scratch=("cells",))


def _symbols(m: _Maker, layout: SketchLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Symbols, bitmap and seed."""
    symbols = (4 * m.values(1, layout.groups, dtype=torch.float32)[0]).to(torch.int32)
    bitmap = m.bits(1, layout.groups, layout.keys)[0]
    return symbols, bitmap, torch.tensor([54321], dtype=torch.int32, device="cpu")


def _insert(m: _Maker) -> Case:
    layout, _ = m.sketch(0)
    symbols, bitmap, seed = _symbols(m, layout)
    tensors: dict[str, Tensor | None] = {
        "symbols": symbols,
        "index": bitmap,
        "seed": seed,
        "cells": m.garbage(layout.cells),
    }
    return m.case(tensors, ["cells"], layout=layout)


def _peel(m: _Maker) -> Case:
    layout, _ = m.sketch(0)
    symbols, bitmap, seed = _symbols(m, layout)
    cells = m.garbage(layout.cells)
    m.reference.insert(symbols, bitmap, seed, cells, layout=layout)
    tensors: dict[str, Tensor | None] = {"cells": cells, "index": bitmap, "seed": seed}
    return m.case(tensors, [], layout=layout)


def _undo_lag(m: _Maker) -> Case:
    n = 4 * 1024 + 16 + m.call.rest if m.inputs.elements is None else m.inputs.elements
    share = m.inputs.share
    tensors: dict[str, Tensor | None] = {
        "decoded": m.spoilt(m.values(1, n, dtype=torch.float32))[0],
        "sent": m.values(n, dtype=torch.float32),
        "out": m.garbage(n, dtype=m.call.dtype("out")),
        "weights": torch.tensor([1 - share, share], dtype=torch.float32, device="cpu"),
    }
    return m.case(tensors, ["sent", "out"])


def _steer(m: _Maker) -> Case:
    segments, destinations = m.call.rows
    # More than a program has threads for.
    segments += 128 // destinations
    shape = segments, destinations
    # About the target, far from it, and zeros; few or many that saturate.
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

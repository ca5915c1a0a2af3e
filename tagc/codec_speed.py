"""How fast codecs run on this device, in seconds per element."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tagc.codec_plans import (
    CodecPlan,
    DensePlan,
    MatrixPlan,
    PackedPlan,
    QuantizedPlan,
    SketchPlan,
    capacity_for,
)
from tagc.codecs.dense import elements_of
from tagc.costs import Speed, speed_key
from tagc.layout import plan_layout
from tagc.ops import COUNTS, Ops
from tagc.packed import HEADER, plan_packed
from tagc.quantize import quantization_step
from tagc.threshold import sampled_threshold

# Rows stand for ranks, so that decoding adds up messages as it does in training.
_ROWS = 4
# Elements of all rows; a GPU needs more for its launches not to count.
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
_REPEATS = 5

Step = Callable[[], object]


@dataclass(frozen=True)
class _Sample:
    """Inputs that all codecs share."""

    ops: Ops
    grad: Tensor
    residual: Tensor | None
    average: float

    @property
    def columns(self) -> int:
        return self.grad.shape[1]

    def empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.grad.device)

    def threshold(self, group: int, density: float) -> Tensor:
        return sampled_threshold(self.grad, group, density).clamp(min=1e-6)


def measure_speeds(
    codecs: Iterable[CodecPlan],
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    *,
    repeats: int = _REPEATS,
) -> dict[str, Speed]:
    """Speed of every codec on gradients (or parameters) of ``dtype``, by :func:`speed_key`."""
    speeds: dict[str, Speed] = {}
    for codec in codecs:
        key = speed_key(codec)
        if key not in speeds:
            speeds[key] = _measure(codec, ops, device, dtype, repeats)
    return speeds


def _measure(
    codec: CodecPlan, ops: Ops, device: torch.device, dtype: torch.dtype, repeats: int
) -> Speed:
    numel = _ELEMENTS.get(device.type, _ELEMENTS["cuda"])
    generator = torch.Generator(device).manual_seed(0)
    grad = torch.randn(_ROWS, numel // _ROWS, generator=generator, device=device).to(dtype)
    stored = codec.feedback
    residual = None if stored is None else torch.zeros_like(grad, dtype=stored.working)
    sample = _Sample(ops, grad, residual, stored.average if stored else 0.0)
    if isinstance(codec, SketchPlan):
        encode, decode, decoded = (*_sketch(codec, sample), sample.columns)
    else:
        make = {
            DensePlan: _dense,
            MatrixPlan: _matrix,
            QuantizedPlan: _quantized,
            PackedPlan: _packed,
        }[type(codec)]
        encode, decode, decoded = (*make(codec, sample), numel)

    def restore() -> None:
        # A residual that grew from call to call would select more than ever fits.
        if residual is not None:
            residual.zero_()

    return Speed(
        encode=_seconds(encode, restore, device, repeats) / numel,
        decode=_seconds(decode, restore, device, repeats) / decoded,
    )


def _seconds(run: Step, before: Step, device: torch.device, repeats: int) -> float:
    taken = []
    for i in range(repeats + 1):
        before()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i:  # the first call compiles, or warms up
            taken.append(time.perf_counter() - start)
    return min(taken)  # what else the machine does only ever adds


def _dense(codec: DensePlan, s: _Sample) -> tuple[Step, Step]:
    codec = replace(codec, numel=s.columns)
    message, out = s.empty(_ROWS, codec.words), torch.empty_like(s.grad[0])
    elements = elements_of(message, codec)
    return (
        lambda: elements.copy_(s.grad),
        lambda: out.copy_(elements.sum(0, dtype=torch.float32) / _ROWS),
    )


def _quantized(codec: QuantizedPlan, s: _Sample) -> tuple[Step, Step]:
    layout = replace(codec.layout, numel=s.columns)
    message, out = s.empty(_ROWS, layout.words), torch.empty_like(s.grad[:1])
    return (
        lambda: s.ops.quantize(s.grad, s.residual, message, layout=layout, average=s.average),
        lambda: s.ops.dequantize(message[None], out, layout=layout, divisor=_ROWS),
    )


def _matrix(codec: MatrixPlan, s: _Sample) -> tuple[Step, Step]:
    columns = 1 << (s.columns.bit_length() // 2)
    layout = replace(codec.layouts[0], rows=s.columns // columns, columns=columns)
    grad = s.grad[:, : layout.numel]
    residual = None if s.residual is None else s.residual[:, : layout.numel]
    message, out = s.empty(_ROWS, layout.words), torch.empty_like(s.grad[0, : layout.numel])
    return (
        lambda: s.ops.quantize_matrix(grad, residual, message, layout=layout, average=s.average),
        lambda: s.ops.dequantize_matrix(message, out, layout=layout, divisor=_ROWS),
    )


def _packed(codec: PackedPlan, s: _Sample) -> tuple[Step, Step]:
    old = codec.layout
    groups = -(-s.columns // old.group)
    layout = plan_packed(
        s.columns,
        capacity=capacity_for(codec.target, groups),
        group=old.group,
        bits=old.values.bits,
        block=old.values.block,
    )
    message, out = s.empty(_ROWS, layout.words), torch.empty_like(s.grad[0])
    counts, threshold = s.empty(_ROWS, COUNTS), s.threshold(layout.group, codec.target)
    support = None
    if codec.shared:
        support = s.empty(_ROWS, layout.bitmap_words)
        s.ops.select(s.grad.float(), threshold, support, counts, layout=layout)
        index = message[:, HEADER : HEADER + layout.index_words]
        s.ops.write_index(support, index, layout=layout)

    def encode() -> None:
        s.ops.pack(s.grad, s.residual, threshold, support, message, counts, layout=layout)

    def decode() -> None:
        own = None if support is None else support[0]
        s.ops.unpack(message, own, out, layout=layout, divisor=_ROWS)
        if support is not None:
            index = message[:, HEADER : HEADER + layout.index_words]
            s.ops.read_index(index, support, layout=layout)

    return encode, decode


def _sketch(codec: SketchPlan, s: _Sample) -> tuple[Step, Step]:
    groups = -(-s.columns // codec.symbol.lanes)
    capacity = capacity_for(codec.target, groups)
    layout = plan_layout(s.columns, codec.symbol, capacity if codec.shared else _ROWS * capacity)
    threshold = s.threshold(codec.symbol.lanes, codec.target)
    step = quantization_step(threshold, codec.symbol, codec.levels)
    index, counts = s.empty(_ROWS, layout.index_words), s.empty(_ROWS, COUNTS)
    cells = s.empty(_ROWS, layout.cells, dtype=codec.symbol.dtype)
    total, stats = torch.empty_like(cells[0]), s.empty(2)
    seed, out = torch.zeros(1, dtype=torch.int32, device=s.grad.device), torch.empty_like(s.grad[0])
    support = None

    def encode() -> None:
        s.ops.encode(
            s.grad, s.residual, threshold, step, seed, index, cells, counts,
            layout=layout, levels=codec.levels, capacity=capacity, support=support,
        )  # fmt: skip

    if codec.shared:
        encode()
        support = index[:1, : layout.words].repeat(_ROWS, 1)
        index = torch.cat([support, index[:, layout.words :]], 1)

    def decode() -> None:
        torch.sum(cells, 0, dtype=total.dtype, out=total)  # decoding consumes them
        s.ops.decode(index, total, step[:1], seed, out, None, stats, layout=layout, divisor=_ROWS)

    return encode, decode

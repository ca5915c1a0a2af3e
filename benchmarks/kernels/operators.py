"""The cases to measure, one operator on one input each, beside the eager reference. An operator is
right if it has the reference's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tagc.codecs.sketch.plan import SLACK, step_scale
from tagc.ops import COUNTS, Ops, get_ops, reference
from tagc.ops.blocks import BlockLayout
from tagc.ops.exact import ExactLayout
from tagc.ops.matrix import BITS, MatrixLayout
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS
from tagc.ops.thresholds import step_of

# Bits of a matrix's code, by name.
CODES = {f"int{bits}": bits for bits in sorted(BITS, reverse=True)}
# The operators, and what of a case each depends on besides its size and the gradient's dtype.
OPS = {
    "encode": ("residual", "density", "symbol"),
    "decode": ("residual", "density", "symbol"),
    "quantize": ("residual", "bits"),
    "dequantize": ("bits",),
    "quantize_matrix": ("residual", "code"),
    "dequantize_matrix": ("code",),
    "encode_exact": ("rate",),
    "decode_exact": ("rate",),
}
_DTYPES = ("float32", "bfloat16")
_AXES: dict[str, tuple[Any, ...]] = {
    "residual": _DTYPES,
    "density": (0.05, 0.01),
    "symbol": ("int8x4", "int16x2", "int32x1"),
    "bits": (4, 8),
    "code": tuple(CODES),
    "rate": (3e-4, 3e-3, 1e-5),
}
# log2 of the number of elements, the one at which the other axes vary first.
_SIZES = {"cpu": (22, 24, 20), "cuda": (26, 28, 24, 22, 20)}
_QUICK = {"cpu": (20, 22), "cuda": (22, 26)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operator on one input.

    Attributes:
        op: a name in ``OPS``.
        numel: elements of the gradient of one destination, a power of 2.
        gradient: dtype of the gradient.
        residual, density, symbol, bits, code, rate: dtype of the residual, fraction kept, symbol,
            bits of a quantized element, code of a matrix (a key of ``CODES``), learning rate of
            the last step; None where the operator has no such thing.
    """

    op: str
    numel: int
    gradient: str = "float32"
    residual: str | None = None
    density: float | None = None
    symbol: str | None = None
    bits: int | None = None
    code: str | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        """What ``--filter`` matches, such as ``encode/2^22/float32/float32/5%/int8x4``."""
        size = f"2^{self.numel.bit_length() - 1}"
        density = self.density and f"{100 * self.density:g}%"
        bits = self.bits and f"int{self.bits}"
        rate = self.rate and f"{self.rate:g}"
        parts = (self.op, size, self.gradient, self.residual, density, self.symbol, bits)
        return "/".join(str(part) for part in (*parts, self.code, rate) if part is not None)


def select(
    device: str, glob: str = "*", sizes: Sequence[int] | None = None, *, quick: bool = False
) -> list[Case]:
    """The cases, most telling ones first, each once: all sizes and densities with the first value
    of every other axis, then all values of each axis at one size.

    Args:
        device: ``cpu`` or ``cuda``.
        glob: of :attr:`Case.name`, or of a part of it.
        sizes: log2 of the numbers of elements, in place of the device's own.
        quick: two small sizes, and no other axis than the density.
    """
    cases = dict.fromkeys(_cases(sizes or (_QUICK if quick else _SIZES)[device], quick))
    return [case for case in cases if fnmatchcase(case.name, f"*{glob}*")]


def _cases(sizes: Sequence[int], quick: bool) -> Iterator[Case]:
    for size, density, op in product(sizes, _AXES["density"], OPS):
        yield _case(op, size, density=density)
    if quick:
        return
    for axis in ("symbol", "bits", "code", "rate"):
        for value, op in product(_AXES[axis], OPS):
            yield _case(op, sizes[0], **{axis: value})
    for gradient, residual, op in product(_DTYPES, _DTYPES, OPS):
        yield _case(op, sizes[0], gradient=gradient, residual=residual)


def _case(op: str, size: int, gradient: str = "float32", **values: Any) -> Case:
    chosen = {axis: values.get(axis, _AXES[axis][0]) for axis in OPS[op]}
    if "rate" in chosen:
        gradient = "bfloat16"  # of the parameters: it has no gradient
    return Case(op=op, numel=1 << size, gradient=gradient, **chosen)


RANKS = 2  # whose messages the owner adds up
_MOST_COLUMNS = 4096
_SAMPLE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an operator does with tensors that are made beforehand.

    Attributes:
        run: the work, by an implementation, on :attr:`tensors`.
        tensors: what a run reads and changes; every contender has copies of its own.
        results: the indices of those that it writes.
        floor: bytes that any implementation must read or write.
    """

    run: Callable[[Ops, Sequence[Tensor]], object]
    tensors: Sequence[Tensor]
    results: Sequence[int]
    floor: int


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do a case's work: what the clock measures, what restores its inputs outside the
    clock, and what a run writes."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    results: Sequence[Tensor] = ()


def contenders(work: Work, device: torch.device) -> dict[str, Contender]:
    """The reference and ours, on one input."""
    ours = get_ops(device, "triton" if device.type == "cuda" else "cpu")
    return {"reference": _contender(work, reference), "tagc": _contender(work, ours)}


def _contender(work: Work, ops: Ops) -> Contender:
    mine = [tensor.clone() for tensor in work.tensors]

    def before() -> None:
        for tensor, former in zip(mine, work.tensors, strict=True):
            tensor.copy_(former)

    results = [mine[i] for i in work.results]
    return Contender(run=partial(work.run, ops, mine), before=before, results=results)


def problem(case: Case, device: torch.device) -> Work:
    """A case on its device: normal gradients, and a residual half as large, ``[1, n]`` each; or
    parameters before and after a step."""
    if case.rate is not None:
        return _exact(case, device)
    generator = torch.Generator(device).manual_seed(0)

    def normal(dtype: str) -> Tensor:
        x = torch.randn((1, case.numel), generator=generator, device=device)
        return x.to(getattr(torch, dtype))

    grad, left = normal(case.gradient), normal(case.residual or "float32").mul_(0.5)
    return _MAKERS[case.op](case, grad, left)


# Of an implementation: writes the parts of a message, each `[1, words]`, and updates the residual.
_Send = Callable[[Ops, Tensor, Sequence[Tensor]], object]
# Reads the parts of the messages of some ranks, which it may overwrite, and writes the shard `[n]`.
_Read = Callable[[Ops, Sequence[Tensor], Tensor], object]


def _one_end(
    case: Case, grad: Tensor, residual: Tensor, *, parts: Sequence[int], send: _Send, read: _Read,
    floor: int, ranks: int = RANKS,
) -> Work:  # fmt: skip
    """The end of a codec that the case measures. ``parts``: int32 words of each part of a message;
    ``floor``: bytes of a message that any codec would need to send the same."""
    sent = [torch.full((1, n), -1, dtype=torch.int32, device=grad.device) for n in parts]
    size = grad.element_size()
    if not case.op.startswith("de"):
        return Work(
            run=lambda ops, tensors: send(ops, tensors[0], tensors[1:]),
            tensors=(residual, *sent),
            results=range(1 + len(sent)),
            floor=case.numel * (size + 2 * residual.element_size()) + floor,
        )
    send(reference, residual, sent)
    out = torch.full_like(grad[0], torch.nan)
    return Work(
        run=lambda ops, tensors: read(ops, tensors[1:], tensors[0]),
        tensors=(out, *(part.expand(ranks, -1).contiguous() for part in sent)),
        results=(0,),
        floor=case.numel * size + ranks * floor,
    )


def _sketch(case: Case, grad: Tensor, residual: Tensor) -> Work:
    """Bitmap, cells and counts; of one rank, as more ranks' keys are the same work. The floor has
    the bitmap only: cells are the price of this codec, not of the task."""
    assert case.symbol is not None
    assert case.density is not None
    symbol = SYMBOLS[case.symbol]
    groups = case.numel // symbol.lanes
    x = grad[0].float() + residual[0].float()
    size = x.view(groups, -1)[:: max(1, groups // _SAMPLE)].abs().amax(1)
    # [1], what the share `density` of the groups exceeds.
    threshold = size.sort(descending=True).values[round(case.density * (size.numel() - 1))][None]
    capacity, levels = int(SLACK * case.density * groups) + 1, symbol.levels(RANKS)
    step = step_of(threshold, step_scale(symbol, levels))
    layout = plan_layout(case.numel, symbol, capacity)
    seed, stats = (torch.zeros(n, dtype=torch.int32, device=x.device) for n in (1, 2))

    def send(ops: Ops, residual: Tensor, message: Sequence[Tensor]) -> None:
        ops.encode(
            grad, residual, threshold, step, seed, *message,
            layout=layout, levels=levels, capacity=capacity,
        )  # fmt: skip

    def read(ops: Ops, message: Sequence[Tensor], out: Tensor) -> None:
        index, cells, _ = message
        ops.decode(index, cells[0], step, seed, out, None, stats, layout=layout, divisor=1)

    parts, floor = (layout.index_words, layout.cells, COUNTS), groups // 8
    return _one_end(case, grad, residual, parts=parts, send=send, read=read, floor=floor, ranks=1)


def _quantized(case: Case, grad: Tensor, residual: Tensor) -> Work:
    """In blocks of 256, or a matrix as nearly square as powers of two are, with at most 4096
    columns. A matrix's scales need a pass over gradient and residual before the one that rounds;
    the floor has one."""
    if case.code is None:
        assert case.bits is not None
        layout: Any = BlockLayout(numel=case.numel, bits=case.bits)
    else:
        columns = min(_MOST_COLUMNS, 1 << case.numel.bit_length() // 2)
        layout = MatrixLayout(rows=case.numel // columns, columns=columns, bits=CODES[case.code])
    name = case.op.removeprefix("de")

    def send(ops: Ops, residual: Tensor, message: Sequence[Tensor]) -> None:
        getattr(ops, name)(grad, residual, *message, layout=layout, average=0.0)

    def read(ops: Ops, messages: Sequence[Tensor], out: Tensor) -> None:
        getattr(ops, f"de{name}")(messages[0][None], out[None], layout=layout, divisor=RANKS)

    words = layout.words
    return _one_end(case, grad, residual, parts=(words,), send=send, read=read, floor=4 * words)


def _exact(case: Case, device: torch.device) -> Work:
    """Parameters before and after changes of a tenth of the learning rate, which need about as many
    bits as AdamW's. Encoding measures first, as a rank does; the floor has one pass: old and new
    parameters, and message."""
    generator = torch.Generator(device).manual_seed(0)
    weights, change = (
        torch.randn((1, case.numel), generator=generator, device=device) for _ in range(2)
    )
    assert case.rate is not None
    old = weights.mul_(0.02).bfloat16()
    new = weights.add_(change, alpha=case.rate / 10).bfloat16()
    layout = ExactLayout(spans=(case.numel,), dtype=new.dtype)
    words, message = (
        torch.full((1, n), -1, dtype=torch.int32, device=device)
        for n in (layout.plan_words, layout.words)
    )

    def encode(ops: Ops, tensors: Sequence[Tensor]) -> None:
        ops.measure_exact(new, old, tensors[0], layout=layout)
        ops.encode_exact(new, old, *tensors, layout=layout)

    def decode(ops: Ops, tensors: Sequence[Tensor]) -> None:
        ops.decode_exact(*tensors, layout=layout)

    found = words.clone(), message.clone()
    encode(reference, found)
    total = int(found[0][0, 0])
    encodes = case.op == "encode_exact"
    return Work(
        run=encode if encodes else decode,
        tensors=(words, message) if encodes else (found[1], old),
        results=(1,),
        floor=4 * case.numel + 4 * total,
    )


_MAKERS = {op: _sketch if "density" in axes else _quantized for op, axes in OPS.items()}

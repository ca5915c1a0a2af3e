"""The operators of each codec, beside the eager reference and a clone of the gradient, and the
cases to measure: one operator on one input each.

A codec is how to write a message and how to add messages up. Both ends are right if what the
message says plus the residual is the gradient, and if they have the reference's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tagc.codecs.sketch.plan import SLACK, quantization_step
from tagc.ops import COUNTS, Ops, get_ops, reference
from tagc.ops.blocks import BlockLayout
from tagc.ops.exact import ExactLayout
from tagc.ops.matrix import BITS, GROUP, MatrixLayout
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS

# What a code of a matrix is, by name: bits of an element, or neighbours that share a code.
CODES = {f"int{bits}": {"bits": bits} for bits in sorted(BITS, reverse=True)}
CODES |= {f"group{GROUP}": {"group": GROUP}}
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
        parts = [self.op, size, self.gradient, self.residual, density, self.symbol, bits, self.code]
        parts.append(rate)
        return "/".join(part for part in parts if part is not None)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of the gradient and of the residual, which is float32 where a case has none."""
        return getattr(torch, self.gradient), getattr(torch, self.residual or "float32")


def select(
    device: str,
    patterns: Iterable[str] = (),
    sizes: Sequence[int] | None = None,
    *,
    quick: bool = False,
) -> list[Case]:
    """The cases, most telling ones first, each once: all sizes and densities with the first value
    of every other axis, then all values of each axis at one size.

    Args:
        device: ``cpu`` or ``cuda``.
        patterns: globs over :attr:`Case.name`, or parts of it; a case that matches any stays.
        sizes: log2 of the numbers of elements, in place of the device's own.
        quick: two small sizes, and no other axis than the density.
    """
    patterns = list(patterns)
    own = (_QUICK if quick else _SIZES)[device]
    return [
        case
        for case in dict.fromkeys(_cases(sizes or own, quick))
        if not patterns or any(fnmatchcase(case.name, f"*{pattern}*") for pattern in patterns)
    ]


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


# Ranks whose messages the owner adds up.
RANKS = 2
_MOST_COLUMNS = 4096
_SAMPLE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Row:
    """One destination's segment on the device: ``grad`` and ``residual`` ``[1, n]``, ``x`` ``[n]``
    float32, their sum."""

    grad: Tensor
    residual: Tensor
    x: Tensor


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How a row becomes a message, and messages a shard.

    Attributes:
        parts: int32 words of each part of a message.
        send: of an implementation, a residual ``[1, n]`` that it updates, and the parts
            ``[1, words]`` that it writes.
        read: of an implementation, the parts of ``ranks`` messages, which it may overwrite, and
            the shard ``[n]`` that it writes: their sum, divided by ``ranks``.
        floor: bytes of a message that any codec would need to send the same.
        exact: whether a float32 residual has all that the message does not say.
        facts: further entries for the result.
    """

    parts: Sequence[int]
    send: Callable[[Ops, Tensor, list[Tensor]], object]
    read: Callable[[Ops, list[Tensor], Tensor], object]
    floor: int
    ranks: int = RANKS
    exact: bool = True
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do a case's work.

    Attributes:
        run: what the clock measures.
        before: called ahead of every run, outside the clock, to restore inputs.
        check: after a run, says what is wrong with the result; None if it is right.
        note: which implementation this is.
        details: after a check, further entries for the result.
    """

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    check: Callable[[], str | None] = lambda: None
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)


def problem(
    case: Case, device: torch.device
) -> tuple[int, dict[str, Callable[[], Contender]], dict[str, Any]]:
    """A case on its device: the floor, makers of the contenders, further entries for the result.

    All contenders work on one input. The floor has the bytes that any implementation must read or
    write: gradient, residual and message, or messages and shard, which has the gradient's dtype.
    """
    if case.rate is not None:
        return _exact(case, device)
    row = make_row(case, device)
    make_codec, sends = _OPS[case.op]
    codec = make_codec(case, row)
    size = row.grad.element_size()
    if sends:
        floor = case.numel * (size + 2 * row.residual.element_size()) + codec.floor
    else:
        floor = case.numel * size + codec.ranks * codec.floor
    make = partial(_contender, row, codec, sends, [])
    return floor, _makers(make, device, row.grad), codec.facts


def _makers(
    make: Callable[[Ops, str], Contender], device: torch.device, row: Tensor
) -> dict[str, Callable[[], Contender]]:
    name, note = ("triton", "Triton") if device.type == "cuda" else ("cpu", "numba, one thread")
    return {
        # First, so that its results are there when others are checked.
        "reference": partial(make, reference, "eager torch"),
        "tagc": partial(make, get_ops(device, name), note),
        "clone": lambda: Contender(run=row.clone, note="the input"),
    }


def make_row(case: Case, device: torch.device) -> Row:
    """Normal gradients, and a residual half as large."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(dtype: torch.dtype, scale: float) -> Tensor:
        shape = (1, case.numel)
        return torch.randn(shape, generator=generator, device=device).mul_(scale).to(dtype)

    gradient, residual = case.dtypes
    grad, left = normal(gradient, 1.0), normal(residual, 0.5)
    return Row(grad=grad, residual=left, x=grad[0].float() + left[0].float())


def _contender(
    row: Row, codec: Codec, sends: bool, expected: list[Tensor], ops: Ops, note: str
) -> Contender:
    """One end of a codec. Every tensor is made here, none in a run."""
    device = row.grad.device
    sent = [torch.full((1, n), -1, dtype=torch.int32, device=device) for n in codec.parts]
    residual, details = row.residual.clone(), {}
    out = torch.full_like(row.x if sends else row.grad[0], torch.nan)

    def of_all_ranks() -> list[Tensor]:
        return [part.expand(codec.ranks, -1).clone() for part in sent]

    if sends:
        run = partial(codec.send, ops, residual, sent)
        changed = [(residual, row.residual)]
        results = [*sent, residual]
    else:
        codec.send(reference, residual, sent)
        messages = of_all_ranks()
        run, results = partial(codec.read, ops, messages, out), [out]
        changed = list(zip(messages, of_all_ranks(), strict=True))

    def before() -> None:
        for tensor, former in changed:
            tensor.copy_(former)

    def check() -> str | None:
        if sends:
            codec.read(reference, of_all_ranks(), out)
        halves = torch.bfloat16 in (out.dtype, residual.dtype)
        unit = 2.0**-8 if halves else 0.0 if codec.exact else 2.0**-23
        allowed = (row.x.abs() + residual[0].float().abs()) * unit
        excess = (out.float() + residual[0].float() - row.x).abs().sub_(allowed).max().item()
        if not excess <= 0:  # a NaN is no small difference
            return f"sent plus residual is not the gradient (off by {excess:.3g} beyond rounding)"
        if ops is reference:
            expected.extend(results)
        elif not expected:
            details["compared"] = "with nothing: the reference failed"
        elif not all(map(torch.equal, results, expected)):
            return "its bits differ from the reference's"
        return None

    return Contender(run=run, before=before, check=check, note=note, details=details)


def _sketch(case: Case, row: Row) -> Codec:
    """Bitmap, cells and counts; of one rank, as more ranks' keys are the same work. The floor has
    the bitmap only: cells are the price of this codec, not of the task."""
    assert case.symbol is not None
    assert case.density is not None
    symbol = SYMBOLS[case.symbol]
    groups = case.numel // symbol.lanes
    size = row.x.view(groups, -1)[:: max(1, groups // _SAMPLE)].abs().amax(1)
    # [1], what the share `density` of the groups exceeds.
    threshold = size.sort(descending=True).values[round(case.density * (size.numel() - 1))][None]
    capacity, levels = int(SLACK * case.density * groups) + 1, symbol.levels(RANKS)
    step = quantization_step(threshold, symbol, levels)
    layout = plan_layout(case.numel, symbol, capacity)
    seed, stats = (torch.zeros(n, dtype=torch.int32, device=row.x.device) for n in (1, 2))

    def send(ops: Ops, residual: Tensor, message: list[Tensor]) -> None:
        ops.encode(
            row.grad, residual, threshold, step, seed, *message,
            layout=layout, levels=levels, capacity=capacity,
        )  # fmt: skip

    def read(ops: Ops, message: list[Tensor], out: Tensor) -> None:
        index, cells, _ = message
        ops.decode(index, cells[0], step, seed, out, None, stats, layout=layout, divisor=1)

    return Codec(
        parts=(layout.index_words, layout.cells, COUNTS),
        send=send,
        read=read,
        floor=groups // 8,
        ranks=1,
        facts={"cells": layout.cells, "kept": max(1, round(case.density * groups))},
    )


def _blocks(case: Case, row: Row) -> Codec:
    """Blocks of 256."""
    assert case.bits is not None
    layout = BlockLayout(numel=case.numel, bits=case.bits)

    def send(ops: Ops, residual: Tensor, message: list[Tensor]) -> None:
        ops.quantize(row.grad, residual, *message, layout=layout, average=0.0)

    def read(ops: Ops, messages: list[Tensor], out: Tensor) -> None:
        ops.dequantize(messages[0][None], out[None], layout=layout, divisor=RANKS)

    return Codec(parts=(layout.words,), send=send, read=read, floor=4 * layout.words)


def _matrix(case: Case, row: Row) -> Codec:
    """As nearly square as powers of two are, with at most 4096 columns. Its scales need a pass over
    gradient and residual before the one that rounds; the floor has one."""
    assert case.code is not None
    columns = min(_MOST_COLUMNS, 1 << case.numel.bit_length() // 2)
    layout = MatrixLayout(rows=case.numel // columns, columns=columns, **CODES[case.code])

    def send(ops: Ops, residual: Tensor, message: list[Tensor]) -> None:
        ops.quantize_matrix(row.grad, residual, *message, layout=layout, average=0.0)

    def read(ops: Ops, messages: list[Tensor], out: Tensor) -> None:
        ops.dequantize_matrix(messages[0][None], out[None], layout=layout, divisor=RANKS)

    return Codec(
        parts=(layout.words,),
        send=send,
        read=read,
        floor=4 * layout.words,
        exact=False,  # no code says 0, so what is left of an element far below its step is rounded
        facts={"rows": layout.rows, "columns": columns, "words": layout.words},
    )


def _exact(
    case: Case, device: torch.device
) -> tuple[int, dict[str, Callable[[], Contender]], dict[str, Any]]:
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
    words = torch.empty(1, layout.plan_words, dtype=torch.int32, device=device)
    expected = torch.empty(1, layout.words, dtype=torch.int32, device=device)
    reference.measure_exact(new, old, words, layout=layout)
    reference.encode_exact(new, old, words, expected, layout=layout)
    total = int(words[0, 0])

    def contender(ops: Ops, note: str) -> Contender:
        plan, message, row = torch.empty_like(words), expected.clone(), old.clone()

        def encode() -> None:
            ops.measure_exact(new, old, plan, layout=layout)
            ops.encode_exact(new, old, plan, message, layout=layout)

        def before() -> None:
            message.fill_(-1) if case.op == "encode_exact" else row.copy_(old)

        def check() -> str | None:
            mine, right = (row.view(torch.int16), new.view(torch.int16))
            if case.op == "encode_exact":
                mine, right = message[:, :total], expected[:, :total]
            return None if torch.equal(mine, right) else "its bits differ from the reference's"

        def decode() -> None:
            ops.decode_exact(message, row, layout=layout)

        run = encode if case.op == "encode_exact" else decode
        return Contender(run=run, before=before, check=check, note=note)

    facts = {"message_bits": round(32 * total / case.numel, 2)}
    return 4 * case.numel + 4 * total, _makers(contender, device, new), facts


# The codec of each operator, and whether it sends.
_OPS = {
    "encode": (_sketch, True),
    "decode": (_sketch, False),
    "quantize": (_blocks, True),
    "dequantize": (_blocks, False),
    "quantize_matrix": (_matrix, True),
    "dequantize_matrix": (_matrix, False),
}

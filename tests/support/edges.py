"""Cases of operators where the arithmetic gets tight. `trials.py` has sizes and dtypes in turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support import oracle
from support.calls import encoder_calls
from support.trials import BF16, F16, F32, Case, Trial, case_of, case_with, sketch_layout
from tagc.ops import Ops, get_ops
from tagc.ops.bitmap import to_bitmap
from tagc.ops.blocks import BITS, BlockLayout
from tagc.ops.matrix import SPAN, MatrixLayout
from tagc.ops.sketch import SketchLayout
from tagc.ops.symbols import SYMBOLS
from tagc.ops.thresholds import SIDE, STATES, THRESHOLD
from tagc.selfcheck.inputs import Inputs

I32, REFERENCE = torch.int32, get_ops("cpu", "reference")
NAN, INF, LARGEST = float("nan"), float("inf"), torch.finfo(F32).max
LEAST = 2.0**-60  # mean of the largest column of a matrix
EDGES: dict[str, Callable[[], Iterable[Case]]] = {}
# Bits of matrices, with a dtype of residuals that the CPU's kernels are compiled for.
CODES = ((1, F32), (2, BF16))


def edge(name: str) -> Callable[[Callable[[], Iterable[Case]]], None]:
    """Decorator of a function that makes cases."""

    def register(make: Callable[[], Iterable[Case]]) -> None:
        assert name not in EDGES
        EDGES[name] = make

    return register


def edges() -> list[Trial]:
    """A trial of every edge."""
    return [Trial(name, (make,)) for name, make in EDGES.items()]


# Blocks


def quantizing(
    x: Tensor,
    layout: BlockLayout | MatrixLayout,
    residual: Tensor | torch.dtype | None,
    *,
    average: float = 0.0,
    dtype: torch.dtype = F32,
    divisor: int = 3,
) -> Iterator[Case]:
    """Quantize rows ``[R, n]``, then add up their messages; a dtype means a residual of zeros."""
    left = torch.zeros_like(x, dtype=residual) if isinstance(residual, torch.dtype) else residual
    message = oracle.poisoned(len(x), layout.words, dtype=I32)
    tensors = {"grad": x, "residual": left, "message": message}
    operator = "quantize" if isinstance(layout, BlockLayout) else "quantize_matrix"
    made = case_with(operator, tensors, layout=layout, average=average)
    yield made
    sent = made.run(REFERENCE, Tensor.clone)["message"]
    yield from sums(f"de{operator}", sent[None], layout, (dtype, divisor))


def sums(
    operator: str, message: Tensor, layout: Any, *results: tuple[torch.dtype, int]
) -> Iterator[Case]:
    """Add up messages ``[K, R, words]`` for results of these dtypes and divisors."""
    for dtype, divisor in results:
        out = oracle.poisoned(len(message), layout.numel, dtype=dtype)
        tensors = {"message": message, "out": out}
        yield case_with(operator, tensors, layout=layout, divisor=divisor, add=False)


def blocks(
    x: Tensor, bits: int, residual: Tensor | torch.dtype | None = F32, **given: Any
) -> Iterator[Case]:
    """Blocks of 32 elements, see :func:`quantizing`."""
    return quantizing(x, BlockLayout(numel=x.shape[1], bits=bits, block=32), residual, **given)


@edge("blocks: the largest numbers, and sums that overflow")
def _() -> Iterator[Case]:
    x = torch.zeros(5, 64)
    x[0], x[1, ::3], x[2, 1::2] = LARGEST, -LARGEST, 3.39e38
    x[3] = torch.linspace(-3.4e38, 3.4e38, 64)
    large = torch.zeros(5, 64)
    x[4, 7] = large[4, 7] = 3e38
    yield from blocks(x, 8, large, divisor=1)
    for residual in (large, BF16):
        yield from blocks(x, 4, residual)


@edge("blocks: numbers next to zero")
def _() -> Iterator[Case]:
    # Scales around the least that is sent, with residuals and sums that are subnormal.
    for bits, residual in ((8, F32), (4, F32), (4, BF16)):
        levels = (1 << (bits - 1)) - 1
        scale = torch.tensor([0.25, 0.99, 0.998, 0.9985, 0.999, 1, 1.002, 1.0, 3]) * 2.0**-126
        x = (torch.linspace(-1, 1, 32) * levels)[None] * scale[:, None]
        x[7] = 0.0
        x[7, 5] = -0.0
        yield from blocks(x.reshape(1, -1), bits, residual)


@edge("blocks: halves, codes that are clipped, zeros of both signs")
def _() -> Iterator[Case]:
    x = torch.arange(64.0)[None] - 31.5
    x[0, 31], x[0, 63] = 127.0, -127.0
    yield from blocks(x, 8, divisor=1)
    # Scales that rounded down, so that the largest elements are beyond the largest code.
    for bits in BITS:
        yield from blocks(3 * torch.linspace(1.0, 1.01, 128)[None], bits)
    for residual, average in itertools.product((F32, BF16), (0.0, 0.5)):
        x = torch.zeros(1, 96)
        x[0, ::2] = -0.0
        x[0, 40], x[0, 90] = 1.0, -2.0
        yield from blocks(x, 4, x.to(residual), average=average)


@edge("blocks: any words have a sum, also beyond the largest number")
def _() -> Iterator[Case]:
    rng = np.random.default_rng(1)
    for bits in BITS:
        layout = BlockLayout(numel=99, bits=bits, block=32)
        words = rng.integers(-(2**31), 2**31, (2, 3, layout.words), dtype=np.int32)
        words[0, :, : layout.scale_words] = 0x41203C9A  # of all codes, also -levels - 1
        words[1, :, 0] = np.int32(-0x80000000 + 0x8000)  # minus zeros do not become zeros
        yield from sums("dequantize", torch.from_numpy(words), layout, (F32, 3))
    made = next(blocks(torch.full((4, 64), 3e38), 8, None))
    message, layout = made.run(REFERENCE, Tensor.clone)["message"], made.call["layout"]
    for several in (message[None], message[:, None]):
        yield from sums("dequantize", several, layout, (F32, 1), (F16, 4), (BF16, 1))


# Matrices


def matrix(
    x: Tensor,
    bits: int = 1,
    residual: Tensor | torch.dtype | None = F32,
    *,
    level: float = 1.0,
    **given: Any,
) -> Iterator[Case]:
    """Matrices ``[rows, columns]`` or ``[D, rows, columns]``, see :func:`quantizing`."""
    x = x[None] if x.ndim == 2 else x
    layout = MatrixLayout(rows=x.shape[1], columns=x.shape[2], bits=bits, level=level)
    left = residual.reshape(len(x), -1) if isinstance(residual, Tensor) else residual
    return quantizing(x.flatten(1), layout, left, **given)


def random_matrix(shape: tuple[int, int, int], rng: np.random.Generator) -> Tensor:
    """Heavy-tailed, with zeros and ties; rows and columns have scales of their own."""
    of_rows, of_columns = (np.exp(rng.normal(size=n)) for n in shape[1:])
    x = np.round(rng.laplace(size=shape) ** 3) * (rng.random(shape) < 0.8)
    return torch.from_numpy(x * of_rows[:, None] * of_columns).float()


def on_edge(edge: float, rng: np.random.Generator) -> Tensor:
    """``[64, 64]``, rows whose means are within rounding of ``edge``, a float32: the order of the
    additions decides on which side of it they end."""
    unit = 2.0 ** (np.floor(np.log2(edge)) - 23)
    middle = round(edge / unit)
    near = middle + rng.integers(-(1 << 17), 1 << 17, (64, 64))
    near[:, -1] += 64 * middle - near.sum(1) + rng.integers(-64, 64, 64)
    return torch.from_numpy(near * unit).float()


@edge("matrix: additions in the order of the format")
def _() -> Iterator[Case]:
    rng = np.random.default_rng(2)
    yield from matrix(on_edge(1.25, rng).T.contiguous())
    yield from matrix(on_edge(1.0625, rng))
    below = np.float32(1.0625) / np.float32(0.624)
    while below * np.float32(0.624) >= 1.0625:
        below = np.nextafter(below, np.float32(0))
    yield from matrix(on_edge(float(np.nextafter(below, np.float32(2))), rng), 2, residual=BF16)


@edge("matrix: rows that are summed in chunks, some of them not finite")
def _() -> Iterator[Case]:
    for (bits, dtype), more in zip(CODES, (1, 104), strict=True):
        x = random_matrix((2, 2, SPAN + more), np.random.default_rng(more))
        x[1, 1, 600] = NAN
        yield from matrix(x, bits, (x / 8).to(dtype), average=0.9)


@edge("matrix: the largest row comes last, and its byte is at most 254")
def _() -> Iterator[Case]:
    x = torch.full((8192, 1), 2.0**-20)
    x[-1] = 1.0
    yield from matrix(x, level=3.9)


@edge("matrix: rows far from the others, and numbers next to zero")
def _() -> Iterator[Case]:
    rng = np.random.default_rng(5)
    factors = torch.tensor([1, 1e-3, 1e-30, 30, 1, 0.0, 1e-2, 1e-4])[:, None]
    for bits, dtype in CODES:
        yield from matrix(random_matrix((1, 8, 70), rng) * factors, bits, dtype)
        for scale in (0.0, 1e-45, LEAST / 4, LEAST, 1.0):
            x = torch.full((3, 20), 1.0)
            x[2, 8] = -1e-42  # its code is negative all the same
            x[0, ::2] = -1.0
            x[1, 3] = -0.0
            yield from matrix(x * scale, bits, dtype)
    for mean in (LEAST, 0.874 * LEAST):  # from 0.875 on it rounds to the next octave
        yield from matrix(torch.full((4, 16), mean))


@edge("matrix: the largest numbers")
def _() -> Iterator[Case]:
    for bits, dtype in CODES:
        x = torch.zeros(4, 40)
        x[0], x[1, ::3], x[2, 1::2] = LARGEST, -LARGEST, 2.0**64
        x[3] = torch.linspace(-3.4e38, 3.4e38, 40)
        yield from matrix(x, bits, dtype, divisor=1)
    # Sums beyond the largest number of the output.
    *_, made = matrix(torch.full((3, 2, 33), 1e6), dtype=F16, divisor=1)
    yield made


@edge("matrix: the signs of zeros")
def _() -> Iterator[Case]:
    x = torch.ones(4, 40)
    x[0, ::3], x[1] = -1.0, -1.0
    x[2, 8:16], x[3, 32:] = -0.0, 0.0
    for residual in (torch.zeros(4, 40), -0.0 * x):
        yield from matrix(x, 1, residual, average=0.25)
    x = torch.full((4, 40), -0.0)
    x[0], x[1, ::3], x[2, 1::2] = 1.0, 0.0, 1e-30
    for bits, dtype in CODES:  # rows that send nothing keep the sign
        yield from matrix(x, bits, x.to(dtype))


# Sketches


# By name: share of the groups above the threshold, share that the capacity holds.
MODES = {
    "usual": (0.1, 0.2),
    "overflow": (0.5, 0.2),
    "all above": (1.0, 0.5),
    "room for all": (0.2, 1.0),
}
# Symbol, gradient, residual: the CPU's kernels are compiled for them.
FORMATS = (("int8x4", F32, F32), ("int16x2", BF16, F32), ("int32x1", F32, F32))


def tensors_of(made: Case) -> dict[str, Any]:
    return made.tensors


def encoding(
    form: tuple[str, torch.dtype, torch.dtype | None],
    n: int,
    mode: str = "usual",
    *,
    W: int = 2,
    hashes: int = 0,
    room: float = 3.0,
    seed: int = 0,
) -> Case:
    """Encode random rows, all of them finite, with a :func:`sketch_layout`."""
    name, gradient, residual = form
    above, keep = MODES[mode]
    capacity = int(keep * -(-n // SYMBOLS[name].lanes))
    layout = sketch_layout(n, name, W * capacity, hashes, room)
    call, *_ = encoder_calls(layout, (gradient, residual), 1, W, capacity)
    given = Inputs("finite", above=above, destinations=W, small=False, seed=seed)
    return case_of(call, given)


def changed(made: Case, **options: Any) -> Case:
    """The case with other options."""
    merged = dict(made.call.options) | options
    return case_with(made.call.operator, made.tensors, **merged)


def both_ways(made: Case, divisor: int = 3) -> Iterator[Case]:
    """Encode, then decode for the first rank what all rows send."""
    yield made
    t = tensors_of(made)
    sent = made.run(REFERENCE, Tensor.clone)
    yield decoding(
        made.call["layout"], sent["index"], sent["cells"].sum(0, dtype=I32),
        t["step"][:1], t["seed"], None if t["residual"] is None else t["residual"][0],
        dtype=t["grad"].dtype, divisor=divisor,
    )  # fmt: skip


def decoding(
    layout: SketchLayout,
    index: Tensor,
    cells: Tensor,
    step: Tensor,
    seed: Tensor,
    residual: Tensor | None,
    *,
    dtype: torch.dtype = F32,
    divisor: int = 2,
) -> Case:
    tensors = {
        "index": index, "cells": cells, "step": step, "seed": seed,
        "out": oracle.poisoned(layout.numel, dtype=dtype), "residual": residual,
        "stats": oracle.poisoned(2, dtype=I32),
    }  # fmt: skip
    made = case_with("decode", tensors, layout=layout, divisor=divisor)
    return replace(made, scratch=("cells",))


@edge("sketch: groups of a support that are not finite, and sums that overflow")
def _() -> Iterator[Case]:
    for form in (FORMATS[0], FORMATS[1], ("int32x1", BF16, None)):
        made = encoding(form, 2600, W=3, hashes=4, seed=1)
        t, groups = tensors_of(made), made.call["layout"].groups
        t["support"] = to_bitmap(torch.rand(3, groups, generator=torch.manual_seed(0)) < 1 / 3)
        if groups % 32:  # bits past the last group mean nothing
            t["support"][:, -1] |= torch.tensor(-1 << groups % 32, dtype=I32)
        t["support"][0, 0], t["support"][1, 0] = -1, 0
        t["grad"][0, 3], t["grad"][0, 400], t["grad"][1, 5] = NAN, INF, -INF
        yield from both_ways(made)
    made = encoding(FORMATS[0], 130, hashes=3)
    t = tensors_of(made)
    t["grad"][1, 7] = t["residual"][1, 7] = 3e38
    yield from both_ways(made)


def ties(sizes: Iterable[tuple[int, int]]) -> Iterator[Case]:
    """Of ``n`` equal groups and a larger one, as many as fit."""
    for n, capacity in sizes:
        made = changed(encoding(FORMATS[2], n, W=1, hashes=4, seed=2), capacity=capacity)
        t = tensors_of(made)
        t["grad"].fill_(2.0)
        t["residual"].zero_()
        t["grad"][0, n // 2] = -3.0
        t["threshold"].fill_(1.0)
        yield from both_ways(made)


@edge("sketch: ties stay in the order of the index; sizes differ in the last bit only")
def _() -> Iterator[Case]:
    yield from ties(((3000, 137), (3000, 1), (70, 3)))
    made = changed(encoding(FORMATS[2], 900, W=1, hashes=4), capacity=333)
    order = np.random.default_rng(0).permutation(900)
    bits = (0x40490000 + order).astype(np.int32)
    tensors_of(made)["grad"][0] = torch.from_numpy(bits).view(F32)
    tensors_of(made)["residual"].zero_()
    tensors_of(made)["threshold"].fill_(1.0)
    yield made


@edge("sketch: the largest numbers, halves, and numbers next to zero")
def _() -> Iterator[Case]:
    # int32x1 sends integers beyond 2**23, where every float32 is one, and clips at its largest.
    made = encoding(FORMATS[2], 257, "all above", W=1, hashes=3)
    t = tensors_of(made)
    t["step"] = t["threshold"] = torch.tensor([2.0**-6])
    t["grad"][0, :8] = torch.tensor([2.0**17 + 2**-7, 2.0**30, -(2.0**31), 2.0**16, 0, 0, 0, 1])
    t["grad"][0, 8:] *= 2.0**10
    yield from both_ways(made)
    made = changed(encoding(FORMATS[0], 64, "room for all", W=1), levels=127)
    t = tensors_of(made)
    t["residual"].zero_()
    t["grad"][0] = torch.arange(64) * 0.5 - 16
    t["step"] = t["threshold"] = torch.ones(1)
    yield from both_ways(made, 1)
    # A residual in bfloat16 stays finite.
    made = encoding(("int8x4", BF16, BF16), 300, W=1, hashes=3)
    t = tensors_of(made)
    t["grad"][0, ::2], t["grad"][0, 1::6] = 3.38e38, -3.38e38
    t["residual"] = torch.full_like(t["residual"], 1e36)
    yield from both_ways(made)
    # Subnormal sums neither vanish nor round in any dtype's own way.
    for form in (FORMATS[0], ("int8x4", BF16, BF16), ("int8x4", F16, F32)):
        made = encoding(form, 100, W=1)
        t = tensors_of(made)
        t["grad"][0] = (torch.arange(100) - 50) * (2.0**-24 if form[1] == F16 else 2.0**-133)
        t["residual"][0] = (torch.arange(100) % 7) * 2.0**-133
        t["threshold"], t["step"] = torch.tensor([2.0**-90]), torch.tensor([2.0**-94])
        yield from both_ways(made)


@edge("sketch: an estimate on top of the largest bfloat16 stays finite")
def _() -> Iterator[Case]:
    made = encoding(("int8x4", BF16, BF16), 1600, "all above", hashes=3, room=0.3)
    t = tensors_of(made)
    t["step"] = t["threshold"] = torch.full((2,), 2.0**90)
    t["grad"].zero_()
    t["residual"] = torch.full((2, 1600), 3.3895313892515355e38, dtype=BF16)
    yield from both_ways(made)


@edge("sketch: a cell for each group, and groups that are put off")
def _() -> Iterator[Case]:
    """Elements of 2**24 steps and more, and -0, in groups that stay and in others that go: they
    cannot be found again from cell and residual."""
    for form, mode in zip(FORMATS, ("overflow", "usual", "overflow"), strict=True):
        made = encoding(form, 2400, mode, hashes=1)
        t, lanes = tensors_of(made), SYMBOLS[form[0]].lanes
        for x in (t["grad"], t["residual"]):
            x[:, 5 :: 8 * lanes] = -0.0
        t["grad"][0, 3 :: 4 * lanes] = t["step"][0] * (2.0**25 + 2.0**3)
        t["grad"][0, 2 :: 12 * lanes] = t["step"][0] * 1.5 * 2.0**30
        yield from both_ways(made)
    made = encoding(FORMATS[0], 2400, W=3, hashes=1)
    t = tensors_of(made)
    for x in (t["grad"], t["residual"]):
        x[1, ::4] = -0.0
    t["grad"][2, ::64] = 2.0**100
    yield from both_ways(changed(made, capacity=599))  # nothing is put off


def same_cells(layout: SketchLayout, seed: int, pairs: int) -> list[int]:
    """Keys of ``pairs`` pairs that share all their cells."""
    first: dict[tuple[int, ...], int] = {}
    found: list[int] = []
    for key in range(layout.groups):
        where = tuple(oracle.cells_of(key, seed, layout))
        if where in first:
            found += [first.pop(where), key]
            if len(found) == 2 * pairs:
                return found
        else:
            first[where] = key
    raise AssertionError("too few groups")


def large_tables() -> Iterator[Case]:
    """Partitions from which on kernels pack their facts about a cell: hashes name the keys."""
    rng = np.random.default_rng(5)
    for symbol, hashes, partition, keys, pairs in (
        ("int8x4", 3, 65539, 1500, 0), ("int32x1", 2, 65539, 999, 7), ("int16x2", 2, 70001, 40, 10),
    ):  # fmt: skip
        lanes = SYMBOLS[symbol].lanes
        layout = SketchLayout(
            numel=200_000 * lanes - 1, symbol=SYMBOLS[symbol], keys=keys, hashes=hashes,
            partition=partition,
        )  # fmt: skip
        present = torch.zeros(layout.groups, dtype=torch.bool)
        present[rng.choice(layout.groups, keys, replace=False)] = True
        present[[0, layout.groups - 1, *same_cells(layout, 8, pairs)] if pairs else [0, -1]] = True
        symbols = torch.from_numpy(rng.integers(-(2**31), 2**31, layout.groups)).to(I32)
        # Half of them in the second rank's bitmap, some in both.
        turn = torch.from_numpy(rng.integers(1, 4, layout.groups))
        index = torch.zeros(2, layout.index_words, dtype=I32)
        for rank in (0, 1):
            index[rank, :-1] = to_bitmap(present & ((turn & (1 << rank)) != 0))
        cells, seed = torch.zeros(layout.cells, dtype=I32), torch.tensor([8], dtype=I32)
        REFERENCE.insert(symbols, to_bitmap(present), seed, cells, layout=layout)
        residual = torch.full((layout.numel,), 0.25)
        yield decoding(layout, index, cells, torch.tensor([0.5]), seed, residual, dtype=BF16)


# Thresholds


@edge("steer: at the bounds")
def _() -> Iterator[Case]:
    """Thresholds and exponents at their bounds, from both sides; a step is never 0."""
    state = torch.ones(STATES, 1, 4)
    state[THRESHOLD, 0] = torch.tensor([2.0**-96, 2.0**96, 2.0**-95, 2.0**95])
    state[SIDE, 0] = torch.tensor([-1.0, 1, 1, -1])
    counts = torch.tensor([[[0, 9, 0, 0], [5000, 9000, 100, 0]] * 2], dtype=I32)
    for _ in range(8):
        tensors = {
            "counts": counts, "target": torch.tensor([100.0]), "max_boost": torch.tensor([1.0]),
            "scale": torch.tensor([2.0**-20]), "state": state,
        }  # fmt: skip
        made = case_with("steer", tensors)
        yield made
        state = made.run(REFERENCE, Tensor.clone)["state"]


# Leads


def check_lag_in_place(ops: Ops, device: str) -> None:
    """The result may be where the sum was."""
    x = torch.linspace(-2, 2, 999)
    others = x.flip(0).clone()
    want, sent = x.new_empty(999), others.clone()
    REFERENCE.undo_lag(x.clone(), sent, want, lead=0.75)
    decoded, last = x.to(device, copy=True), others.to(device)
    ops.undo_lag(decoded, last, decoded, lead=0.75)
    assert torch.equal(decoded.cpu(), want)
    assert torch.equal(last.cpu(), sent)

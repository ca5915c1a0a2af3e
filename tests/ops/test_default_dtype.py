"""Torch's default dtype, which models in bfloat16 are often made with, changes no operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support import matrix_cases, oracle, packed_cases, sketch_cases
from support.packed_cases import both
from tagc.ops import cpu, reference
from tagc.ops.bitmap import to_bitmap
from tagc.ops.blocks import BlockLayout
from tagc.ops.cpu import blocks as cpu_blocks
from tagc.ops.cpu import lag as cpu_lag
from tagc.ops.cpu import matrix as cpu_matrix
from tagc.ops.cpu import packed as cpu_packed
from tagc.ops.cpu import sketch as cpu_sketch
from tagc.ops.cpu import thresholds as cpu_thresholds
from tagc.ops.matrix import MatrixLayout
from tagc.ops.packed import plan_packed
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS
from tagc.ops.thresholds import STATES

F32, BF16, F64, I32 = torch.float32, torch.bfloat16, torch.float64, torch.int32
Outputs = list[Tensor | None]


@pytest.fixture
def set_default() -> Iterator[Callable[[torch.dtype], None]]:
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


# Each makes inputs, and returns a function that runs operators on copies of them.


def sketch() -> Callable[[Any], Outputs]:
    # Room for one key: most symbols cannot be recovered, so the residual gets their estimates.
    rng = np.random.default_rng(0)
    case = sketch_cases.make_case(2000, 2, "int8x4", F32, F32, "overflow", rng, keys=1)

    def run(ops) -> Outputs:
        got = sketch_cases.encode(ops, case)
        cells = got.cells.sum(0, dtype=got.cells.dtype)
        decoded = sketch_cases.decode(ops, got.index, cells, case, F32, 3)
        assert decoded[2][1] > 0
        return [got.index, got.cells, got.counts, got.residual, *decoded]

    return run


def peeling() -> Callable[[Any], Outputs]:
    rng, layout = np.random.default_rng(1), plan_layout(400, SYMBOLS["int8x4"], 30)
    present = torch.from_numpy(rng.random(layout.groups) < 0.1)
    symbols = torch.from_numpy(rng.integers(-9, 9, layout.groups)).to(I32)
    seed = torch.zeros(1, dtype=I32)

    def run(ops) -> Outputs:
        cells = oracle.poisoned(layout.cells, dtype=I32)
        ops.insert(symbols, to_bitmap(present), seed, cells, layout=layout)
        values, stuck = ops.peel(cells, to_bitmap(present), seed, layout=layout)
        return [cells, values, stuck.to(I32)]

    return run


def blocks(average: float) -> Callable[[Any], Outputs]:
    rng, layout = np.random.default_rng(2), BlockLayout(numel=300, bits=8, block=32)
    grad, residual = oracle.values((2, 300), rng), oracle.values((2, 300), rng)

    def run(ops) -> Outputs:
        left, out = residual.clone(), oracle.poisoned(1, 300, dtype=F32)
        message = oracle.poisoned(2, layout.words, dtype=I32)
        ops.quantize(grad, left, message, layout=layout, average=average)
        ops.dequantize(message[None], out, layout=layout, divisor=3)
        return [message, left, out]

    return run


def matrix(group: int, average: float) -> Callable[[Any], Outputs]:
    variant = 1, group, F32, F32
    case = matrix_cases.make_case((9, 40), 2, variant, np.random.default_rng(3))

    def run(ops) -> Outputs:
        message, left = matrix_cases.quantize(ops, case, average)
        return [message, left, matrix_cases.dequantize(ops, message, case.layout, divisor=3)]

    return run


def packed(mode: str) -> Callable[[Any], Outputs]:
    variant = 1, 8, F32, F32
    case = packed_cases.make_case(300, 2, 32, variant, mode, np.random.default_rng(4))

    def run(ops) -> Outputs:
        got = packed_cases.pack(ops, case)
        out = packed_cases.unpack(ops, got.message, case.layout, divisor=3)
        return [got.message, got.counts, got.residual, out]

    return run


def index() -> Callable[[Any], Outputs]:
    rng, layout = np.random.default_rng(5), plan_packed(3000, capacity=100, group=1)
    x, threshold = oracle.values((2, 3000), rng), torch.ones(2)
    assert layout.low_bits

    def run(ops) -> Outputs:
        bitmap, back = (oracle.poisoned(2, layout.bitmap_words, dtype=I32) for _ in range(2))
        counts = oracle.poisoned(2, 4, dtype=I32)
        index = oracle.poisoned(2, layout.index_words, dtype=I32)
        ops.select(x, threshold, bitmap, counts, layout=layout)
        ops.write_index(bitmap, index, layout=layout)
        ops.read_index(index, back, layout=layout)
        return [bitmap, counts, index, back]

    return run


def lag() -> Callable[[Any], Outputs]:
    rng = np.random.default_rng(6)
    decoded, last = (oracle.values((300,), rng).float() for _ in range(2))
    weights = torch.tensor([0.65, 0.35], dtype=F32)

    def run(ops) -> Outputs:
        sent, out = last.clone(), oracle.poisoned(300, dtype=F32)
        ops.undo_lag(decoded, sent, out, weights)
        return [sent, out]

    return run


def thresholds() -> Callable[[Any], Outputs]:
    counts = torch.tensor([[[400, 5000, 100, 3], [90, 200, 90, 0]]], dtype=I32)
    target, one = torch.tensor([100.0], dtype=F32), torch.ones(1, dtype=F32)

    def run(ops) -> Outputs:
        state = torch.full((STATES, 1, 2), 0.3, dtype=F32)
        ops.steer(counts, target, one, one, state)
        return [state]

    return run


CASES: list[tuple[Callable[..., Callable[[Any], Outputs]], tuple[Any, ...]]] = [
    (sketch, ()),
    (peeling, ()),
    *((blocks, (average,)) for average in (0.0, 0.9)),
    *((matrix, case) for case in ((1, 0.0), (1, 0.9), (8, 0.0))),
    (packed, ("overflow",)),
    (index, ()),
    (lag, ()),
    (thresholds, ()),
]


@pytest.mark.parametrize("dtype", [BF16, F64], ids=["bfloat16", "float64"])
@pytest.mark.parametrize(
    ("make", "arguments"), CASES, ids=[" ".join(map(str, (f.__name__, *a))) for f, a in CASES]
)
@both
def test_gives_the_same_bits(ops, make, arguments, dtype, set_default):
    run = make(*arguments)
    wanted = run(ops)
    set_default(dtype)
    got = run(ops)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a is not None
        assert b is not None
        assert oracle.same_bits(a, b)


def test_all_operators_are_run():
    run = set()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            run.add(name)
            return getattr(reference, name)

    for make, arguments in CASES:
        make(*arguments)(Watched())
    assert run == {name for name in reference.__all__ if not name.startswith("prepare")} - {
        "release"
    }


@pytest.mark.parametrize("dtype", [BF16, F64], ids=["bfloat16", "float64"])
def test_prepares(dtype, set_default):
    for module in (cpu_sketch, cpu_blocks, cpu_matrix, cpu_packed, cpu_lag, cpu_thresholds):
        module._compile.cache_clear()  # what is prepared already is not prepared again
    set_default(dtype)
    cpu.prepare(plan_layout(100, SYMBOLS["int8x4"], 10), F32, F32)
    cpu.prepare_blocks(BlockLayout(numel=100, bits=8), F32, F32, 0.0)
    cpu.prepare_matrix(MatrixLayout(rows=2, columns=8), F32, F32, 0.0)
    cpu.prepare_packed(plan_packed(100, capacity=10), F32, F32)
    cpu.prepare_lag()
    cpu.prepare_thresholds()

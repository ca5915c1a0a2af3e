"""Every GPU kernel in every combination of dtypes and shapes, to be compiled without a GPU."""

from __future__ import annotations

import importlib
import itertools

import torch

from support.compiled import Compiled, compiling
from tagc.ops.blocks import BITS, BlockLayout
from tagc.ops.dense import DenseLayout, Piece
from tagc.ops.exact import ExactLayout
from tagc.ops.exponents import ExponentLayout
from tagc.ops.matrix import BITS as MATRIX_BITS
from tagc.ops.matrix import GROUP, MatrixLayout
from tagc.ops.sketch import SketchLayout
from tagc.ops.symbols import SYMBOLS, Symbol

ops = importlib.import_module("tagc.triton_kernels.ops")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ARCHITECTURES = (80, 90)
SKETCH = {
    "select_kernel", "digit_kernel", "narrow_kernel", "count_kernel", "drop_kernel", "emit_kernel",
    "insert_kernel", "union_kernel", "keys_kernel", "singles_kernel", "peel_kernel",
    "finish_kernel", "clear_kernel", "estimate_kernel", "write_kernel", "expand_kernel",
}  # fmt: skip
BLOCKS = {"quantize_kernel", "dequantize_kernel"}
MATRIX = {
    "matrix_columns_kernel", "matrix_scales_kernel", "quantize_matrix_kernel",
    "matrix_read_scales_kernel", "dequantize_matrix_kernel",
    "dequantize_groups_kernel",
}  # fmt: skip
DENSE = {"put_dense_kernel", "sum_dense_kernel"}
EXACT = {
    "exact_counts_kernel", "exact_widths_kernel", "exact_sizes_kernel", "exact_total_kernel",
    "exact_head_kernel", "exact_encode_kernel", "exact_read_kernel", "exact_decode_kernel",
    "exponents_head_kernel", "pack_exponents_kernel", "raw_exponents_kernel",
    "unpack_exponents_kernel",
}  # fmt: skip
OTHERS = {"undo_lag_kernel", "steer_kernel", "fingerprint_kernel"} | DENSE
KERNELS = SKETCH | BLOCKS | MATRIX | EXACT | OTHERS


def layout_of(symbol: Symbol, hashes: int, numel: int = 4096) -> SketchLayout:
    """Three hashes: entries of the peeling table are packed; one: direct."""
    groups = -(-numel // symbol.lanes)
    partition = {1: groups, 3: 1 << 17}.get(hashes, 64)
    return SketchLayout(numel=numel, symbol=symbol, keys=100, hashes=hashes, partition=partition)


def encode(symbol, grad, residual, hashes, kind, numel=4096, W=2) -> None:
    """``kind``: room for ``some`` groups or ``all``, or a ``support``."""
    layout = layout_of(symbol, hashes, numel)
    support = torch.empty(W, layout.words, dtype=torch.int32) if kind == "support" else None
    ops.encode(
        torch.empty(W, numel, dtype=grad),
        None if residual is None else torch.empty(W, numel, dtype=residual),
        torch.ones(W), torch.ones(W), torch.zeros(1, dtype=torch.int32),
        torch.empty(W, layout.index_words, dtype=torch.int32),
        torch.empty(W, layout.cells, dtype=torch.int32), torch.empty(W, 4, dtype=torch.int32),
        layout=layout, levels=symbol.levels(W), capacity=layout.groups if kind == "all" else 10,
        support=support,
    )  # fmt: skip
    if support is not None:
        x, counts = torch.empty(1, numel, dtype=residual or F32), torch.empty(1, 4).int()
        ops.select(x, torch.ones(1), support[:1], counts, layout=layout, capacity=10)


def decode(symbol, out, residual, hashes, divisor, numel=4096, W=2) -> None:
    layout = layout_of(symbol, hashes, numel)
    ops.decode(
        torch.empty(W, layout.index_words, dtype=torch.int32),
        torch.empty(layout.cells, dtype=torch.int32), torch.ones(1),
        torch.zeros(1, dtype=torch.int32), torch.empty(numel, dtype=out),
        None if residual is None else torch.empty(numel, dtype=residual),
        torch.empty(2, dtype=torch.int32), layout=layout, divisor=divisor,
    )  # fmt: skip


def codec(symbol, hashes) -> None:
    layout = layout_of(symbol, hashes)
    index, seed = torch.zeros(layout.words, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    cells = torch.empty(layout.cells, dtype=torch.int32)
    ops.insert(torch.empty(layout.groups, dtype=torch.int32), index, seed, cells, layout=layout)
    ops.peel(cells, index, seed, layout=layout)


def blocks(bits, block, grad, residual, average, divisor, numel=1 << 14, R=2) -> None:
    layout = BlockLayout(numel=numel, bits=bits, block=block)
    message = torch.empty(R, layout.words, dtype=torch.int32)
    left = None if residual is None else torch.empty(R, numel, dtype=residual)
    ops.quantize(torch.empty(R, numel, dtype=grad), left, message, layout=layout, average=average)
    out = torch.empty(1, numel, dtype=grad)
    ops.dequantize(message[None], out, layout=layout, divisor=divisor)


def matrix(bits, group, grad, residual, average, divisor, rows=64, columns=1024, R=2) -> None:
    layout = MatrixLayout(rows=rows, columns=columns, bits=bits, group=group)
    message = torch.empty(R, layout.words, dtype=torch.int32)
    x = torch.empty(R, layout.numel, dtype=grad)
    left = None if residual is None else torch.empty(R, layout.numel, dtype=residual)
    ops.quantize_matrix(x, left, message, layout=layout, average=average)
    ops.dequantize_matrix(message[None], x[:1], layout=layout, divisor=divisor)


def exact(dtype, block, numel=1 << 14) -> None:
    layout = ExactLayout(spans=(numel, 33), dtype=dtype, block=block)
    new, old = (torch.empty(2, layout.numel, dtype=dtype) for _ in range(2))
    plan = torch.empty(1, layout.plan_words, dtype=torch.int32)
    message = torch.empty(2, layout.words, dtype=torch.int32)
    ops.measure_exact(new[:1], old[:1], plan, layout=layout)
    ops.encode_exact(new[:1], old[:1], plan, message[:1], layout=layout)
    ops.decode_exact(message, old, layout=layout)


def exponents(numel: int = 1 << 14) -> None:
    layout = ExponentLayout(numel=numel)
    rows = torch.empty(2, numel, dtype=BF16)
    message = torch.empty(2, layout.raw_words, dtype=torch.int32)
    ops.pack_exponents(rows, message, layout=layout)
    ops.unpack_exponents(message, rows, layout=layout)


def lag(out, numel=1 << 14) -> None:
    sum_, sent = torch.empty(numel), torch.empty(numel)
    ops.undo_lag(sum_, sent, torch.empty(numel, dtype=out), torch.empty(2))


def fingerprints(x, numel=1 << 14) -> None:
    sums, before = (torch.zeros(k, dtype=torch.int64) for k in (3, 2))
    for changed in (None, torch.empty(1, dtype=torch.bool)):
        ops.fingerprint(torch.empty(numel, dtype=x), sums, before, changed)


def dense(x, wire, unit, divisor, D=4) -> None:
    pieces = (Piece(0, 4096, 0), Piece(4096, 64 * unit, 4096))
    layout = DenseLayout(wire, pieces, tail=5120)
    message, stamp = torch.empty(D, 5152, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    rows, wrong = torch.empty(D, 8192, dtype=x), torch.zeros(1, dtype=torch.bool)
    ops.put_dense(rows, message, stamp, layout=layout)
    ops.sum_dense(message[None], rows[:1], stamp, wrong, layout=layout, divisor=divisor)
    ops.sum_dense(message[:, None], rows, None, wrong, layout=layout, divisor=1)


def merged(bits, block, grad, residual, wire, divisor, R=4, numel=1 << 14) -> None:
    """Blocks, then pieces of the same messages."""
    layout = BlockLayout(numel=numel, bits=bits, block=block)
    first, size = layout.words + -layout.words % 4, wire.itemsize
    end = first + 64 * size + 1024 * size
    dense = DenseLayout(
        wire, (Piece(numel, 256, first), Piece(numel + 256, 4096, first + 64 * size)), tail=end
    )
    rows, whole = torch.empty(R, numel + 4352, dtype=grad), torch.empty(R, end + 32).int()
    left = None if residual is None else torch.empty(R, numel, dtype=residual)
    stamp, wrong = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.bool)
    message, options = whole[:, : layout.words], {"layout": layout, "dense": dense}
    ops.quantize_and_put(
        rows[:, :numel], left, message, None, rows, whole, stamp, average=0.9, **options
    )
    of_one, noted = slice(0, 1), [torch.zeros(n, dtype=torch.int64) for n in (3, 2)]
    ops.quantize_and_put(
        rows[of_one, :numel], left if left is None else left[of_one], message[of_one], None,
        rows[of_one], whole[of_one], None, *noted, average=0.0, **options,
    )  # fmt: skip
    for read, out, marks, by in (
        (whole[None], rows[:1], stamp, divisor), (whole[:, None], rows, None, 1),
    ):  # fmt: skip
        ops.dequantize_and_sum(
            read[..., : layout.words], out[:, :numel], read, out, marks, wrong, divisor=by,
            add=False, **options,
        )  # fmt: skip


def thresholds(segments, destinations) -> None:
    counts = torch.empty(segments, destinations, 4, dtype=torch.int32)
    numbers = [torch.empty(segments) for _ in range(3)]
    ops.steer(counts, *numbers, torch.empty(6, segments, destinations))


HASHES = (4, 3, 5, 6, 1)
# Every symbol with every pair of dtypes; hashes and the rest take turns.
ENCODES = [
    (symbol, grad, residual, HASHES[i % 5], ("some", "all", "support")[(i // 3 + i) % 3])
    for i, (symbol, grad, residual) in enumerate(
        itertools.product(SYMBOLS.values(), (F32, BF16, F16), (F32, BF16, None))
    )
]
DECODES = [
    (symbol, out, residual, HASHES[i % 5], 2 + i // 3 % 2)
    for i, (symbol, out, residual) in enumerate(
        itertools.product(SYMBOLS.values(), (F32, BF16, F16), (F32, BF16, None))
    )
]
DTYPES = list(itertools.product((F32, BF16, F16), (F32, BF16, None)))
# Every pair of bits and block size; dtypes and the rest take turns.
BLOCK_SIZES = [32 << i for i in range(8)]
QUANTIZES = [
    (bits, block, *DTYPES[i % 9], (0.0, 0.9)[i // 2 % 2], 2 + i // 4 % 2)
    for i, (bits, block) in enumerate(itertools.product(BITS, BLOCK_SIZES))
]
# Every kind of code, with dtypes in turn and others for one of them.
CODES = [*((bits, 1) for bits in MATRIX_BITS), (1, GROUP)]
MATRICES = [
    (*code, *DTYPES[(i + k) % 9], (0.0, 0.9)[(i + k) % 2], 2 + (i + k) // 2 % 2)
    for i, code in enumerate(CODES)
    for k in range(4 if code == (1, 1) else 1)
]
CODECS = list(itertools.product((SYMBOLS["int8x4"], SYMBOLS["int32x1"]), HASHES))


def compile_all(
    arch: int, *, share: int = 1, turn: int = 0, codecs: int = len(CODECS)
) -> list[Compiled]:
    """Every kernel, in one of ``share`` combinations of dtypes, beginning with ``turn``.

    Args:
        codecs: combinations of ``insert`` and ``peel``, which only ``CountSketch`` calls.
    """
    with compiling(arch) as found:
        for arguments in ENCODES[turn::share]:
            encode(*arguments)
        for arguments in DECODES[turn::share]:
            decode(*arguments)
        if share > 1:
            for hashes in (3, 1):
                decode(SYMBOLS["int8x4"], F32, BF16, hashes, 3)
        for arguments in CODECS[:codecs]:
            codec(*arguments)
        # Fewer of these; strides that take turns with all that varies.
        for arguments in QUANTIZES[turn :: 9 if share > 1 else 1]:
            blocks(*arguments)
        for arguments in [MATRICES[turn], MATRICES[-1]] if share > 1 else MATRICES:
            matrix(*arguments)
        matrix(1, 1, BF16, BF16, 0.9, 3, columns=8448, R=8)  # so many that programs have more
        for block in (1024,) if share > 1 else (32, 1024, 2048):
            exact(BF16, block)
            exact(F16, block)
        exponents()
        exponents(4099)
        for dtype in (F32, BF16, F16):
            lag(dtype)
            fingerprints(dtype)
            dense(dtype, dtype, 1, 3)
            dense(dtype, BF16, 16, 2)
        for i, (bits, block, grad, residual, _, divisor) in enumerate(QUANTIZES[turn::4]):
            merged(bits, block, grad, residual, (grad, BF16)[i % 2], divisor)
        for shape in ((1, 1), (2, 8)):
            thresholds(*shape)
    return found

"""Compile the CPU kernels that tests use, into numba's cache.

Numba takes seconds to compile each combination of dtypes, and later calls find it in the cache. A
run of all tests on several workers compiles in two processes before the workers start
(`compile_all`). Otherwise several workers would compile the same.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from support.trials import BF16, BLOCKS, DITHERED, F32, MATRICES, SKETCHES
from tagc.ops import get_ops
from tagc.ops.blocks import BlockLayout
from tagc.ops.exact import ExactLayout
from tagc.ops.matrix import MatrixLayout
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS

CPU = get_ops("cpu", "cpu")


def sketches() -> None:
    """All kernels of sketches."""
    for symbol, gradient, residual in SKETCHES:
        # Direct, so `select` too.
        CPU.prepare(plan_layout(1000, SYMBOLS[symbol], 1000), gradient, residual)
    one, seed, stats = torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.empty(2).int()
    # Without a residual only decoding: for a shared support, or with a lead.
    for symbol, gradient in (("int8x4", BF16), ("int16x2", F32), ("int32x1", F32)):
        layout = plan_layout(1000, SYMBOLS[symbol], 20)
        index = torch.zeros(1, layout.index_words, dtype=torch.int32)
        cells = torch.zeros(layout.cells, dtype=torch.int32)
        out = torch.zeros(layout.numel, dtype=gradient)
        CPU.decode(index, cells, one, seed, out, None, stats, layout=layout, divisor=1)


def blocks() -> None:
    """All kernels of quantized messages."""
    for bits, gradient, residual in BLOCKS:
        CPU.prepare_blocks(BlockLayout(numel=1, bits=bits), gradient, residual, 0.0)
    for bits, gradient in DITHERED:
        layout = BlockLayout(numel=1, bits=bits)
        CPU.prepare_blocks(layout, gradient, None, 0.0, dithered=True)


def others() -> None:
    """All other kernels."""
    CPU.prepare_lag()
    CPU.prepare_thresholds()
    CPU.prepare_exact(ExactLayout(spans=(1,), dtype=BF16))
    CPU.prepare_exponents()
    for bits, gradient, residual in MATRICES:
        layout = MatrixLayout(rows=1, columns=1, bits=bits)
        CPU.prepare_matrix(layout, gradient, residual, 0.0)


# They take about as long.
PARTS: dict[str, tuple[Callable[[], None], ...]] = {
    "sketches and blocks": (sketches, blocks),
    "others": (others,),
}


def compile_all() -> None:
    """Compile every part in its own process; if a part fails, the tests that need it compile it."""
    where: Any = {"cwd": Path(__file__).parents[1]}
    processes = [
        subprocess.Popen([sys.executable, "-m", "support.compiling", part], **where)
        for part in PARTS
    ]
    for process in processes:
        process.wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for prepare in PARTS[sys.argv[1]]:
        prepare()

"""Fast CPU implementation of :class:`tagc.ops.Ops`: numba, one thread, no Python per element."""

import sys
from functools import partial
from typing import Any

import torch

from tagc.ops import merged
from tagc.ops.cpu.blocks import compile_blocks, dequantize, quantize
from tagc.ops.cpu.exact import compile_exact, decode_exact, encode_exact, measure_exact
from tagc.ops.cpu.exponents import compile_exponents, pack_exponents, unpack_exponents
from tagc.ops.cpu.matrix import compile_matrix, dequantize_matrix, quantize_matrix
from tagc.ops.cpu.sketch import compile_sketch, decode, encode, insert, peel, select
from tagc.ops.dense import put_dense, sum_dense
from tagc.ops.fingerprint import take_fingerprint as fingerprint
from tagc.ops.lag import undo_lag
from tagc.ops.thresholds import steer

quantize_and_put = partial(merged.quantize_and_put, sys.modules[__name__])
dequantize_and_sum = partial(merged.dequantize_and_sum, sys.modules[__name__])


def release() -> None:
    """No buffer is kept between calls."""


def prepare(
    operator: str, layout: Any = None, *dtypes: torch.dtype | None, dithered: bool = False
) -> None:
    """See :func:`tagc.ops.reference.prepare`. Takes seconds for what is new."""
    match operator:
        case "quantize" | "dequantize":
            compile_blocks(layout.bits, *dtypes, dithered)
        case "quantize_matrix" | "dequantize_matrix":
            compile_matrix(layout.runs[0].bits, *dtypes)
        case "encode":
            compile_sketch(layout.symbol.name, *dtypes)
        case "measure_exact" | "encode_exact" | "decode_exact":
            compile_exact()
        case "pack_exponents" | "unpack_exponents":
            compile_exponents()

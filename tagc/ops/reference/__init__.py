"""Eager torch, the specification of :class:`tagc.ops.Ops`: readable, on any device and dtype."""

from typing import Any

import torch

from tagc.ops.dense import put_dense, sum_dense
from tagc.ops.fingerprint import take_fingerprint as fingerprint
from tagc.ops.merged import merged
from tagc.ops.reference.blocks import dequantize, quantize
from tagc.ops.reference.exact import decode_exact, encode_exact, measure_exact
from tagc.ops.reference.exponents import pack_exponents, unpack_exponents
from tagc.ops.reference.lag import undo_lag
from tagc.ops.reference.matrix import dequantize_matrix, quantize_matrix
from tagc.ops.reference.sketch import decode, encode, insert, peel, select
from tagc.ops.reference.thresholds import steer

__all__ = [
    "decode",
    "decode_exact",
    "dequantize",
    "dequantize_and_sum",
    "dequantize_matrix",
    "encode",
    "encode_exact",
    "fingerprint",
    "insert",
    "measure_exact",
    "pack_exponents",
    "peel",
    "prepare",
    "put_dense",
    "quantize",
    "quantize_and_put",
    "quantize_matrix",
    "release",
    "select",
    "steer",
    "sum_dense",
    "undo_lag",
    "unpack_exponents",
]

quantize_and_put, dequantize_and_sum = merged(
    quantize, dequantize, quantize_matrix, dequantize_matrix, undo_lag
)


def release() -> None:
    """No buffer is kept between calls."""


def prepare(
    operator: str, layout: Any = None, *dtypes: torch.dtype | None, dithered: bool = False
) -> None:
    """Nothing to compile."""

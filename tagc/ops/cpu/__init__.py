"""Fast CPU implementation of :class:`tagc.ops.Ops`: numba, one thread, no Python per element."""

from tagc.ops.cpu.blocks import dequantize, prepare_blocks, quantize
from tagc.ops.cpu.exact import decode_exact, encode_exact, measure_exact, prepare_exact
from tagc.ops.cpu.exponents import pack_exponents, prepare_exponents, unpack_exponents
from tagc.ops.cpu.lag import prepare_lag, undo_lag
from tagc.ops.cpu.matrix import dequantize_matrix, prepare_matrix, quantize_matrix
from tagc.ops.cpu.sketch import decode, encode, insert, peel, prepare, select
from tagc.ops.cpu.thresholds import prepare_thresholds, steer
from tagc.ops.dense import put_dense, sum_dense
from tagc.ops.fingerprint import take_fingerprint as fingerprint
from tagc.ops.merged import merged

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
    "prepare_blocks",
    "prepare_exact",
    "prepare_exponents",
    "prepare_lag",
    "prepare_matrix",
    "prepare_thresholds",
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

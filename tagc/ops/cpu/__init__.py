"""Fast CPU implementation of :class:`tagc.ops.Ops`: numba, one thread, no Python per element."""

import sys
from functools import partial

from tagc.ops import merged
from tagc.ops.cpu.blocks import dequantize, quantize
from tagc.ops.cpu.exact import decode_exact, encode_exact, measure_exact
from tagc.ops.cpu.exponents import pack_exponents, unpack_exponents
from tagc.ops.cpu.matrix import dequantize_matrix, quantize_matrix
from tagc.ops.cpu.sketch import decode, encode, insert, peel, select
from tagc.ops.dense import put_dense, sum_dense
from tagc.ops.fingerprint import take_fingerprint as fingerprint
from tagc.ops.lag import undo_lag
from tagc.ops.thresholds import steer

quantize_and_put = partial(merged.quantize_and_put, sys.modules[__name__])
dequantize_and_sum = partial(merged.dequantize_and_sum, sys.modules[__name__])


def release() -> None:
    """No buffer is kept between calls."""

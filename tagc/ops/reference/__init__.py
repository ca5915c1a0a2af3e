"""Eager torch, the specification of the operators: readable, on any device and dtype.

Its docstrings are the contract of all implementations. Tensors are preallocated, and outputs may
hold garbage before. Rows need unit stride only in their last dimension: messages may be slices of
wider buffers.
"""

import sys
from functools import partial

from tagc.ops import merged
from tagc.ops.dense import put_dense, sum_dense
from tagc.ops.fingerprint import take_fingerprint as fingerprint
from tagc.ops.lag import undo_lag
from tagc.ops.reference.blocks import dequantize, quantize
from tagc.ops.reference.exact import decode_exact, encode_exact, measure_exact
from tagc.ops.reference.exponents import pack_exponents, unpack_exponents
from tagc.ops.reference.matrix import dequantize_matrix, quantize_matrix
from tagc.ops.reference.sketch import decode, encode, insert, peel, select
from tagc.ops.thresholds import steer

quantize_and_put = partial(merged.quantize_and_put, sys.modules[__name__])
dequantize_and_sum = partial(merged.dequantize_and_sum, sys.modules[__name__])


def release() -> None:
    """Free the buffers that are kept between calls; the next call makes new ones."""

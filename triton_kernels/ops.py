"""The operators of :class:`tagc.ops.Ops` as fixed sequences of Triton launches.

The layout and dtypes alone determine the kernels, grids and configurations. So every rank launches
the same, nothing waits for the device, and a CUDA graph can hold the sequence (after one call
outside capture, which compiles the kernels). Buffers between the kernels are kept, except those of
a graph, see :mod:`.scratch`; only :func:`peel` allocates, for its results. Operators launch on the
device of their tensors, see :func:`.jit.on_device_of`.

Messages, residuals and outputs have the same bits as those of the reference on a CPU.
"""

from collections.abc import Callable

from .blocks import dequantize, quantize
from .decode import decode, peel
from .dense import put_dense, sum_dense
from .encode import encode, insert, select
from .exact import decode_exact, encode_exact, measure_exact
from .exponents import pack_exponents, unpack_exponents
from .fingerprint import fingerprint
from .jit import compiling_only
from .lag import undo_lag
from .matrix_dequantize import dequantize_matrix
from .matrix_quantize import quantize_matrix
from .merged import dequantize_and_sum, quantize_and_put
from .recorded import Recorded
from .scratch import release
from .thresholds import steer

__all__ = [
    "compiling_only",
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
    "put_dense",
    "quantize",
    "quantize_and_put",
    "quantize_matrix",
    "recorded",
    "release",
    "select",
    "steer",
    "sum_dense",
    "undo_lag",
    "unpack_exponents",
]


def recorded(operator: Callable[..., object]) -> Recorded:
    """See :meth:`tagc.ops.implementations.DeviceOps.recorded`."""
    return Recorded(operator)

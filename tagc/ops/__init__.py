"""The operators of the codecs, one contract and several implementations.

An implementation is a module with the functions of :class:`Ops`. ``reference`` (eager torch,
any device) is the specification; ``cpu`` (numba) and ``tagc.triton_kernels`` must agree with it
bit for bit on everything that is an integer, on every residual and on every output. They never
import each other.
"""

from tagc.ops.implementations import NAMES, Ops, compiles_ahead, get_ops
from tagc.ops.sketch import ABOVE, COUNTS, KEPT, NONZERO, SATURATED, UNION, UNRESOLVED

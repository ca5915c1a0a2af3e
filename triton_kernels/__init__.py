"""Triton kernels of tagc's operators; :mod:`tagc.triton_kernels.ops` has all operators.

Each file has one kernel: a description, the kernel, the launcher. Operators of several kernels are
in :mod:`.sketch` and :mod:`.matrix_quantize`. Importing this package does not import Triton, which
may not be installed; importing ``ops`` does.
"""

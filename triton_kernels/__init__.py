"""Triton kernels of tagc's operators; :mod:`tagc.triton_kernels.ops` has all operators.

One file per kernel: what it computes, the kernel, the launcher. Operators of several kernels are
in :mod:`.sketch`, :mod:`.pack`, :mod:`.unpack` and :mod:`.matrix_quantize`. Importing this package
does not import Triton, which exists only where GPUs do; importing ``ops`` does.
"""

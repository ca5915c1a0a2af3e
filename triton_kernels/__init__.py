"""Triton kernels of tagc's operators; :mod:`tagc.triton_kernels.ops` has the launch sequences.

One file per kernel: what it computes, the kernel, the launcher. Importing this package does not
import Triton, which exists only where GPUs do; importing ``ops`` does.
"""

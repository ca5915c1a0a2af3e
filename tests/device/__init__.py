"""Checks of the GPU kernels that need no GPU: Triton's interpreter, programs in other orders."""

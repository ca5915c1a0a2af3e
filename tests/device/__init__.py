"""Checks of the GPU kernels that need no GPU, in two layers: each sees what the other cannot.

``interpreted`` has Triton's interpreter run programs in other orders, ``ptx`` what is compiled.
"""

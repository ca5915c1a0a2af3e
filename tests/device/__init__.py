"""Checks of the GPU kernels that need no GPU: two layers, each of which sees what the other cannot.

``interpreted`` has Triton's interpreter run programs in other orders, ``ptx`` runs what was compiled.
"""

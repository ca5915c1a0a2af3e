"""Checks of the GPU kernels that need no GPU: three layers, each of which sees what others cannot.

``interpreted`` has Triton's interpreter run programs in other orders, ``frontend`` has package
``ttsem`` run what Triton's frontend makes of the kernels, ``ptx`` runs what was compiled.
"""

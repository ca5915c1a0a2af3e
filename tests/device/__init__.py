"""Checks of the compiled GPU kernels that need no GPU: `ptx` emulates what would be launched."""

"""The compiled loops of the CPU operators (numba)."""

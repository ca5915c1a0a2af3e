"""Sizes of grids and tiles. Triton has these functions, too, but its own also work in kernels, and
take the host as long as a view of a tensor."""


def cdiv(n: int, d: int) -> int:
    """``n / d``, rounded up."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``; ``n`` is positive."""
    return 1 << (n - 1).bit_length()

"""What a watched launch may fail with."""

from __future__ import annotations


class KernelError(AssertionError):
    """A kernel did what no kernel may do; the message begins with the kernel's file and line."""


class OutOfBoundsError(KernelError):
    """An access outside of every tensor of the launch."""


class RaceError(KernelError):
    """Two accesses of one place whose order nothing decides."""

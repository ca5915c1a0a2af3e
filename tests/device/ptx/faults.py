"""What an emulated launch may fail with."""

from __future__ import annotations


class KernelError(AssertionError):
    """A kernel did what no kernel may do; the message begins with the kernel's file and line."""


class OutOfBoundsError(KernelError):
    """An access outside of every tensor of the launch, or of the program's shared memory."""


class MisalignedError(KernelError):
    """An address that its access's width does not divide."""


class UninitializedError(KernelError):
    """A read of shared memory that no thread of the program wrote."""


class RaceError(KernelError):
    """Two accesses of one place whose order nothing decides."""


class DivergenceError(KernelError):
    """A barrier or an exchange between lanes that not all threads reach together."""


class NotEmulatedError(NotImplementedError):
    """An instruction that the emulator lacks."""

"""What an emulated launch may fail with."""

from __future__ import annotations


class Fault(AssertionError):
    """A kernel did what no kernel may do; the message begins with the kernel's file and line."""


class OutOfBounds(Fault):
    """An access outside of every tensor of the launch, or of the program's shared memory."""


class Misaligned(Fault):
    """An address that its access's width does not divide."""


class Uninitialized(Fault):
    """A read of shared memory that no thread of the program wrote."""


class Race(Fault):
    """Two accesses of one place whose order nothing decides."""


class Divergence(Fault):
    """A barrier or an exchange between lanes that not all threads reach together."""


class NotEmulated(NotImplementedError):
    """An instruction that the emulator lacks."""

"""Threads of a batch of programs side by side: lane ``i`` of every array is thread ``i``.

A register is an array of unsigned numbers ``[programs * threads]``. One that nobody wrote holds
garbage.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .faults import NotEmulatedError
from .memory import Memory, Region
from .numbers import BITS
from .parse import Kernel
from .races import Access

Array = np.ndarray
Operand = Callable[["Threads"], Any]


class Threads:
    """Registers and time of a batch.

    Args:
        programs: numbers of the programs in the grid, ``[n, 3]``.
        first: number of the first program in the launch.
        threads: of a program.
        parameters: bits by name.
    """

    def __init__(
        self, kernel: Kernel, programs: Array, first: int, threads: int, grid: tuple[int, ...],
        parameters: dict[str, int], memory: Memory, shared: Region, rng: Any,
    ) -> None:  # fmt: skip
        n = len(programs) * threads
        self.kernel, self.count, self.rng = kernel, n, rng
        self.parameters, self.memory, self.shared = parameters, memory, shared
        self.threads = threads
        self.lanes = np.arange(n)
        self.program = self.lanes // threads
        self.number = self.program + first
        self.thread = self.lanes + first * threads
        self.shared_size = len(shared.view(1)) // len(programs)
        self.since, self.warp_since = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.now, self.code = 0, 0
        self.registers: dict[str, Array] = {}
        place = programs[self.program].astype(np.uint32)
        self.special: dict[str, Any] = {
            "%tid.x": (self.lanes % threads).astype(np.uint32),
            "%laneid": (self.lanes % 32).astype(np.uint32),
            "%ntid.x": np.uint32(threads),
        }
        for i, axis in enumerate("xyz"):
            self.special[f"%ctaid.{axis}"] = place[:, i]
            self.special[f"%nctaid.{axis}"] = np.uint32(grid[i])
            if i:
                self.special[f"%tid.{axis}"] = np.uint32(0)

    def read(self, register: str) -> Array:
        """A register's bits."""
        found = self.registers.get(register)
        if found is None:
            width = self.kernel.width(register)
            high = 2 if width == 1 else 1 << min(width, 63)
            found = self.rng.integers(0, high, self.count, dtype=np.int64).astype(BITS[width])
            self.registers[register] = found
        return found

    def write(self, register: str, value: Any, mask: Array | None) -> None:
        """Write the lanes of ``mask``; all without one."""
        if register == "_":
            return
        if mask is not None:
            value = np.where(mask, value, self.read(register))
        elif value.shape == ():
            value = np.full(self.count, value)
        self.registers[register] = value

    def full(self, value: Any) -> Array:
        """An array of a value, which may be one for all."""
        return np.full(self.count, value) if value.shape == () else value

    def active(self, mask: Array | None) -> Array:
        """Numbers of the lanes of a mask."""
        return self.lanes if mask is None else np.nonzero(mask)[0]

    def access(self, lanes: Array) -> Access:
        """Who they are, for :mod:`.races`."""
        return Access(self.thread[lanes], self.number[lanes], self.since[lanes],
                      self.warp_since[lanes], self.now, self.code, self.threads)  # fmt: skip

    def barrier(self, lanes: Array | None, warp: bool = False) -> None:
        """What comes later is ordered after what these lanes did."""
        self.now += 1
        chosen = slice(None) if lanes is None else lanes
        self.warp_since[chosen] = self.now
        if not warp:
            self.since[chosen] = self.now


def operand(text: str, bits: int) -> Operand:
    """Function that reads an operand's bits, one for each lane or one for all."""
    if text.startswith("%"):
        if re.match(r"%(tid|ctaid|nctaid|ntid)\.|%laneid", text):
            return lambda t: t.special[text].astype(BITS[bits])
        return lambda t: t.read(text)
    if text == "global_smem":
        zero = BITS[bits](0)
        return lambda t: zero
    if parameter := re.fullmatch(r"\w+_param_(\d+)", text):  # its address is its number
        number = BITS[bits](int(parameter[1]))
        return lambda t: number
    if bits == 1:
        flag = np.bool_(int(text) != 0)
        return lambda t: flag
    if text[:2] in ("0f", "0d"):
        value = int(text[2:], 16)
    elif re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
        value = int(text.rstrip("U"), 0)
    else:
        raise NotEmulatedError(f"operand {text!r}")
    constant = BITS[bits](value & ((1 << bits) - 1))
    return lambda t: constant


def address(text: str) -> Callable[[Threads], Array]:
    """Function that computes the addresses of ``[ %rd1 + 8 ]``, int64 ``[lanes]``."""
    found = re.fullmatch(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
    if not found:
        raise NotEmulatedError(f"address {text!r}")
    offset = int(found[2] or 0)
    if found[1] == "global_smem":
        return lambda t: np.full(t.count, offset, np.int64)
    name = found[1]
    return lambda t: t.read(name).astype(np.int64) + offset

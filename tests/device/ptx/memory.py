"""Memory of a launch: its tensors, far apart from each other, and the programs' shared memory.

Every storage has addresses of its own, ``2**40`` apart, so that an access outside of one never
falls into another. Addresses keep their place within 64 bytes, which alignment depends on.

Worked example: a storage at 0x7f12_3450_0010 is region 1, its first byte at 2**40 + 0x10. An
access at 2**40 + 0x0c is outside.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from torch import Tensor

from .faults import MisalignedError, OutOfBoundsError
from .numbers import BITS
from .races import Watch

_APART = 40
Array = np.ndarray


class Region:
    """Bytes that are accessed under addresses of their own.

    Attributes:
        base: address of the first byte.
        watch: who accessed what.
    """

    def __init__(self, name: str, base: int, data: Array, granule: int, shared: bool) -> None:
        self.name, self.base, self._data = name, base, data
        self.watch = Watch(-(-len(data) // granule), shared=shared)
        self._granule = granule
        self._views: dict[int, Array] = {}

    def view(self, size: int) -> Array:
        """All whole elements of ``size`` bytes."""
        if size not in self._views:
            whole = self._data[: len(self._data) // size * size]
            self._views[size] = whole.view(BITS[8 * size])
        return self._views[size]

    def places(self, address: Array, size: int, count: int, where: str) -> Array:
        """Elements at the addresses of an access of ``count`` elements of ``size`` bytes."""
        place = address - self.base
        width = size * count
        if place.min() < 0 or place.max() + width > len(self._data):
            worst = int(place.max()) if place.min() >= 0 else int(place.min())
            raise OutOfBoundsError(
                f"{where}: {width} bytes at byte {worst} of {self.name}, which has "
                f"{len(self._data)}"
            )
        if (address % width).any():
            first = int(place[address % width != 0][0])
            raise MisalignedError(f"{where}: {width} bytes at byte {first} of {self.name}")
        return place // size

    def cells(self, place: Array, size: int) -> Array:
        """Granules of elements, ``[n, granules of an element]``."""
        each = size // self._granule
        return place if each == 1 else place[:, None] * each + np.arange(each)


class Memory:
    """The tensors of a launch.

    Args:
        granule: bytes that no access takes a part of.
    """

    def __init__(self, granule: int) -> None:
        self._granule = granule
        self._regions: list[Region] = []
        self._known: dict[int, int] = {}  # address of a storage: the region's number

    def add(self, name: str, tensor: Tensor) -> int:
        """Address of the tensor's first element."""
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        if not storage.nbytes():
            return 0
        if begin not in self._known:
            self._known[begin] = len(self._regions)
            raw: Any = (ctypes.c_uint8 * storage.nbytes()).from_address(begin)
            base = (len(self._regions) + 1 << _APART) + begin % 64
            data = np.frombuffer(raw, np.uint8)
            self._regions.append(Region(f"tensor {name!r}", base, data, self._granule, False))
        return self._regions[self._known[begin]].base + tensor.data_ptr() - begin

    def region(self, address: Array, where: str) -> Region:
        """The region that all addresses belong to.

        A thread's address below a tensor's first byte belongs to the tensor before it, and is
        outside of that one, too.
        """
        number = (address >> _APART) - 1
        first = int(number[0])
        if not 0 <= first < len(self._regions):
            raise OutOfBoundsError(f"{where}: address {int(address[0]):#x} is in no tensor")
        if (number != first).any():
            other = int(address[number != first][0])
            raise OutOfBoundsError(
                f"{where}: address {other:#x} is outside of {self._regions[first].name}"
            )
        return self._regions[first]


def shared_memory(size: int, programs: int, granule: int, rng: Any) -> Region:
    """Shared memory of programs, one after the other, full of garbage; its addresses start at 0."""
    each = max(-(-size // 16) * 16, 16)
    garbage = rng.integers(0, 256, each * programs, dtype=np.uint8)
    return Region("shared memory", 0, garbage, granule, True)

"""In the place of Triton's driver: launches compile for an architecture and run emulated."""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from support.compiled import Compiler

from . import atomics, control, conversions, floats, integers, memory_access, warps
from .memory import Memory, shared_memory
from .parse import Kernel, parse
from .registry import Step
from .threads import Threads

# All files of instructions.
INSTRUCTIONS = (atomics, conversions, floats, integers, memory_access, warps)
# Lanes that are computed at once.
_LANES = 4096


_KERNELS: dict[str, tuple[Kernel, list[Step | None]]] = {}


@contextlib.contextmanager
def emulated(
    arch: int = 90, *, seed: int = 0, change: Callable[[str], str] | None = None
) -> Iterator[Counter[str]]:
    """Inside, kernels are launched on CPU tensors; yields how often, by kernel.

    Args:
        seed: of the order of programs and of atomic operations, and of garbage.
        change: of PTX, to plant an error.
    """
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    launch, launches = JITFunction.run, Counter[str]()
    rng = np.random.default_rng(seed)

    def run(self, *args, grid, warmup, **kwargs):
        kernel: Any = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if warmup:
            return kernel
        named = dict(zip(self.arg_names, args, strict=False))
        named |= {n: v for n, v in kwargs.items() if n in self.arg_names}
        ptx = kernel.asm["ptx"] if change is None else change(kernel.asm["ptx"])
        key = kernel.hash if change is None else ptx
        if key not in _KERNELS:
            parsed = parse(ptx)
            _KERNELS[key] = parsed, control.compiled(parsed)
        whole: Any = grid(named) if callable(grid) else grid
        launches[self.__name__] += 1
        execute(*_KERNELS[key], _arguments(kernel, named), (*whole, 1, 1)[:3],
                32 * kernel.metadata.num_warps, kernel.metadata.shared, rng)  # fmt: skip
        return kernel

    with (
        mock.patch.object(driver, "_active", Compiler(arch)),
        mock.patch.object(JITFunction, "run", run),
    ):
        yield launches


def _arguments(kernel: Any, named: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Name, type and value of what is no constant, in order."""

    def flat(name: str, kind: Any, value: Any) -> Iterator[tuple[str, str, Any]]:
        if isinstance(kind, tuple):
            for one, its in zip(kind, value, strict=True):
                yield from flat(name, one, its)
        elif kind != "constexpr":
            yield name, kind, value

    return [x for n, kind in kernel.src.signature.items() for x in flat(n, kind, named.get(n))]


def execute(
    kernel: Kernel, steps: list[Step | None], arguments: list[tuple[str, str, Any]],
    grid: tuple[int, ...], threads: int, shared: int, rng: np.random.Generator,
) -> None:  # fmt: skip
    """Launch a kernel."""
    granule = _granule(kernel)
    memory = Memory(granule["global"])
    values = [_bits(memory, *argument) for argument in arguments]
    # Triton adds pointers to scratch memory, which these kernels have none of.
    values += [0] * (len(kernel.parameters) - len(values))
    parameters = dict(zip(kernel.parameters, values, strict=True))
    ids = np.indices(grid[::-1]).reshape(3, -1).T[:, ::-1]
    ids = rng.permutation(ids)
    each = max(1, _LANES // threads)
    with np.errstate(all="ignore"):
        for first in range(0, len(ids), each):
            some = ids[first : first + each]
            here = shared_memory(shared, len(some), granule["shared"], rng)
            t = Threads(kernel, some, first, threads, grid, parameters, memory, here, rng)
            control.run(t, steps)


def _granule(kernel: Kernel) -> dict[str, int]:
    """Bytes of the narrowest access."""
    least = {"global": 8, "shared": 8}
    for i in kernel.code:
        for space in least:
            if space in i.parts and i.bits:
                least[space] = min(least[space], i.bits // 8)
    return least


def _bits(memory: Memory, name: str, kind: str, value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return memory.add(name, value)
    if kind.startswith("fp"):
        assert kind == "fp32", kind
        return struct.unpack("I", struct.pack("f", value))[0]
    return int(value) & (1 << 64) - 1

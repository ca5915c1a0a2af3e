"""What the Triton kernels compile to, without a GPU: registers, spills, shared memory, PTX.

The launchers run on CPU tensors, with a driver that compiles for the wanted architecture and
launches nothing. So these are exactly the kernels that would be launched.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel as it would be launched."""

    name: str
    arch: int
    signature: dict[str, str]  # Triton types by argument
    constants: dict[str, Any]  # by argument, those that are constants
    registers: int
    spilled: int  # bytes, stores and loads
    shared: int  # bytes
    ptx: str
    cubin: bytes = b""
    warps: int = 4

    @property
    def variant(self) -> str:
        """Types of the tensors."""
        return ", ".join(f"{k} {v[1:]}" for k, v in self.signature.items() if v.startswith("*"))


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One requested launch.

    Attributes:
        function: the Python function that Triton compiles.
        arguments: all of them by name, tensors and constants alike.
        grid: programs along three axes.
    """

    kernel: Compiled
    function: Any
    arguments: dict[str, Any]
    grid: tuple[int, int, int]


class Compiler:
    """Passes for a Triton driver.

    Args:
        purpose: part of the device's name. For as long as the process lives, kernels keep what was
            compiled for a device. So to get a compilation log, use a device of your own.
    """

    def __init__(self, arch: int, purpose: str = "") -> None:
        from triton.backends.compiler import GPUTarget

        self._device, self._target = f"{arch} {purpose}", GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> Any:
        return self._device

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


@contextlib.contextmanager
def compiling(
    arch: int, launched: Callable[[Launch], object] | None = None
) -> Iterator[list[Compiled]]:
    """Inside, launches compile for ``arch`` and are collected, each variant of a kernel once.

    Args:
        launched: called with every launch, in order.
    """
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    kernels: dict[str, Compiled] = {}
    found: list[Compiled] = []
    launch = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel: Any = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in _EXAMINED:
            _EXAMINED[kernel.hash] = _examine(self.__name__, arch, kernel, log.getvalue())
        if kernel.hash not in kernels:
            kernels[kernel.hash] = _EXAMINED[kernel.hash]
            found.append(kernels[kernel.hash])
        if launched is not None:
            launched(_launch(self, kernels[kernel.hash], args, kwargs, grid))
        return kernel

    backend = importlib.import_module("triton.backends.nvidia.compiler").CUDABackend
    make_ptx = backend.make_ptx

    def with_right_lines(*args: Any, **kwargs: Any) -> str:
        return right_lines(make_ptx(*args, **kwargs))

    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.object(backend, "make_ptx", with_right_lines),
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache, TRITON_DUMP_PTXAS_LOG="1"),
        mock.patch.object(driver, "_active", Compiler(arch, "logged")),
        mock.patch.object(JITFunction, "run", run),
    ):
        yield found


def right_lines(ptx: str) -> str:
    """Keep the source lines of PTX correct: LLVM takes every line of inline assembly, such as
    Triton's masked loads, for another line of the source."""
    lines: list[str] = []
    inside = located = False
    for line in ptx.splitlines(keepends=True):
        if "// begin inline asm" in line:
            inside, located = True, False
        elif "// end inline asm" in line:
            inside = False
        elif inside and line.lstrip().startswith(".loc"):
            if located:
                continue
            located = True
        elif inside and line.strip():
            located = True
        lines.append(line)
    return "".join(lines)


def _launch(function: Any, kernel: Compiled, args: Any, kwargs: Any, grid: Any) -> Launch:
    names = function.arg_names
    arguments = dict(zip(names, args, strict=False))
    arguments |= {name: value for name, value in kwargs.items() if name in names}
    x, y, z = (*grid, 1, 1)[:3]
    return Launch(kernel=kernel, function=function, arguments=arguments, grid=(x, y, z))


# Triton keeps compiled kernels, so a process gets their log only once.
_EXAMINED: dict[str, Compiled] = {}


def _examine(name: str, arch: int, kernel: Any, log: str) -> Compiled:
    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        assert found, f"{name}: no {pattern!r} in the log of ptxas:\n{log}"
        return int(found[1])

    return Compiled(
        name=name,
        arch=arch,
        signature=dict(kernel.src.signature),
        constants=_constants(kernel),
        registers=number(r"Used (\d+) registers"),
        spilled=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        shared=kernel.metadata.shared,
        ptx=kernel.asm["ptx"],
        cubin=kernel.asm["cubin"],
        warps=kernel.metadata.num_warps,
    )


def _constants(kernel: Any) -> dict[str, Any]:
    names = list(kernel.src.signature)
    return {names[place[0]]: value for place, value in kernel.src.constants.items()}

"""What the Triton kernels compile to, without a GPU: registers, spills, PTX.

The launchers run on CPU tensors, with a driver that compiles for the wanted architecture and
launches nothing. So these are exactly the kernels that would be launched.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel as it would be launched."""

    name: str
    arch: int
    signature: dict[str, Any]  # Triton types by argument, of tuples as tuples
    registers: int
    spilled: int  # bytes, stores and loads
    ptx: str

    @property
    def variant(self) -> str:
        """Types of the tensors."""
        of_tensors = {k: v for k, v in self.signature.items() if str(v).startswith("*")}
        return ", ".join(f"{k} {v[1:]}" for k, v in of_tensors.items())


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
def compiling(arch: int) -> Iterator[list[Compiled]]:
    """Inside, launches compile for ``arch`` and are collected, each variant of a kernel once."""
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
        return _NeverStarted()

    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache, TRITON_DUMP_PTXAS_LOG="1"),
        mock.patch.object(driver, "_active", Compiler(arch, "logged")),
        mock.patch.object(JITFunction, "run", run),
    ):
        yield found


class _NeverStarted:
    """A compiled kernel for a device that is not there."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, stream: None


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
        registers=number(r"Used (\d+) registers"),
        spilled=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        ptx=kernel.asm["ptx"],
    )

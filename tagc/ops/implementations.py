"""All operators of an implementation, and which one runs on a device."""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import Protocol, cast

import torch

from tagc.ops.blocks import BlockOps
from tagc.ops.matrix import MatrixOps
from tagc.ops.packed import PackedOps
from tagc.ops.sketch import SketchOps
from tagc.warn import warn

NAMES = ("auto", "reference", "cpu", "triton")


class Ops(SketchOps, BlockOps, MatrixOps, PackedOps, Protocol):
    """All operators of an implementation."""

    def release(self) -> None:
        """Let go of the buffers that are kept between calls; the next call makes them anew."""
        ...


@cache
def _warn_reference(device_type: str) -> None:
    warn(
        f"tagc runs its eager reference on {device_type}: exact, but slow and with host "
        "synchronization in decode; ops='triton' takes the Triton kernels, which are tested in "
        "Triton's interpreter and compile, but have not been measured on a GPU yet"
    )


def get_ops(device: torch.device | str, name: str | None = None) -> Ops:
    """The implementation for a device.

    Args:
        device: where the tensors live.
        name: one of ``NAMES``; default from the environment variable ``TAGC_OPS``, else ``auto``:
            ``cpu`` on a CPU, the eager reference (with a warning) elsewhere. ``triton`` is for
            CUDA devices.

    Raises:
        ValueError: if the name is unknown or the implementation does not run on the device.
    """
    kind = torch.device(device).type
    name = name or os.environ.get("TAGC_OPS") or "auto"
    if name not in NAMES:
        raise ValueError(f"unknown implementation {name!r}; choose from {', '.join(NAMES)}")
    if name == "auto":
        name = "cpu" if kind == "cpu" else "reference"
        if name == "reference":
            _warn_reference(kind)
    needs = {"cpu": "cpu", "triton": "cuda"}.get(name, kind)
    if kind != needs:
        raise ValueError(
            f"the implementation {name!r} does not run on {kind}; use 'reference' or 'auto'"
        )
    module = "tagc.triton_kernels.ops" if name == "triton" else f"tagc.ops.{name}"
    try:
        return cast(Ops, importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("the implementation 'triton' needs the package triton") from error

"""All operators of an implementation, and the choice of the implementation for a device."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol, TypeGuard, cast

import torch
from torch import Tensor

from tagc.basics.warn import warn
from tagc.ops import reference

NAMES = ("auto", "reference", "cpu", "triton")
# The first choice of "auto", by type of the device.
_FASTEST = {"cpu": "cpu", "cuda": "triton"}
# The type of device that an implementation needs; the reference runs on all.
_RUNS_ON = {"cpu": "cpu", "triton": "cuda"}
# Compute capability that Triton and bfloat16 need.
_LEAST_CAPABILITY = (8, 0)


class Ops(Protocol):
    """All operators of an implementation. The reference's docstrings are their contract."""

    quantize = staticmethod(reference.quantize)
    dequantize = staticmethod(reference.dequantize)
    quantize_matrix = staticmethod(reference.quantize_matrix)
    dequantize_matrix = staticmethod(reference.dequantize_matrix)
    measure_exact = staticmethod(reference.measure_exact)
    encode_exact = staticmethod(reference.encode_exact)
    decode_exact = staticmethod(reference.decode_exact)
    pack_exponents = staticmethod(reference.pack_exponents)
    unpack_exponents = staticmethod(reference.unpack_exponents)
    encode = staticmethod(reference.encode)
    decode = staticmethod(reference.decode)
    select = staticmethod(reference.select)
    insert = staticmethod(reference.insert)
    peel = staticmethod(reference.peel)
    undo_lag = staticmethod(reference.undo_lag)
    steer = staticmethod(reference.steer)
    fingerprint = staticmethod(reference.fingerprint)
    put_dense = staticmethod(reference.put_dense)
    sum_dense = staticmethod(reference.sum_dense)
    quantize_and_put = staticmethod(reference.quantize_and_put)
    dequantize_and_sum = staticmethod(reference.dequantize_and_sum)
    release = staticmethod(reference.release)


ALIGNED = 16
"""Kernels are compiled for addresses that are multiples of this, and for others."""


class RecordedLaunches(Protocol):
    """An operator at one place in a program. Its tensors have the same shapes, strides and dtypes
    in every call.

    Attributes:
        ready: whether the last call recorded launches.
        places: the arguments of launches that are addresses in the operator's tensors, by number of
            the tensor: the list of arguments, and the place in it.
        tied: pairs of tensors that may only move as far as each other; None does not move.
    """

    ready: bool
    places: Mapping[int, Sequence[tuple[list[Any], int]]]
    tied: Sequence[tuple[int, int | None]]

    def __call__(self, *tensors: Tensor | None) -> None:
        """Run the operator, and record its launches."""
        ...

    def starts(self, stream: int) -> Iterator[tuple[Callable[..., object], list[Any]]]:
        """Functions that start what is recorded on a stream of the tensors' device, which must be
        the current one, and their arguments."""
        ...


class DeviceOps(Ops, Protocol):
    """Operators for a device on which the tests of this project have not run. They can be compiled
    ahead, and :mod:`tagc.selfcheck` checks them on the device."""

    def compiling_only(self) -> AbstractContextManager[None]:
        """In this context, operators compile their kernels and do not run them. Call them with
        tensors on the device ``meta`` with the shapes, strides and offsets of a step."""
        ...

    def recorded(self, operator: Callable[..., object]) -> RecordedLaunches | None:
        """An operator for one place in a program, which records its launches. None if there is
        nothing to record."""
        ...


def compiles_ahead(ops: Ops) -> TypeGuard[DeviceOps]:
    """Whether these are :class:`DeviceOps`."""
    return hasattr(ops, "compiling_only")


@cache
def _warn_reference(why: str) -> None:
    warn(
        f"tagc runs its eager reference, which is exact but slow, and synchronizes with the host "
        f"in decode: {why}"
    )


def get_ops(device: torch.device | str, name: str | None = None) -> Ops:
    """The implementation for a device.

    Args:
        device: the device of the tensors.
        name: one of ``NAMES``; default from the environment variable ``TAGC_OPS``, else ``auto``:
            ``cpu`` on a CPU; ``triton`` on an NVIDIA GPU from Ampere on, which :func:`tagc.wrap`
            compiles and compares with the reference before the first step; the eager reference
            (with a warning) elsewhere.

    Raises:
        ValueError: if the name is unknown or the implementation does not run on the device.
    """
    device = torch.device(device)
    name = name or os.environ.get("TAGC_OPS") or "auto"
    if name not in NAMES:
        raise ValueError(f"unknown implementation {name!r}; choose from {', '.join(NAMES)}")
    if name == "auto":
        name = _FASTEST.get(device.type, "reference")
        against = _against_triton(device) if name == "triton" else None
        if device.type not in _FASTEST:
            against = f"it has no other implementation for devices of type {device.type!r}"
        if against is not None:
            _warn_reference(against)
            name = "reference"
    needs = _RUNS_ON.get(name, device.type)
    if device.type != needs:
        raise ValueError(
            f"the implementation {name!r} does not run on {device.type}; use 'reference' or 'auto'"
        )
    module = "tagc.triton_kernels.ops" if name == "triton" else f"tagc.ops.{name}"
    try:
        return cast(Ops, importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("the implementation 'triton' needs the package triton") from error


def _against_triton(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on a device; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "its GPU kernels need the package triton, which is not installed"
    if torch.version.hip is not None:
        return "its GPU kernels are for NVIDIA, and were never compiled for AMD"
    if device.type == "cuda" and torch.cuda.is_available():
        found = torch.cuda.get_device_capability(device)
        if found < _LEAST_CAPABILITY:
            least = ".".join(map(str, _LEAST_CAPABILITY))
            has = ".".join(map(str, found))
            return f"its kernels need compute capability {least}, and {device} has {has}"
    return None

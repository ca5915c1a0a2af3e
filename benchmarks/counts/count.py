"""The count of one operator: its record.

The operator runs without launching anything: kernels are compiled, and torch's own calls (zeros,
copies) are noted and not executed. Its tensors are never touched, so that the system gives them
addresses and no memory.
"""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import asdict

import torch
import triton
from torch import Tensor

from ..compiled import Launch, compiling
from ..records import Record
from .cases import Case
from .estimate import copy_seconds, moved, seconds
from .follow import follow
from .h100 import ARCH
from .instructions import executed
from .operators import OPERATORS, Operator
from .torch_kernels import TorchKernels


def count(case: Case) -> Record:
    """Count one operator.

    Returns:
        the case's fields; by kernel, launches, programs, registers, bytes, instructions per element
        and what bounds it; and the sums. Seconds are estimates, not measurements.
    """
    ops = importlib.import_module("tagc.triton_kernels.ops")
    operator = OPERATORS[case.op](ops, case)
    launched: list[Launch] = []
    copied: list[int] = []  # bytes of each of torch's kernels
    try:
        with compiling(ARCH, launched.append), TorchKernels(copied.append):
            operator.call()
    finally:
        ops.release()
    _check_names(operator, launched)
    kernels: dict[str, Record] = {}
    total = Counter[str]()
    pipes = Counter[str]()
    for launch in launched:
        one = count_launch(launch, operator)
        pipes.update(one.pop("all_pipes"))
        total.update({k: one[k] for k in ("bytes", "atomics", "instructions", "seconds")})
        name = launch.kernel.name.removesuffix("_kernel")
        if name in kernels:
            _add(kernels[name], one)
        else:
            kernels[name] = {"launches": 1, **one}
    took = total["seconds"] + copy_seconds(sum(copied))
    return {
        "suite": "counts",
        "machine": "H100",
        "triton": triton.__version__,
        "case": case.name,
        **{k: v for k, v in asdict(case).items() if v is not None},
        "note": operator.note,
        "launches": len(launched) + len(copied),
        "torch_launches": len(copied),
        "floor_bytes": int(operator.floor),
        "bytes": int(total["bytes"] + sum(copied)),
        "atomics": int(total["atomics"]),
        "per_element": round(total["instructions"] * 32 / case.numel, 3),
        "pipes": {k: round(v * 32 / case.numel, 3) for k, v in sorted(pipes.items()) if v},
        "microseconds": round(took * 1e6, 1),
        "share_of_copy": round(copy_seconds(operator.floor) / took, 3),
        "kernels": {name: _rounded(k, case.numel, took) for name, k in kernels.items()},
    }


def _check_names(operator: Operator, launched: list[Launch]) -> None:
    """Every hint must have its argument, and every result its function; else it was renamed.

    Raises:
        ValueError: if one has not.
    """
    there = {x for launch in launched for x in launch.arguments}
    for launch in launched:
        for name in (*launch.arguments, *launch.function.fn.__globals__):
            there.add(f"{launch.function.__name__}.{name}")
    if lost := sorted((operator.hints.keys() | operator.results.keys()) - there):
        raise ValueError(
            f"no kernel that is launched has {' or '.join(lost)}: was it renamed? see "
            "benchmarks/counts/operators.py"
        )


def count_launch(launch: Launch, operator: Operator) -> Record:
    """One launch: bytes, atomics, instructions, seconds and what bounds them."""
    kernel = launch.kernel
    followed = follow(launch, operator.hints, operator.results)
    pipes, instructions = executed(kernel, followed.executions)
    sizes = {name: _bytes(x) for name, x in launch.arguments.items() if isinstance(x, Tensor)}
    x, y, z = launch.grid
    what = moved(followed.accesses, sizes, y * z)
    times = seconds(pipes, instructions, what, x * y * z)
    bound = max(times, key=lambda k: times[k])
    return {
        "programs": x * y * z,
        "registers": kernel.registers,
        "bytes": what.memory,
        "sectors": what.sectors,
        "atomics": what.atomics,
        "instructions": instructions,
        "all_pipes": pipes,
        "seconds": times[bound],
        "bound": bound,
    }


def _bytes(x: torch.Tensor) -> int:
    """Of a tensor, without what an expanded dimension repeats."""
    numel = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        numel *= size if stride else 1
    return numel * x.element_size()


def _add(kernel: Record, one: Record) -> None:
    kernel["launches"] += 1
    if one["seconds"] > kernel["seconds"]:
        kernel["bound"] = one["bound"]
    for key in ("bytes", "sectors", "atomics", "instructions", "seconds"):
        kernel[key] += one[key]


def _rounded(kernel: Record, numel: int, took: float) -> Record:
    kernel["per_element"] = round(kernel.pop("instructions") * 32 / numel, 3)
    kernel["microseconds"] = round(kernel["seconds"] * 1e6, 2)
    kernel["share_of_time"] = round(kernel.pop("seconds") / took, 3)
    for key in ("bytes", "sectors", "atomics"):
        kernel[key] = int(kernel[key])
    return kernel

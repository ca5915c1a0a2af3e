"""The count of one operator on one machine: its record."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from typing import Any

import torch
import triton

from ..compiled import Launch
from ..records import Record
from .ask import ask
from .estimate import copy_seconds, moved, seconds
from .follow import Followed, follow
from .instructions import executed
from .machines import Machine, occupancy
from .work import Asked, Work


def count(work: Work, machine: Machine, asked: Asked | None = None) -> Record:
    """Count one operator.

    Returns:
        the work's fields; by kernel, launches, programs, registers, occupancy, bytes, instructions
        per element and what bounds it; and the sums. Seconds are estimates, not measurements.
    """
    asked = ask(work, machine.arch) if asked is None else asked
    kernels: dict[str, Record] = {}
    total: dict[str, float] = {"bytes": 0.0, "atomics": 0.0, "instructions": 0.0}
    pipes: defaultdict[str, float] = defaultdict(float)
    took = 0.0
    for number, launch in enumerate(asked.launches):
        key = (work, number)
        # The same on all machines.
        if key not in _FOLLOWED or launch.kernel.name != _FOLLOWED[key][0]:
            _FOLLOWED[key] = (launch.kernel.name, follow(launch, asked.hints, asked.results))
        one = count_launch(launch, _FOLLOWED[key][1], machine)
        name = launch.kernel.name.removesuffix("_kernel")
        took += one["seconds"]
        for pipe, times in one.pop("all_pipes").items():
            pipes[pipe] += times
        total = {k: v + one[k] for k, v in total.items()}
        if name in kernels:
            _add(kernels[name], one)
        else:
            kernels[name] = {"launches": 1, **one}
    copied = sum(asked.torch)
    took += copy_seconds(machine, copied)
    floor = copy_seconds(machine, asked.floor)
    launches = len(asked.launches) + len(asked.torch)
    return {
        "suite": "counts",
        "machine": machine.name,
        "arch": machine.arch,
        "triton": triton.__version__,
        "case": work.name,
        **{k: v for k, v in asdict(work).items() if v is not None},
        "note": asked.note,
        "launches": launches,
        "torch_launches": len(asked.torch),
        "floor_bytes": int(asked.floor),
        "bytes": int(total["bytes"] + copied),
        "atomics": int(total["atomics"]),
        "per_element": round(total["instructions"] * 32 / work.numel, 3),
        "pipes": {k: round(v * 32 / work.numel, 3) for k, v in sorted(pipes.items()) if v},
        "microseconds": round(took * 1e6, 1),
        "launch_microseconds": round(launches * machine.launch * 1e6, 1),
        "share_of_copy": round(floor / took, 3),
        "kernels": {name: _rounded(k, work.numel, took) for name, k in kernels.items()},
    }


_FOLLOWED: dict[tuple[Work, int], tuple[str, Followed]] = {}


def count_launch(launch: Launch, followed: Followed, machine: Machine) -> Record:
    """One launch: bytes, atomics, instructions, seconds and what bounds them."""
    opcodes, pipes = executed(launch.kernel, followed)
    sizes = {name: _bytes(x) for name, x in launch.arguments.items() if isinstance(x, torch.Tensor)}
    x, y, z = launch.grid
    what = moved(followed.accesses, sizes, y * z, machine.cache)
    instructions = sum(opcodes.values())
    times = seconds(machine, pipes, instructions, what, x * y * z)
    bound = max(times, key=lambda k: times[k])
    return {
        "programs": x * y * z,
        "warps": launch.kernel.warps,
        "registers": launch.kernel.registers,
        "shared": launch.kernel.shared,
        "occupancy": round(_occupancy(launch, machine), 3),
        "bytes": what.memory,
        "sectors": what.sectors,
        "atomics": what.atomics,
        "instructions": instructions,
        "all_pipes": pipes,
        "seconds": times[bound],
        "bound": bound,
    }


def _occupancy(launch: Launch, machine: Machine) -> float:
    k = launch.kernel
    return occupancy(machine, registers=k.registers, shared=k.shared, warps=k.warps)


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


def _rounded(kernel: Record, numel: int, took: float) -> dict[str, Any]:
    kernel["per_element"] = round(kernel.pop("instructions") * 32 / numel, 3)
    kernel["microseconds"] = round(kernel["seconds"] * 1e6, 2)
    kernel["share_of_time"] = round(kernel.pop("seconds") / took, 3)
    for key in ("bytes", "sectors", "atomics"):
        kernel[key] = int(kernel[key])
    return kernel

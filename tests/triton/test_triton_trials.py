"""The Triton operators give the bits of the reference, on the table of operators' cases.

Every case runs compiled and emulated, and, where there is a GPU, natively (``-m gpu``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from device.ptx.launch import emulated
from support.edges import (
    BF16,
    CODES,
    F32,
    both_ways,
    changed,
    check_lag_in_place,
    edges,
    encoding,
    large_tables,
    matrix,
    random_matrix,
    tensors_of,
    ties,
)
from support.launches import kernels
from support.trials import PLACEMENTS, SHARDS, SIZES, Case, Trial, shards, trials

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

# Functions that take a device, by name.
CASES: dict[str, Callable[[str], None]] = {}
PLACED = ("not aligned", "aligned", "messages in wider rows, not aligned")


def case(trial: Trial, patches: Callable[[], Any] = contextlib.nullcontext) -> None:
    # The placement of tensors alternates between calls, and between cases.
    turn = len(CASES) % len(PLACED)

    def check(device: str) -> None:
        with patches():
            trial.check(kernels("ops"), torch.device(device), *PLACED[turn:], *PLACED[:turn])

    assert trial.name not in CASES
    CASES[trial.name] = check


@contextlib.contextmanager
def sized(**modules: dict[str, Any]) -> Iterator[None]:
    """With smaller tiles and the like in kernels' modules, instead of inputs of millions."""
    with contextlib.ExitStack() as stack:
        for name, values in modules.items():
            stack.enter_context(mock.patch.multiple(kernels(name), **values))
        yield


def sized_case(name: str, make: Callable[[], Iterable[Case]], **modules: dict[str, Any]) -> None:
    case(Trial(name, (make,)), lambda: sized(**modules))


def put_off() -> Iterator[Case]:
    """More groups of one size than fit, of which one program trims several tiles."""
    for form, n, hashes in (
        (("int32x1", F32, F32), 3000, 4), (("int8x4", BF16, BF16), 12_000, 4),
        (("int8x4", BF16, BF16), 12_000, 1),
    ):  # fmt: skip
        made = encoding(form, n, W=1, hashes=hashes, seed=4)
        t = tensors_of(made)
        t["grad"].mul_(1e3).clamp_(-1, 1)
        t["residual"].zero_()
        t["threshold"].fill_(1.0)
        yield from both_ways(made)


def full_bin() -> Iterator[Case]:
    """As many sizes in one bin as a program may count."""
    n = 2 * 32 * 1024 - 37
    for size in (1.0, 3.9):
        made = changed(encoding(("int32x1", BF16, None), n, W=1, hashes=4), capacity=64)
        t = tensors_of(made)
        t["grad"].fill_(size)
        t["grad"][0, -9:] = 5.0
        t["threshold"].fill_(1.0)
        yield made


def short_of_cells() -> Iterator[Case]:
    for symbol in ("int8x4", "int32x1"):
        yield from both_ways(encoding((symbol, F32, F32), 1200, "all above", hashes=3, room=1.3))


def long_rows() -> Iterator[Case]:
    for (bits, _), columns in zip(CODES, (170, 300), strict=True):
        x = random_matrix((1, 3, columns), np.random.default_rng(columns)).to(BF16)
        yield from matrix(x, bits, x, dtype=BF16)


for of_format in trials(SIZES):
    for one in of_format.parts(SIZES):
        case(one)
# Thousands of programs: only a GPU runs them.
MANY = [trial for trial in edges() if "largest row" in trial.name]
for trial in edges():
    if trial not in MANY:
        case(trial)
sized_case("ties over several programs", lambda: ties(((3000, 700), (3000, 1400))),
           trim={"_WORDS": 4})  # fmt: skip
sized_case("a program that trims several tiles", put_off, trim={"_PROGRAMS": 2, "_WORDS": 4})
sized_case("a program with a full bin", full_bin, trim={"_PROGRAMS": 1})
sized_case(
    "rows longer than a program's tile", long_rows,
    matrix_dequantize={"_WORDS": 16}, matrix_quantize={"_PROGRAMS": 1},
)  # fmt: skip
# Steps of all launches but the last, of the last, launches, room: 63 are the least.
for steps, last, launches, room in ((1, 1, 1, 256), (1, 1, 4, 256), (2, 3, 3, 63), (1, 0, 1, 63)):
    limits = {"_STEPS": steps, "_NO_LIMIT": last, "ROOM": room}
    sized_case(
        f"peeling in few steps: {steps} {last} {launches} {room}", short_of_cells,
        peel=limits | {"launches": lambda layout, count=launches: count}, table={"_CELLS": 512},
    )  # fmt: skip
sized_case("large tables", large_tables)
CASES["lag: in place"] = lambda device: check_lag_in_place(kernels("ops"), device)
# `make test` emulates these for sm_90, and `make test-device` for sm_80, too: of every family of
# operators that launch.
FEW = (
    "blocks 4 float32 float32, 1",
    "blocks 4 float16 bfloat16, 3",
    "dithered 8 float16, 1",
    "matrix 1 float32 float32, 1",
    "matrix 2 float16 bfloat16, 1",
    "sketch int8x4 bfloat16 bfloat16, 3",
    "exact float16 2, 1",
    "exponents bfloat16, 2",
    "lag bfloat16, 3",
    "fingerprint bfloat16, 1",
    "dense bfloat16 float32, 1",
    "merged bfloat16 float32, 3",
    "steer 0, 1",
)
# Compiles for ten seconds.
LARGE = ("sketch: a cell for each group, and groups that are put off",)
EMULATED = [
    *(pytest.param(name, 90, marks=[] if name in FEW else pytest.mark.device) for name in CASES),
    *(pytest.param(name, 80, marks=pytest.mark.device) for name in (*FEW, *LARGE)),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "arch"), EMULATED)
def test_compiled(name: str, arch: int) -> None:
    with emulated(arch):
        CASES[name]("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    CASES[name]("cuda")


def test_the_least_partition_of_packed_entries():
    """The most hashes of a cell, and 2 by which the first may be missed, fit 16 bits."""
    layout = next(iter(large_tables())).call["layout"]
    for partition, expected in ((65539, True), (65538, False)):
        assert kernels("table").packed(replace(layout, partition=partition)) is expected
        assert expected is False or -(-(2**32) // partition) + 2 <= 2**16


@pytest.mark.gpu
@pytest.mark.parametrize("trial", trials() + MANY, ids=lambda trial: trial.name)
def test_all_sizes(trial: Trial):
    trial.check(kernels("ops"), torch.device("cuda"), *PLACEMENTS)


@pytest.mark.gpu
@pytest.mark.parametrize("numel", SHARDS)
def test_shards_of_several_tiles(numel: int):
    shards(numel).check(kernels("ops"), torch.device("cuda"), *PLACEMENTS)

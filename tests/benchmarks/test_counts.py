"""Counts of GPU kernels: the counter on small kernels. It needs Triton's compiler and no GPU."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
import triton
import triton.language as tl

from benchmarks.compiled import Launch, compiling
from benchmarks.counts import count as counter
from benchmarks.counts.cases import Case
from benchmarks.counts.count import count, count_launch
from benchmarks.counts.language import Hint
from benchmarks.counts.operators import Operator
from benchmarks.records import Record

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("counts")]
N = 1 << 20
jit: Any = triton.jit
scalar: Any = importlib.import_module("tagc.triton_kernels.scalar")
stash: Any = importlib.import_module("tagc.triton_kernels.stash")
load_words, popcount = scalar.load_words, scalar.popcount
push_bits, pop = stash.push_bits, stash.pop


@jit
def plain(x, out, n, BLOCK: tl.constexpr):
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + j, tl.load(x + j, mask=j < n, other=0) + 1, mask=j < n)


@jit
def repeated(x, out, n, rounds, BLOCK: tl.constexpr):
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for _ in range(rounds):
        total += tl.load(x + j, mask=j < n, other=0)
        x += n
    tl.store(out + j, total, mask=j < n)


@jit
def _mixed(x):
    for _ in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        x = (x ^ (x >> 15)) * 0x2C1B3C6D
    return x


@jit
def hashed(x, out, n, BLOCK: tl.constexpr):
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = _mixed(tl.load(x + j, mask=j < n, other=0).to(tl.uint32))
    tl.atomic_add(out + tl.umulhi(h, tl.full([BLOCK], 0, tl.uint32) + n), 1, mask=j < n)


@jit
def guarded(x, counts, out, n, BLOCK: tl.constexpr):
    if tl.load(counts) == 0:
        return
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + j, tl.load(x + j, mask=j < n, other=0) + 1, mask=j < n)


@jit
def halves(x, out, n, half, BLOCK: tl.constexpr):
    if tl.program_id(0) < half:
        j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + j, tl.load(x + j, mask=j < n, other=0) + 1, mask=j < n)


@jit
def rarely(x, out, n, BLOCK: tl.constexpr):
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.sum(tl.load(x + j, mask=j < n, other=0), 0) > 9:  # pyright: ignore[reportOperatorIssue]  # seldom
        tl.store(out + j, j, mask=j < n)


@jit
def each_bit(bitmap, out, n, BLOCK: tl.constexpr):
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = load_words(bitmap + j, j < n)
    for _ in range(tl.max(popcount(word), 0)):  # pyright: ignore[reportArgumentType]
        tl.atomic_add(out + j, 1, mask=word != 0)
        word &= word - 1


@jit
def each_bit_while(bitmap, out, n, BLOCK: tl.constexpr):
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = load_words(bitmap + j, j < n)
    while tl.max((word != 0).to(tl.int32), 0) > 0:  # pyright: ignore[reportOperatorIssue]
        tl.atomic_add(out + j, 1, mask=word != 0)
        word = word & (word - 1)


@jit
def stashed(bitmap, stash, out, n, BLOCK: tl.constexpr):
    """One program: lists all bits, works on 32 of them at a time."""
    count = tl.zeros([], tl.int32)
    for first in range(0, n, 32):
        count = push_bits(stash, count, bitmap, first, n, 32)
        while (count >= 32) | ((first + 32 >= n) & (count > 0)):
            item = pop(stash, count, 32)
            count = tl.maximum(count - 32, 0)
            tl.atomic_add(out + item, 1, mask=item >= 0)


def counted(kernel: Any, *arguments: Any, hints: dict[str, Hint] | None = None) -> Record:
    """One launch with a program for 1024 elements."""

    def call() -> None:
        kernel[(N // 1024,)](*arguments, BLOCK=1024, num_warps=4, enable_fp_fusion=False)

    return launched(Operator(call=call, floor=1.0, hints=hints or {}))


def launched(operator: Operator) -> Record:
    launches: list[Launch] = []
    with compiling(90, launches.append):
        operator.call()
    (launch,) = launches
    return count_launch(launch, operator)


def ints(numel: int = N) -> torch.Tensor:
    return torch.empty(numel, dtype=torch.int32)


def test_dense_accesses_are_counted_to_the_byte():
    one = counted(plain, ints(), ints(), N)
    assert one["bytes"] == one["sectors"] == 2 * 4 * N
    assert one["atomics"] == 0
    assert one["programs"] == N // 1024
    # 8 elements a thread, read and written 4 at a time.
    assert one["all_pipes"]["global"] == 4 * 4 * (N // 1024)


def test_a_loop_counts_its_turns():
    few, many = (counted(repeated, ints(N * 64), ints(), N, rounds) for rounds in (4, 64))
    assert few["bytes"] == 4 * N * 5
    assert many["bytes"] == 4 * N * 65
    # Two loads of 16 bytes in every turn, whatever the assembler made of the loop.
    of_turns = 2 * 4 * (N // 1024) * 60
    assert many["all_pipes"]["global"] - few["all_pipes"]["global"] == pytest.approx(of_turns)
    assert many["instructions"] > 10 * few["instructions"] / 4


def test_hashes_cost_instructions_and_sectors():
    dense, apart = counted(plain, ints(), ints(), N), counted(hashed, ints(), ints(), N)
    assert apart["atomics"] == N
    assert apart["sectors"] == 4 * N + 2 * 32 * N
    # Three operations each in four turns that Triton unrolls, multiplication among them.
    assert apart["instructions"] - dense["instructions"] > 4 * 3 * N / 32 * 0.8
    assert apart["all_pipes"]["imul"] > dense["all_pipes"].get("imul", 0) + 4 * N / 32 * 0.8


@pytest.mark.parametrize(("number", "executed"), [(0, False), (7, True)])
def test_hints_decide_branches_that_memory_decides(number: int, executed: bool):
    hints = {"counts": Hint(number=lambda _: number)}
    one = counted(guarded, ints(), ints(1), ints(), N, hints=hints)
    assert (one["bytes"] > 4 * N) == executed
    # Without a hint the work is done.
    assert counted(guarded, ints(), ints(1), ints(), N)["bytes"] > 4 * N


def test_programs_that_differ_are_found():
    whole, part = counted(plain, ints(), ints(), N), counted(halves, ints(), ints(), N, 300)
    assert part["bytes"] == pytest.approx(2 * 4 * 300 * 1024, rel=0.02)
    assert part["instructions"] < whole["instructions"] / 2


def test_what_is_seldom_is_not_counted():
    assert counted(rarely, ints(), ints(), N)["bytes"] == 4 * N


@pytest.mark.some(3)
@pytest.mark.parametrize("kernel", [each_bit, each_bit_while])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_a_loop_over_bits_has_a_turn_for_each_of_the_fullest_word(kernel: Any, share: float):
    one = counted(kernel, ints(), ints(), N, hints={"bitmap": Hint(share=share, bits=True)})
    assert one["atomics"] == pytest.approx(32 * share * N, rel=0.01)
    # The fullest of 1024 words, sampled.
    words = np.random.default_rng(0).binomial(32, share, (2000, 1024))
    turns = words.max(1).mean()
    # Four warps with eight elements a thread; the assembler unrolls.
    made = one["all_pipes"].get("atomic", 0) / (N // 1024 * 4 * 8)
    assert turns * 0.98 <= made <= turns * 1.02 + 3


def test_what_is_stashed_is_worked_off():
    """Each bit once, 32 at a time, and nothing is left."""
    hints = {"bitmap": Hint(share=0.05, bits=True), "stash": Hint(listed=True)}

    def call() -> None:
        stashed[(1,)](
            ints(1024), ints(), ints(), 1024, BLOCK=32, num_warps=1, enable_fp_fusion=False
        )

    one = launched(Operator(call=call, floor=1.0, hints=hints))
    assert one["atomics"] == pytest.approx(32 * 1024 * 0.05, rel=0.02)
    steps = 32 * 1024 * 0.05 / 32
    assert one["all_pipes"]["atomic"] == pytest.approx(steps, abs=2)


@pytest.mark.parametrize(("hint", "result"), [("y", "hashed._mixed"), ("hashed.x", "hashed._mix")])
def test_a_hint_without_its_argument_is_an_error(monkeypatch, hint: str, result: str):
    """As one that was renamed would be."""
    operator = Operator(
        call=lambda: hashed[(1,)](
            ints(), ints(), N, BLOCK=1024, num_warps=4, enable_fp_fusion=False
        ),
        floor=1.0,
        hints={"x": Hint(), hint: Hint()},
        results={result: lambda call: call.result},
    )
    monkeypatch.setitem(counter.OPERATORS, "select", lambda ops, case: operator)
    lost = "y" if hint == "y" else result
    with pytest.raises(ValueError, match=f"no kernel that is launched has {lost}: "):
        count(Case(op="select"))

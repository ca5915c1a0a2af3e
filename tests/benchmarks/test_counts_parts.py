"""Parts of the counter: machine code, pipes, times, the simulation of peeling, tables."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

from benchmarks.counts.estimate import Moved, moved, seconds
from benchmarks.counts.h100 import CLOCK, MEMORY, RATES, pipe_of
from benchmarks.counts.peeling import simulate
from benchmarks.counts.sass import blocks_of
from benchmarks.counts.table import table

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("counts")]


def test_a_table_has_both_sides():
    slow = {"suite": "counts", "case": "planted", "share_of_copy": 0.25,
            "per_element": 40.0, "launches": 7, "bytes": 30, "floor_bytes": 10,
            "kernels": {"a": {"bound": "alu", "share_of_time": 0.7},
                        "b": {"bound": "L2", "share_of_time": 0.3}}}  # fmt: skip
    fast = slow | {"share_of_copy": 0.5, "per_element": 8.0, "launches": 2, "bytes": 20}
    steps = [{"policy": "all", "launches_per_block": n, "launches_per_step": 32 * n,
              "blocks": 32, "ranks": 8, "parameters": 7e9} for n in (9, 4)]  # fmt: skip
    text = table([slow, steps[0], fast, steps[1]])
    assert "| planted | 25% | 50% | 40.0 | 8.0 | 3.00 | 2.00 | 7 | 2 | a: alu, b: L2 |" in text
    assert "| all | 9 | 4 | 288 | 128 |" in text
    assert "new | " not in text
    assert "| other |  | 50% |" in table([slow, fast, fast | {"case": "other"}])


def test_peeling_by_lists():
    keys, cells, hashes = 20_000, 27_000, 4
    some = {"keys": keys, "cells": cells, "hashes": hashes, "room": 256, "block": 32}
    found = simulate(**some, programs=64, launches=3, limit=64)
    assert found.recovered == keys
    assert found.sizes[-1] == 0
    # A cell is looked at once: those that hold one key at first, and those that are freed.
    freed = sum(sum(map(sum, launch)) for launch in found.freed)
    assert found.sizes[0] + freed == found.taken
    assert 1 < found.taken / keys < 1.4
    # A key alone in a cell at first: of a Poisson number of keys, one.
    mean = keys * hashes / cells
    assert found.sizes[0] == pytest.approx(cells * mean * math.exp(-mean), rel=0.03)
    # Whatever the limit makes of it, it is the same work.
    short = simulate(**some, programs=64, launches=8, limit=2)
    assert max(short.steps[:-1]) <= 64 // 4
    assert short.sizes[1] > 0
    assert (short.recovered, short.sizes[-1]) == (keys, 0)
    assert short.taken == pytest.approx(found.taken, rel=0.03)


SASS = """
.text.k:
\t//## File "/a/triton_kernels/k.py", line 5
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
\t//## File "/a/triton_kernels/h.py", line 3 inlined at "/a/triton_kernels/k.py", line 7
\t//## File "/a/triton_kernels/k.py", line 7
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/               @P1 BRA `(.L_x_1) ;
        /*0030*/                   EXIT ;
.L_x_2:
        /*0040*/                   BRA `(.L_x_2);
"""


def test_machine_code_is_read_by_blocks():
    first, loop, end, padding = blocks_of(SASS)
    assert [i.opcode for i in first.instructions] == ["MOV"]
    assert [i.opcode for i in loop.instructions] == [
        "LDG.E.128",
        "BRA",
    ]
    assert loop.instructions[0].chain == (
        ("/a/triton_kernels/k.py", 7), ("/a/triton_kernels/h.py", 3)
    )  # fmt: skip
    assert (first.depth, loop.depth, end.depth, padding.depth) == (0, 1, 0, 1)
    assert loop.next == [2, 1]
    assert end.next == []


def test_a_uniform_branch_may_fall_through():
    """Without what follows it, loops seemed to be executed never."""
    first, loop, end, _ = blocks_of(SASS.replace("@P1 BRA `", "BRA.U UP0, `"))
    assert first.next == [1]
    assert loop.next == [2, 1]
    assert end.next == []


def test_pipes_of_opcodes():
    pipes = {
        "FFMA": "fma", "IMAD.HI.U32": "imul", "LOP3.LUT": "alu",
        "UIADD3": "uniform",
        "MUFU.RCP": "xu", "I2F.S16": "xu", "I2FP.F32.S32": "alu", "POPC": "xu",
        "LDG.E.128": "global",
        "REDG.E.ADD.STRONG.GPU": "atomic", "SHFL.IDX": "shuffle", "LDS": "shared", "BRA": "branch",
        "BAR.SYNC.DEFER_BLOCKING": "barrier", "S2R": "other", "DADD": "fp64",
    }  # fmt: skip
    assert {opcode: pipe_of(opcode) for opcode in pipes} == pipes
    with pytest.raises(ValueError, match="no pipe is known for NEWOP"):
        pipe_of("NEWOP.X")
    assert set(RATES) == set(pipes.values())


def test_time_is_that_of_the_bound():
    some = Moved(memory=MEMORY, sectors=0.0)
    times = seconds({"alu": 1e6}, 1e6, some, 10_000)
    assert times["memory"] == pytest.approx(1 / 0.9)
    assert times["issue"] == pytest.approx(1e6 / 4 / CLOCK / 132 / 0.8)
    assert times["alu"] == pytest.approx(2 * times["issue"])
    # One program runs on one multiprocessor.
    assert seconds({}, 1e6, some, 1)["issue"] == pytest.approx(132 * times["issue"])
    assert moved([], {}, 1) == Moved()

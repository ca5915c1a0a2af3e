"""The Triton kernels compile for NVIDIA GPUs, without one: registers, spills, width of accesses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

from support.calls import (
    block_calls,
    dense_calls,
    encoder_calls,
    every_call,
    lag_call,
    matrix_calls,
    steer_call,
)
from support.compiled import Compiled, compiling
from support.launches import kernels
from support.paths import ROOT
from support.trials import F32, case_of
from tagc.ops.blocks import BITS, BlockLayout
from tagc.ops.dense import DenseLayout, Piece
from tagc.ops.exponents import ExponentLayout
from tagc.ops.matrix import MatrixLayout
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS
from tagc.selfcheck import Call
from tagc.selfcheck.calls import exponent_calls

pytestmark = [pytest.mark.timeout(600), pytest.mark.device]
# How many accesses of 16 bytes a thread has at least, loads and stores, where rows are aligned.
WIDE = {
    "quantize_kernel": (16, 8),
    "dequantize_kernel": (4, 8),
    "quantize_matrix_kernel": (16, 8),
    "dequantize_matrix_kernel": (0, 16),
    "select_kernel": (4, 0),
    "keys_kernel": (0, 8),
    "write_kernel": (0, 4),
    "undo_lag_kernel": (4, 4),
    "put_dense_kernel": (4, 4),
    "sum_dense_kernel": (4, 4),
    "pack_exponents_kernel": (2, 0),
    "unpack_exponents_kernel": (0, 4),
}


def aligned() -> Iterator[Call]:
    """Calls with whole tiles of float32."""
    both = F32, F32
    for bits in BITS:
        yield from block_calls(BlockLayout(numel=1 << 14, bits=bits, block=256), both, 0.9, 3)
    for bits in (1, 2):
        layout = MatrixLayout(rows=64, columns=1024, bits=bits)
        yield from matrix_calls(layout, both, 0.9, 3)
    for keys in (100, 1 << 12):  # a table, and a cell for each group
        yield from encoder_calls(plan_layout(1 << 14, SYMBOLS["int8x4"], keys), both, 3)
    yield from dense_calls(DenseLayout(F32, (Piece(0, 4096, 0),), 4096), F32, 3, stamped=True)
    yield from exponent_calls(ExponentLayout(numel=8192))
    yield lag_call(F32)
    yield steer_call(2, 8)


def compile_all(arch: int, calls: Iterable[Call]) -> list[Compiled]:
    """What the operators launch."""
    with compiling(arch) as found:
        for call in calls:
            case_of(call).run(kernels("ops"), Tensor.clone)
    return found


def check_memory(found: list[Compiled]) -> None:
    assert found
    for k in found:
        where = f"{k.name}({k.variant}) on sm_{k.arch}"
        assert k.spilled <= 16, f"{where} spills {k.spilled} bytes"
        assert not re.search(r"\b(ld|st|atom|red)\S*\.local", k.ptx), f"{where} uses local memory"


@pytest.mark.parametrize("arch", [80, 90])
def test_aligned_rows_are_read_and_written_16_bytes_at_a_time(arch):
    found = compile_all(arch, aligned())
    check_memory(found)
    assert WIDE.keys() <= {k.name for k in found}
    for k in found:
        # As many warps as kernels need to hide latency; some have more to do at a time.
        assert k.registers <= (168 if "matrix" in k.name else 128), (k.name, k.variant)
        for what, least in zip(("ld", "st"), WIDE.get(k.name, (0, 0)), strict=True):
            wide = len(re.findall(rf"\b{what}\.global\S*\.v4\.b32", k.ptx))
            assert wide >= least, (k.name, k.variant, what, wide)


# Few of the combinations; the slow test has all.
@pytest.mark.parametrize(("arch", "turn"), [(80, 0), (90, 3)])
def test_kernels_of_other_rows_do_not_spill(arch, turn):
    check_memory(compile_all(arch, list(every_call())[turn::6]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", [80, 90])
def test_every_combination_compiles_without_spills(arch):
    found = compile_all(arch, [*aligned(), *every_call()])
    sources = (path.read_text() for path in (ROOT / "triton_kernels").glob("*.py"))
    written = {name for text in sources for name in re.findall(r"^def (\w+_kernel)\(", text, re.M)}
    assert {k.name for k in found} == written
    check_memory(found)


def test_offsets_above_two_to_the_31_are_64_bits_wide():
    numel = (1 << 31) + 64
    layout = plan_layout(numel, SYMBOLS["int8x4"], 100)
    with compiling(90) as found:
        # Addresses only, nothing is touched: gigantic rows that repeat a single element.
        kernels("select").select(
            torch.zeros(1, dtype=torch.bfloat16).expand(2, numel), None, torch.ones(2),
            torch.zeros(1, dtype=torch.int32).expand(2, layout.words),
            torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32),
            layout=layout, capacity=10,
        )  # fmt: skip
        values = BlockLayout(numel=numel, bits=8, block=256)
        message = torch.empty(1, 1, values.words, dtype=torch.int32, device="meta")
        x = torch.empty(1, numel, dtype=torch.bfloat16, device="meta")
        kernels("ops").quantize(x, None, message[0], layout=values, average=0.0)
        kernels("ops").dequantize(message, x, layout=values, divisor=2)
    assert {k.name for k in found} >= {"select_kernel", "quantize_kernel", "dequantize_kernel"}
    check_memory(found)
    assert {k.signature.get("n", "i64") for k in found} == {"i64"}

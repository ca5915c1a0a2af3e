"""The Triton kernels compile for NVIDIA GPUs, without one: registers, spills, width of accesses.

``python -m benchmarks.gpu.compile`` prints the numbers as a table.
"""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from tagc.symbols import SYMBOLS

triton = pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

from benchmarks.compiled import (  # noqa: E402
    ARCHITECTURES,
    BF16,
    F32,
    KERNELS,
    Compiled,
    Compiler,
    compile_all,
    compiling,
    decode,
    encode,
    layout_of,
    rows,
)
from benchmarks.compiled_table import table  # noqa: E402

select = importlib.import_module("tagc.triton_kernels.select").select


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled(request) -> list[Compiled]:
    # Every kernel for each architecture, half of the combinations of dtypes between them; the slow
    # test compiles all of them for both.
    return compile_all(request.param, share=4, turn=2 * ARCHITECTURES.index(request.param))


def check_memory(kernels: list[Compiled]) -> None:
    for k in kernels:
        where = f"{k.name}({k.variant}) on sm_{k.arch}"
        assert k.spilled == 0, f"{where} spills {k.spilled} bytes"
        assert not re.search(r"\b(ld|st|atom|red)\S*\.local", k.ptx), f"{where} uses local memory"
        # Full occupancy of the warps that these bandwidth-bound kernels need to hide latency.
        assert k.registers <= 128, f"{where} takes {k.registers} registers"


def test_every_kernel_compiles(compiled):
    assert {k.name for k in compiled} == KERNELS


def test_no_spills_and_no_local_memory(compiled):
    check_memory(compiled)


def test_select_reads_and_writes_16_bytes_at_a_time(compiled):
    kernels = [k for k in compiled if k.name == "select_kernel"]
    assert kernels
    for k in kernels:
        # All that is narrower: the threshold, in, the bitmap and the poison word, out.
        narrow_in = re.findall(r"ld\.global(?:\.\w+)*?\.[bf]\d+", k.ptx.replace(".v4.b32", ""))
        assert len(re.findall(r"ld\.global\.v4\.b32", k.ptx)) >= 2, k.variant
        assert len([x for x in narrow_in if x != "ld.global"]) == 1, (k.variant, narrow_in)
        stores = len(re.findall(r"st\.global\.v4\.b32", k.ptx))
        expected = {"*fp32": 4, "*bf16": 2, "constexpr": 0}[k.signature["residual"]]
        assert stores == expected, k.variant


def test_write_stores_vectors(compiled):
    kernels = [k for k in compiled if k.name == "write_kernel" and k.signature["out"] == "*fp32"]
    assert any("st.global.v4.b32" in k.ptx for k in kernels)


def test_atomics_return_nothing(compiled):
    """Else a warp waits for each of them; Triton 3.6 leaves it to ptxas to see that it need not."""
    for k in compiled:
        for result in re.findall(r"\batom\.global\S* (%\w+),", k.ptx):
            mentions = re.findall(rf"^.*{result}\b.*$", k.ptx, re.MULTILINE)
            uses = [line for line in mentions if "atom." not in line and ", 0x0;" not in line]
            assert not uses, f"{k.name}({k.variant}) uses an atomic's result: {uses}"
    for name in ("select_kernel", "count_kernel", "emit_kernel", "insert_kernel", "keys_kernel"):
        atomics = [k for k in compiled if k.name == name and re.search(r"\b(red|atom)\.", k.ptx)]
        assert atomics, f"no atomics in {name}: nothing was checked"


def test_offsets_above_two_to_the_31_are_64_bits_wide():
    numel = (1 << 31) + 64
    layout = layout_of(SYMBOLS["int8x4"], 4, numel)
    with compiling(90) as found:
        # Addresses only, nothing is touched: gigantic rows that repeat a single element.
        select(
            torch.zeros(1, dtype=BF16).expand(2, numel), None, torch.ones(2),
            torch.zeros(1, dtype=torch.int32).expand(2, layout.words),
            torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32),
            lanes=layout.symbol.lanes, capacity=10,
        )  # fmt: skip
    assert len(found) == 1
    check_memory(found)
    assert found[0].signature["n"] == "i64"


def test_sizes_of_one_compile():
    """Triton makes an argument that is 1 a constant, which knows less than a tensor."""
    with compiling(90) as found:
        encode(SYMBOLS["int8x4"], BF16, BF16, 3, False, numel=1, W=1)
        decode(SYMBOLS["float32"], F32, BF16, 3, 3, numel=1, W=1)
    assert {k.name for k in found} == KERNELS - {
        "insert_kernel", "expand_kernel", "peel_kernel", "finish_kernel", "count_kernel",
        "drop_kernel",
    }  # fmt: skip
    check_memory(found)


def test_rows_that_are_not_aligned_compile_without_spills():
    with compiling(90) as found:
        encode(SYMBOLS["int8x4"], F32, BF16, 3, False, numel=4095)
        decode(SYMBOLS["int8x4"], F32, BF16, 3, 3, numel=4095)
    # Scalar accesses take more registers: fewer warps fit, which these rare segments can bear.
    assert [k.name for k in found if k.spilled] == []


def test_the_table_spans_the_variants_of_every_kernel(compiled):
    records = rows(compiled)
    assert {f"{r['kernel']}_kernel" for r in records} == KERNELS
    assert sum(r["variants"] for r in records) == len(compiled)
    (emit,) = (r for r in records if r["kernel"] == "emit")
    registers = {k.registers for k in compiled if k.name == "emit_kernel"}
    assert emit["registers"] == [min(registers), max(registers)]
    assert len(table(records).splitlines()) == 2 + len(KERNELS)


def test_the_compiler_leaves_no_trace(compiled):
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    assert not isinstance(driver._active, Compiler)
    assert JITFunction.run.__module__ == "triton.runtime.jit"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_combination_compiles_without_spills(arch):
    kernels = compile_all(arch)
    assert {k.name for k in kernels} == KERNELS
    check_memory(kernels)

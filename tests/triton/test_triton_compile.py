"""The Triton kernels compile for NVIDIA GPUs, without one: registers, spills, width of accesses."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from typing import Any

import pytest
import torch

from tagc.ops.blocks import BlockLayout
from tagc.ops.symbols import SYMBOLS

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
import triton

from support.compiled import Compiled, compiling
from support.compiled_kernels import (
    ARCHITECTURES,
    BF16,
    BLOCKS,
    F32,
    KERNELS,
    MATRIX,
    SKETCH,
    blocks,
    compile_all,
    decode,
    encode,
    layout_of,
    matrix,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.device]
# Few of the combinations that have among them every kernel, symbol, residual and choice of groups.
FEW = {80: {"share": 10, "turn": 1}, 90: {"share": 11, "turn": 0}}

SELECTING = {"select_kernel", "digit_kernel", "narrow_kernel", "count_kernel", "drop_kernel"}

# Bytes that kernels spill, by name and architecture: Triton 3.6 has two words of two kernels.
OLD = triton.__version__.startswith("3.6.")
OF_OLD = {("count_kernel", 80): 8, ("matrix_scales_kernel", 90): 8}
# With rows of one element, or with bfloat16 gradients and float32 residuals.
OLD_MOST = {"digit_kernel": 168, "narrow_kernel": 144, "quantize_matrix_kernel": 184}
# ptxas spills two words of one variant (direct cells, no residual), with registers to spare.
SPILLED = OF_OLD if OLD else {("drop_kernel", 80): 8}


def kernel(name: str) -> Any:
    """A launcher."""
    return getattr(importlib.import_module(f"tagc.triton_kernels.{name}"), name)


# One process compiles for an architecture, and runs all that looks at it.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(80, marks=pytest.mark.xdist_group("compiled for 80")),
        pytest.param(90, marks=pytest.mark.xdist_group("compiled for 90")),
    ],
)
def compiled(request) -> list[Compiled]:
    # The slow test compiles all of them for both.
    return compile_all(request.param, codecs=1, **FEW[request.param])


def check_memory(kernels: list[Compiled]) -> None:
    for k in kernels:
        where = f"{k.name}({k.variant}) on sm_{k.arch}"
        assert k.spilled <= SPILLED.get((k.name, k.arch), 0), f"{where} spills {k.spilled} bytes"
        assert not re.search(r"\b(ld|st|atom|red)\S*\.local", k.ptx), f"{where} uses local memory"
        # As many warps as kernels need to hide latency; some have more to do at a time.
        most = {
            "dequantize_matrix_kernel": 254,
            "quantize_matrix_kernel": 168,
            # With float16 gradients, float32 residuals and blocks of 4096; others take 128.
            "quantize_kernel": 144,
            **(OLD_MOST if OLD else {}),
        }
        assert k.registers <= most.get(k.name, 128), f"{where} takes {k.registers} registers"


def test_every_kernel_compiles(compiled):
    assert {k.name for k in compiled} == KERNELS


def test_no_spills_and_no_local_memory(compiled):
    check_memory(compiled)


def test_select_reads_and_writes_16_bytes_at_a_time(compiled):
    kernels = [k for k in compiled if k.name == "select_kernel"]
    assert kernels
    for k in kernels:
        # All that is narrower: threshold and 4 given words, in, bitmap and poison word, out.
        narrow_in = re.findall(r"ld\.global(?:\.\w+)*?\.[bf]\d+", k.ptx.replace(".v4.b32", ""))
        assert len(re.findall(r"ld\.global\.v4\.b32", k.ptx)) >= 2, k.variant
        narrow = len([x for x in narrow_in if x != "ld.global"])
        supported = k.signature["support"] != "constexpr"
        assert narrow <= 5 if supported else narrow == 1, (k.variant, narrow_in)
        stores = len(re.findall(r"st\.global\.v4\.b32", k.ptx))
        expected = {"*fp32": 4, "*bf16": 2, "constexpr": 0}[k.signature["residual"]]
        assert stores == expected, k.variant


def test_decoding_stores_vectors(compiled):
    for name in ("write_kernel", "keys_kernel"):
        kernels = [k for k in compiled if k.name == name and k.signature["out"] == "*fp32"]
        assert any("st.global.v4.b32" in k.ptx for k in kernels), name


def widths(ptx: str, what: str) -> Counter[int]:
    """Accesses to memory of a thread, by their bytes."""
    found = re.findall(rf"\b{what}\.global(?:\.v(\d))?\.b(\d+)", ptx)
    return Counter(int(vector or 1) * int(bits) // 8 for vector, bits in found)


def are(found: Counter[int], expected: Counter[int], k: Compiled) -> bool:
    """Whether a kernel has these accesses. Those of uncompressed pieces come on top."""
    return found == expected if k.signature["rows"] == "constexpr" else found > expected


SIZES = {"*fp32": 4, "*bf16": 2, "*fp16": 2, "constexpr": 0}


def test_blocks_are_read_and_written_by_what_a_thread_has_of_a_lane(compiled):
    """A thread has 32 elements, as many neighbours of each lane of its words as a code has bits."""
    kernels = [k for k in compiled if k.name == "quantize_kernel"]
    assert kernels
    for k in kernels:
        bits, read, written = k.constants["BITS"], widths(k.ptx, "ld"), widths(k.ptx, "st")
        expected: Counter[int] = Counter()
        for name in ("grad", "residual"):
            if size := SIZES[k.signature[name]]:
                width = min(16, bits * size)
                expected[width] += 32 * size // width
        if "seeds" in k.signature and k.signature["seeds"] != "constexpr":
            expected[4] += 1
        assert are(read, expected, k), (k.variant, k.constants)
        # Then codes, as many words as a code has bits, and scales, one at a time.
        residual = Counter[int]()
        if size := SIZES[k.signature["residual"]]:
            width = min(16, bits * size)
            residual[width] += 32 * size // width
        assert written >= residual, (k.variant, k.constants)
        if k.signature["rows"] == "constexpr":
            assert (written - residual).total() <= bits + 2, (k.variant, k.constants)


def test_sums_of_blocks_are_stored_by_what_a_thread_has_of_a_lane(compiled):
    kernels = [k for k in compiled if k.name == "dequantize_kernel"]
    assert kernels
    for k in kernels:
        size = SIZES[k.signature["out"]]
        width = min(16, k.constants["BITS"] * size)
        expected = Counter({width: 32 * size // width})
        assert are(widths(k.ptx, "st"), expected, k), (k.variant, k.constants)


def test_matrices_are_read_and_written_in_vectors(compiled):
    def wide(k: Compiled, what: str) -> dict[int, int]:
        return {width: n for width, n in widths(k.ptx, what).items() if width > 4}

    found, columns = set(), set()
    for k in compiled:
        if k.name not in MATRIX or "grad" not in k.signature:
            continue
        found.add(k.name)
        sizes = SIZES[k.signature["residual"]], SIZES[k.signature["grad"]]
        if k.name == "matrix_columns_kernel":
            columns.add(k.constants["COLUMNS"])
            # A thread has 8 lanes of as many neighbours.
            each = k.constants["COLUMNS"] * 8 // (32 * k.warps)
            assert set(widths(k.ptx, "ld")) == {each * size for size in sizes if size}, k.variant
            continue
        # A thread has 32 elements. The columns' scales are read besides, some at a time. In chunks
        # all are read twice.
        reads = 1 if k.constants["WHOLE"] else 2
        assert wide(k, "st") == ({16: 2 * sizes[0]} if sizes[0] else {}), k.variant
        read = 32 * sum(sizes)
        got = sum(width * n for width, n in wide(k, "ld").items())
        assert reads * read <= got <= reads * (read + 2 * 32), k.variant
    assert len(found) == 2
    assert columns == {32, 64}


def test_sums_store_what_a_thread_has_side_by_side(compiled):
    for name in ("dequantize_matrix_kernel", "dequantize_groups_kernel"):
        kernels = [k for k in compiled if k.name == name]
        assert kernels
        for k in kernels:
            size = SIZES[k.signature["out"]]
            width = k.constants["NEXT"] * size if name == "dequantize_matrix_kernel" else 16
            assert set(widths(k.ptx, "st")) == {width}, (name, k.variant)


def test_arithmetic_is_ieee(compiled):
    """No division by an approximate reciprocal, nothing flushed to zero, no contraction.

    Fused additions are asked for where products are exact.
    """
    kernels = [k for k in compiled if k.name in BLOCKS | MATRIX | SELECTING]
    assert {"quantize_kernel", "quantize_matrix_kernel"} <= {
        k.name for k in kernels if "div.rn.f32" in k.ptx
    }
    for k in kernels:
        fused = k.name in {
            "quantize_matrix_kernel", "dequantize_matrix_kernel", "dequantize_groups_kernel",
            "dequantize_kernel",
        }  # fmt: skip
        ptx = k.ptx.replace("fma.rn.f32", "") if fused else k.ptx
        wrong = re.findall(r"\b(?:div\.full|div\.approx|rcp|fma)\S*f32|\S+\.ftz\S*", ptx)
        assert not wrong, (k.name, k.variant, wrong)


def test_atomics_return_nothing(compiled):
    """Else a warp waits for each of them; Triton 3.6 leaves it to ptxas to see that it need not.

    Peeling follows what its atomics return, which spares it looking for what it freed; and the last
    program of a fingerprint must know that it is the last."""
    for k in compiled:
        notes = k.name == "quantize_kernel" and k.signature.get("sums", "").startswith("*")
        if notes or k.name in (
            "singles_kernel",
            "peel_kernel",
            "finish_kernel",
            "fingerprint_kernel",
        ):
            assert "atom.global" in k.ptx
            continue
        for result in re.findall(r"\batom\.global\S* (%\w+),", k.ptx):
            mentions = re.findall(rf"^.*{result}\b.*$", k.ptx, re.MULTILINE)
            uses = [line for line in mentions if "atom." not in line and ", 0x0;" not in line]
            assert not uses, f"{k.name}({k.variant}) uses an atomic's result: {uses}"
    for name in (
        "select_kernel", "digit_kernel", "narrow_kernel", "count_kernel", "emit_kernel",
        "insert_kernel", "keys_kernel",
    ):  # fmt: skip
        atomics = [k for k in compiled if k.name == name and re.search(r"\b(red|atom)\.", k.ptx)]
        assert atomics, f"no atomics in {name}: nothing was checked"


def test_offsets_above_two_to_the_31_are_64_bits_wide():
    numel = (1 << 31) + 64
    layout = layout_of(SYMBOLS["int8x4"], 4, numel)
    with compiling(90) as found:
        # Addresses only, nothing is touched: gigantic rows that repeat a single element.
        kernel("select")(
            torch.zeros(1, dtype=BF16).expand(2, numel), None, torch.ones(2),
            torch.zeros(1, dtype=torch.int32).expand(2, layout.words),
            torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32),
            lanes=layout.symbol.lanes, capacity=10,
        )  # fmt: skip
        values = BlockLayout(numel=numel, bits=8, block=256)
        message = torch.empty(1, 1, values.words, dtype=torch.int32, device="meta")
        x = torch.empty(1, numel, dtype=BF16, device="meta")
        kernel("quantize")(x, None, message[0], layout=values, average=0.0)
        kernel("dequantize")(message, x, layout=values, divisor=2)
    assert {k.name for k in found} >= {"select_kernel"} | BLOCKS
    check_memory(found)
    assert {k.signature.get("n", "i64") for k in found} == {"i64"}


def test_sizes_of_one_compile():
    """Triton makes an argument that is 1 a constant, which knows less than a tensor."""
    with compiling(90) as found:
        encode(SYMBOLS["int8x4"], BF16, BF16, 3, "some", numel=1, W=1)
        decode(SYMBOLS["int16x2"], F32, BF16, 3, 3, numel=1, W=1)
    assert {k.name for k in found} == SKETCH - {
        "insert_kernel", "expand_kernel", "write_kernel", "digit_kernel", "narrow_kernel",
        "count_kernel", "drop_kernel",
    }  # fmt: skip
    check_memory(found)
    with compiling(90) as found:
        blocks(8, 32, F32, BF16, 0.9, 3, numel=1, R=1)
        for bits, group in ((1, 1), (1, 8)):
            matrix(bits, group, F32, BF16, 0.9, 3, rows=1, columns=1, R=1)
    assert {k.name for k in found} >= BLOCKS | MATRIX
    check_memory(found)


def test_rows_that_are_not_aligned_compile_without_spills():
    with compiling(90) as found:
        encode(SYMBOLS["int8x4"], F32, BF16, 3, "some", numel=4095)
        decode(SYMBOLS["int8x4"], F32, BF16, 3, 3, numel=4095)
        blocks(8, 256, F32, BF16, 0.9, 3, numel=4095)
        matrix(1, 8, BF16, BF16, 0.9, 3, rows=33, columns=1001)
        matrix(2, 1, BF16, BF16, 0.9, 3, rows=3, columns=9001)
    # Scalar accesses take more registers: fewer warps fit, which these rare segments can bear.
    assert [k.name for k in found if k.spilled] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_combination_compiles_without_spills(arch):
    kernels = compile_all(arch)
    assert {k.name for k in kernels} == KERNELS
    check_memory(kernels)

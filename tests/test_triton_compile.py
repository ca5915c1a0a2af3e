"""The Triton kernels compile for NVIDIA GPUs, without one: registers, spills, width of accesses.

The launchers themselves run, on CPU tensors, with a driver that compiles for the wanted
architecture and launches nothing, so what is examined is what would be launched. ``table()``
gives the numbers as text: ``python tests/test_triton_compile.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from tagc.blocks import BITS, BlockLayout
from tagc.layout import SketchLayout
from tagc.packed import PackedLayout
from tagc.symbols import SYMBOLS, Symbol

triton = pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
pytestmark = pytest.mark.timeout(600)
ops = importlib.import_module("tagc.triton_kernels.ops")
tile = importlib.import_module("tagc.triton_kernels.codes").blocks_and_warps
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ARCHITECTURES = (80, 90)
SKETCH = {
    "select_kernel", "count_kernel", "drop_kernel", "emit_kernel", "insert_kernel", "union_kernel",
    "keys_kernel", "peel_kernel", "finish_kernel", "find_kernel", "remove_kernel",
    "finish_float_kernel", "estimate_kernel", "write_kernel", "expand_kernel",
}  # fmt: skip
BLOCKS = {"quantize_kernel", "dequantize_kernel"}
PACKED = {
    "select_kernel", "count_kernel", "drop_kernel", "rank_kernel", "scan_kernel", "list_kernel",
    "index_kernel", "read_kernel", "values_kernel", "unpack_kernel",
}  # fmt: skip
KERNELS = SKETCH | BLOCKS | PACKED


def kernel(name: str) -> Any:
    """A launcher."""
    return getattr(importlib.import_module(f"tagc.triton_kernels.{name}"), name)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel as it would be launched."""

    name: str
    arch: int
    signature: dict[str, str]  # Triton types by argument
    constants: dict[str, Any]  # by argument, those that are constants
    registers: int
    spilled: int  # bytes, stores and loads
    shared: int  # bytes
    ptx: str

    @property
    def variant(self) -> str:
        """Types of the tensors."""
        return ", ".join(f"{k} {v[1:]}" for k, v in self.signature.items() if v.startswith("*"))

    @property
    def instructions(self) -> int:
        """PTX instructions."""
        return len(re.findall(r"^\t(?:@|[a-z])", self.ptx, re.MULTILINE))


class _Compiler:
    """Passes for a Triton driver; its device number is the architecture."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._arch, self._target = arch, GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


@contextlib.contextmanager
def compiling(arch: int) -> Iterator[list[Compiled]]:
    """Inside, launches compile for ``arch`` and are collected, each variant of a kernel once."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    kernels: dict[str, Compiled] = {}
    found: list[Compiled] = []
    launch = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel: Any = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in _EXAMINED:
            _EXAMINED[kernel.hash] = _examine(self.__name__, arch, kernel, log.getvalue())
        if kernel.hash not in kernels:
            kernels[kernel.hash] = _EXAMINED[kernel.hash]
            found.append(kernels[kernel.hash])
        return kernel

    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache, TRITON_DUMP_PTXAS_LOG="1"),
        mock.patch.object(driver, "_active", _Compiler(arch)),
        mock.patch.object(JITFunction, "run", run),
    ):
        yield found


# Triton keeps compiled kernels, so their log can be had only once in a process.
_EXAMINED: dict[str, Compiled] = {}


def _examine(name: str, arch: int, kernel: Any, log: str) -> Compiled:
    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        assert found, f"{name}: no {pattern!r} in the log of ptxas:\n{log}"
        return int(found[1])

    return Compiled(
        name=name,
        arch=arch,
        signature=dict(kernel.src.signature),
        constants=_constants(kernel),
        registers=number(r"Used (\d+) registers"),
        spilled=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        shared=kernel.metadata.shared,
        ptx=kernel.asm["ptx"],
    )


def _constants(kernel: Any) -> dict[str, Any]:
    names = list(kernel.src.signature)
    return {names[place[0]]: value for place, value in kernel.src.constants.items()}


def layout_of(symbol: Symbol, hashes: int, numel: int = 4096) -> SketchLayout:
    groups = -(-numel // symbol.lanes)
    partition = groups if hashes == 1 else 64
    return SketchLayout(numel=numel, symbol=symbol, keys=100, hashes=hashes, partition=partition)


def encode(symbol, grad, residual, hashes, every, numel=4096, W=2) -> None:
    layout = layout_of(symbol, hashes, numel)
    ops.encode(
        torch.empty(W, numel, dtype=grad),
        None if residual is None else torch.empty(W, numel, dtype=residual),
        torch.ones(W), torch.ones(W), torch.zeros(1, dtype=torch.int32),
        torch.empty(W, layout.index_words, dtype=torch.int32),
        torch.empty(W, layout.cells, dtype=symbol.dtype), torch.empty(W, 4, dtype=torch.int32),
        layout=layout, levels=symbol.levels(W), capacity=layout.groups if every else 10,
    )  # fmt: skip


def decode(symbol, out, residual, hashes, divisor, numel=4096, W=2) -> None:
    layout = layout_of(symbol, hashes, numel)
    ops.decode(
        torch.empty(W, layout.index_words, dtype=torch.int32),
        torch.empty(layout.cells, dtype=symbol.dtype), torch.ones(1),
        torch.zeros(1, dtype=torch.int32), torch.empty(numel, dtype=out),
        None if residual is None else torch.empty(numel, dtype=residual),
        torch.empty(2, dtype=torch.int32), layout=layout, divisor=divisor,
    )  # fmt: skip


def codec(symbol, hashes) -> None:
    layout = layout_of(symbol, hashes)
    index, seed = torch.zeros(layout.words, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    cells = torch.empty(layout.cells, dtype=symbol.dtype)
    ops.insert(torch.empty(layout.groups, dtype=symbol.dtype), index, seed, cells, layout=layout)
    ops.peel(cells, index, seed, layout=layout)


def blocks(bits, block, grad, residual, average, divisor, numel=1 << 14, R=2) -> None:
    layout = BlockLayout(numel=numel, bits=bits, block=block)
    message = torch.empty(R, layout.words, dtype=torch.int32)
    left = None if residual is None else torch.empty(R, numel, dtype=residual)
    ops.quantize(torch.empty(R, numel, dtype=grad), left, message, layout=layout, average=average)
    out = torch.empty(1, numel, dtype=grad)
    ops.dequantize(message[None], out, layout=layout, divisor=divisor)


def packed(bits, block, group, low, grad, residual, kind, divisor, numel=1 << 14, R=2) -> None:
    """``kind``: room for ``some`` groups or ``all``, or for a ``support``."""
    groups = -(-numel // group)
    capacity = groups if kind == "all" else groups // 2
    layout = PackedLayout(
        numel=numel, group=group, capacity=capacity, low_bits=low,
        values=BlockLayout(numel=capacity * group, bits=bits, block=block),
    )  # fmt: skip
    message = torch.empty(R, layout.words, dtype=torch.int32)
    marks = torch.empty(R, layout.bitmap_words, dtype=torch.int32)
    support, counts = marks if kind == "support" else None, torch.empty(R, 4, dtype=torch.int32)
    x, left = torch.empty(R, numel, dtype=grad), None
    if residual is not None:
        left = torch.empty(R, numel, dtype=residual)
    ops.pack(x, left, torch.ones(R), support, message, counts, layout=layout)
    given = None if support is None else support[0]
    ops.unpack(message, given, torch.empty(numel, dtype=grad), layout=layout, divisor=divisor)
    if residual is None:
        ops.select(x, torch.ones(R), marks, counts, layout=layout)
        ops.write_index(marks, message[:, 2 : 2 + layout.index_words], layout=layout)


HASHES = (4, 3, 5, 6, 1)
# Every symbol with every pair of dtypes; hashes and the rest take turns.
ENCODES = [
    (symbol, grad, residual, HASHES[i % 5], i // 3 % 2 == 1)
    for i, (symbol, grad, residual) in enumerate(
        itertools.product(SYMBOLS.values(), (F32, BF16, F16), (F32, BF16, None))
    )
]
DECODES = [
    (symbol, out, residual, HASHES[i % 5], 2 + i // 3 % 2)
    for i, (symbol, out, residual) in enumerate(
        itertools.product(SYMBOLS.values(), (F32, BF16, F16), (F32, BF16, None))
    )
]
DTYPES = list(itertools.product((F32, BF16, F16), (F32, BF16, None)))
# Every pair of bits and block size; dtypes and the rest take turns.
BLOCK_SIZES = [32 << i for i in range(8)]
QUANTIZES = [
    (bits, block, *DTYPES[i % 9], (0.0, 0.9)[i // 2 % 2], 2 + i // 4 % 2)
    for i, (bits, block) in enumerate(itertools.product(BITS, BLOCK_SIZES))
]
# Every size of a group with every pair of dtypes; the rest takes turns.
PACKS = [
    (
        BITS[i % 4], BLOCK_SIZES[i % 8], group, (0, 1, 2, 4, 8, 16)[(i // 3 + i) % 6], *dtypes,
        ("some", "support", "all")[i % 3], 2 + i // 2 % 2,
    )
    for i, (dtypes, group) in enumerate(itertools.product(DTYPES, (1, 2, 4, 8, 16, 32)))
]  # fmt: skip
CODECS = list(itertools.product((SYMBOLS["int8x4"], SYMBOLS["float32"]), HASHES))


def compile_all(arch: int, *, share: int = 1, turn: int = 0) -> list[Compiled]:
    """Every kernel; of the combinations of dtypes one in ``share``, beginning with ``turn``."""
    with compiling(arch) as found:
        for arguments in ENCODES[turn::share]:
            encode(*arguments)
        for arguments in DECODES[turn::share]:
            decode(*arguments)
        for arguments in CODECS:
            codec(*arguments)
        # Fewer of these; strides that take turns with all that varies.
        for arguments in QUANTIZES[turn :: 9 if share > 1 else 1]:
            blocks(*arguments)
        for arguments in PACKS[turn :: 17 if share > 1 else 1]:
            packed(*arguments)
    return found


def table(arch: int = 90) -> str:
    """Registers, shared memory and PTX instructions of every kernel, smallest to largest."""
    kernels = compile_all(arch)
    lines = [
        f"| kernel (sm_{arch}) | variants | registers | spilled | shared, bytes | instructions |",
        "|---|---|---|---|---|---|",
    ]

    def span(values: list[int]) -> str:
        return f"{min(values)}–{max(values)}" if min(values) < max(values) else f"{values[0]}"

    for name in sorted({k.name for k in kernels}):
        of_name = [k for k in kernels if k.name == name]
        columns = (
            [k.registers for k in of_name], [k.spilled for k in of_name],
            [k.shared for k in of_name], [k.instructions for k in of_name],
        )  # fmt: skip
        label = name.removesuffix("_kernel")
        lines.append(f"| {label} | {len(of_name)} | " + " | ".join(map(span, columns)) + " |")
    return "\n".join(lines)


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
        # All that is narrower: the threshold or the given bitmap, in, bitmap and poison word, out.
        narrow_in = re.findall(r"ld\.global(?:\.\w+)*?\.[bf]\d+", k.ptx.replace(".v4.b32", ""))
        assert len(re.findall(r"ld\.global\.v4\.b32", k.ptx)) >= 2, k.variant
        narrow = len([x for x in narrow_in if x != "ld.global"])
        assert narrow <= 4 if k.constants["GIVEN"] else narrow == 1, (k.variant, narrow_in)
        stores = len(re.findall(r"st\.global\.v4\.b32", k.ptx))
        expected = {"*fp32": 4, "*bf16": 2, "constexpr": 0}[k.signature["residual"]]
        assert stores == expected, k.variant


def test_write_stores_vectors(compiled):
    kernels = [k for k in compiled if k.name == "write_kernel" and k.signature["out"] == "*fp32"]
    assert any("st.global.v4.b32" in k.ptx for k in kernels)


def test_quantize_reads_and_writes_16_bytes_at_a_time(compiled):
    kernels = [k for k in compiled if k.name == "quantize_kernel"]
    assert kernels
    for k in kernels:
        assert "ld.global" not in k.ptx.replace("ld.global.v4.b32", ""), k.variant
        # All that is narrower: scales, and codes of blocks that are too small for the warp.
        c = k.constants
        count, warps = tile(c["BLOCK"])
        elements = count * c["BLOCK"] // (32 * warps)
        size = {"*fp32": 4, "*bf16": 2, "constexpr": 0}[k.signature["residual"]]
        wide = len(re.findall(r"st\.global\.v4\.b32", k.ptx))
        codes = elements * c["BITS"] // 8 // 16 if c["BLOCK"] * c["BITS"] >= 128 else 0
        assert wide >= elements * size // 16, (k.variant, c, wide)
        assert wide <= elements * size // 16 + max(1, codes), (k.variant, c, wide)


def test_sums_store_16_bytes_at_a_time(compiled):
    for name in ("dequantize_kernel", "unpack_kernel"):
        kernels = [k for k in compiled if k.name == name]
        assert kernels
        for k in kernels:
            assert "st.global" not in k.ptx.replace("st.global.v4.b32", ""), (name, k.variant)


def test_values_move_whole_groups(compiled):
    kernels = [k for k in compiled if k.name == "values_kernel"]
    assert any(k.constants["GROUP"] >= 4 for k in kernels)
    for k in kernels:
        source = k.signature["residual" if k.signature["grad"] == "*fp32" else "grad"]
        if k.constants["GROUP"] >= 8 and source != "constexpr":
            assert "ld.global.v4.b32" in k.ptx, (k.variant, k.constants)


def test_arithmetic_is_ieee(compiled):
    """No division by an approximate reciprocal, nothing flushed to zero, no contraction."""
    kernels = [k for k in compiled if k.name in BLOCKS | PACKED]
    assert {"quantize_kernel", "values_kernel"} <= {
        k.name for k in kernels if "div.rn.f32" in k.ptx
    }
    for k in kernels:
        wrong = re.findall(r"\b(?:div\.full|div\.approx|rcp|fma)\S*f32|\S+\.ftz\S*", k.ptx)
        assert not wrong, (k.name, k.variant, wrong)


def test_atomics_return_nothing(compiled):
    """Else a warp waits for each of them; Triton 3.6 leaves it to ptxas to see that it need not."""
    for k in compiled:
        for result in re.findall(r"\batom\.global\S* (%\w+),", k.ptx):
            mentions = re.findall(rf"^.*{result}\b.*$", k.ptx, re.MULTILINE)
            uses = [line for line in mentions if "atom." not in line and ", 0x0;" not in line]
            assert not uses, f"{k.name}({k.variant}) uses an atomic's result: {uses}"
    for name in (
        "select_kernel", "count_kernel", "emit_kernel", "insert_kernel", "keys_kernel",
        "index_kernel", "read_kernel",
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
        layout = PackedLayout(
            numel=numel, group=1 << 5, capacity=100, low_bits=0,
            values=BlockLayout(numel=3200, bits=8),
        )  # fmt: skip
        message = torch.empty(1, layout.words, dtype=torch.int32, device="meta")
        kernel("unpack")(message, message[0, : layout.bitmap_words], x[0], layout=layout, divisor=2)
    assert {k.name for k in found} >= {"select_kernel", "unpack_kernel"} | BLOCKS
    check_memory(found)
    assert {k.signature.get("n", "i64") for k in found} == {"i64"}


def test_sizes_of_one_compile():
    """Triton makes an argument that is 1 a constant, which knows less than a tensor."""
    with compiling(90) as found:
        encode(SYMBOLS["int8x4"], BF16, BF16, 3, False, numel=1, W=1)
        decode(SYMBOLS["float32"], F32, BF16, 3, 3, numel=1, W=1)
    assert {k.name for k in found} == SKETCH - {
        "insert_kernel", "expand_kernel", "peel_kernel", "finish_kernel", "count_kernel",
        "drop_kernel",
    }  # fmt: skip
    check_memory(found)
    with compiling(90) as found:
        blocks(8, 32, F32, BF16, 0.9, 3, numel=1, R=1)
        for low, kind in ((0, "all"), (1, "support"), (2, "all"), (1, "some")):
            packed(8, 32, 1, low, F32, BF16, kind, 1, numel=1, R=1)
    assert {k.name for k in found} >= (BLOCKS | PACKED) - {"drop_kernel", "count_kernel"}
    check_memory(found)


def test_rows_that_are_not_aligned_compile_without_spills():
    with compiling(90) as found:
        encode(SYMBOLS["int8x4"], F32, BF16, 3, False, numel=4095)
        decode(SYMBOLS["int8x4"], F32, BF16, 3, 3, numel=4095)
        blocks(8, 256, F32, BF16, 0.9, 3, numel=4095)
        blocks(2, 4096, BF16, F32, 0.9, 3, numel=4095)
        packed(8, 256, 1, 2, F32, F32, "some", 3, numel=4095)
        packed(4, 4096, 32, 1, BF16, BF16, "support", 3, numel=4095)
    # Scalar accesses take more registers: fewer warps fit, which these rare segments can bear.
    assert [k.name for k in found if k.spilled] == []


def test_the_compiler_leaves_no_trace(compiled):
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    assert not isinstance(driver._active, _Compiler)
    assert JITFunction.run.__module__ == "triton.runtime.jit"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_combination_compiles_without_spills(arch):
    kernels = compile_all(arch)
    assert {k.name for k in kernels} == KERNELS
    check_memory(kernels)


if __name__ == "__main__":
    print(table())

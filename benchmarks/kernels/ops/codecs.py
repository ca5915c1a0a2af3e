"""The codecs of messages: blocks and matrices."""

from __future__ import annotations

from torch import Tensor

from tagc.ops import Ops
from tagc.ops.blocks import BlockLayout
from tagc.ops.matrix import BITS, GROUP, MatrixLayout

from ..case import Case
from .messages import Codec, Row

# What a code of a matrix is, by name: bits of an element, or neighbours that share a code.
CODES = {f"int{bits}": {"bits": bits} for bits in sorted(BITS, reverse=True)}
CODES |= {f"group{GROUP}": {"group": GROUP}}
_MOST_COLUMNS = 4096


def blocks(case: Case, row: Row) -> Codec:
    """Blocks of 256."""
    assert case.bits is not None
    layout = BlockLayout(numel=case.numel, bits=case.bits)

    def send(ops: Ops, residual: Tensor, message: Tensor) -> None:
        ops.quantize(row.grad, residual, message, layout=layout, average=0.0)

    def read(ops: Ops, messages: Tensor, out: Tensor) -> None:
        ops.dequantize(messages[None], out[None], layout=layout, divisor=messages.shape[0])

    return Codec(words=layout.words, send=send, read=read)


def matrix(case: Case, row: Row) -> Codec:
    """As nearly square as powers of two are, with at most 4096 columns."""
    assert case.code is not None
    columns = min(_MOST_COLUMNS, 1 << case.numel.bit_length() // 2)
    if case.numel % columns:
        raise ValueError(f"{case.numel} elements are not a multiple of {columns} columns")
    layout = MatrixLayout(rows=case.numel // columns, columns=columns, **CODES[case.code])

    def send(ops: Ops, residual: Tensor, message: Tensor) -> None:
        ops.quantize_matrix(row.grad, residual, message, layout=layout, average=0.0)

    def read(ops: Ops, messages: Tensor, out: Tensor) -> None:
        ops.dequantize_matrix(messages[None], out[None], layout=layout, divisor=messages.shape[0])

    facts = {"rows": layout.rows, "columns": columns, "words": layout.words}
    # No code says 0, so what is left of an element far below its step is rounded.
    return Codec(words=layout.words, send=send, read=read, exact=False, facts=facts)

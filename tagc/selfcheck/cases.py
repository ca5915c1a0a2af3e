"""Makes small inputs for a call of an operator. The reference makes the messages to be decoded."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tagc.ops import ABOVE, COUNTS, SATURATED
from tagc.ops.blocks import BlockLayout
from tagc.ops.dense import STAMP_WORDS, DenseLayout
from tagc.ops.exact import ExactLayout
from tagc.ops.exponents import ExponentLayout
from tagc.ops.matrix import AnyMatrices
from tagc.ops.sketch import SketchLayout
from tagc.ops.thresholds import BIAS, BOOST, EXPONENT, SIDE, STATES, STEP, THRESHOLD
from tagc.selfcheck.calls import Call, renamed
from tagc.selfcheck.inputs import (
    GARBAGE,
    USUAL,
    Case,
    Inputs,
    Maker,
    small_encoder,
    small_exact,
    small_exponents,
    small_matrices,
)


def case_of(call: Call, inputs: Inputs = USUAL) -> Case:
    """The same inputs every time."""
    name = str(call) if inputs == USUAL else f"{call} {inputs}"
    generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(name.encode()))
    return _MAKERS[call.operator](Maker(call, inputs, generator))


def _quantize(m: Maker) -> Case:
    layout, R = m.blocks(), m.inputs.destinations
    case = _elementwise(m, layout, R, lambda dtype: m.values(R, layout.numel, dtype=dtype))
    if m.inputs.kind == "ties" and layout.numel:
        m.put(case, _halfway(layout.levels).expand(R))
    if m.call.given("dither") is not None:
        # Both signs, and a different one for each row.
        case.tensors["dither"] = torch.tensor(
            [GARBAGE, ~GARBAGE][: m.inputs.destinations], dtype=torch.int32, device="cpu"
        )
    return case


def _halfway(levels: int) -> Tensor:
    """A number that has a scale halfway between two bfloat16; larger than those of ties."""
    half = torch.tensor(4 * (1 + 2.0**-8), dtype=torch.float32, device="cpu")
    near = levels * half * (1 + torch.arange(-8, 9, dtype=torch.float32, device="cpu") * 2.0**-24)
    return near[near * torch.tensor(1 / levels, dtype=torch.float32, device="cpu") == half][0]


def _quantize_matrix(m: Maker) -> Case:
    layout, (D,) = m.call.option("layout"), m.call.rows
    if m.inputs.small:
        layout, D = small_encoder(layout, D)
    return _elementwise(m, layout, D, lambda dtype: m.matrices(D, layout, dtype))


def _elementwise(
    m: Maker,
    layout: BlockLayout | AnyMatrices,
    destinations: int,
    values: Callable[[torch.dtype], Tensor],
) -> Case:
    residual = m.call.given("residual")
    tensors = {
        "grad": m.spoilt(values(m.call.dtype("grad"))),
        "residual": None if residual is None else values(residual),
        "message": m.garbage(destinations, layout.words),
    }
    return m.case(tensors, ["residual", "message"], layout=layout)


def _dequantize(m: Maker) -> Case:
    layout = m.blocks()
    return _sent(m, layout, lambda D: m.values(D, layout.numel, dtype=torch.float32))


def _dequantize_matrix(m: Maker) -> Case:
    layout = m.call.option("layout")
    layout = small_matrices(layout) if m.inputs.small else layout
    return _sent(m, layout, lambda D: m.matrices(D, layout, torch.float32))


def _sent(m: Maker, layout: BlockLayout | AnyMatrices, values: Callable[[int], Tensor]) -> Case:
    """Messages for at most two results."""
    K, R = min(m.call.rows[0], 2), m.call.rows[1]
    message = m.garbage(K * R, layout.words)
    quantize = getattr(m.reference, m.call.operator.removeprefix("de"))
    quantize(m.spoilt(values(K * R)), None, message, layout=layout, average=0.0)
    made = m.values if m.call.option("add") else m.garbage
    tensors: dict[str, Tensor | None] = {
        "message": message.view(K, R, -1),
        "out": made(K, layout.numel, dtype=m.call.dtype("out")),
    }
    return m.case(tensors, ["out"], layout=layout)


def _changed(m: Maker, rows: int) -> tuple[ExactLayout, Tensor, Tensor]:
    """The layout, old rows, and new ones, of which no two have the same share of changes."""
    layout = m.call.option("layout")
    layout = small_exact(layout) if m.inputs.small else layout
    old = m.spoilt(m.values(rows, layout.numel, dtype=layout.dtype))
    by = m.values(rows, layout.numel, dtype=torch.float32)
    step = torch.exp2(m.uniform(rows, 1) * -16)
    if m.inputs.kind == "ties":
        step = (m.uniform(rows, layout.numel) < step).float()  # some elements change
    new = (old.float() + step * by).to(layout.dtype)
    if m.inputs.kind == "rough":
        m.spoilt(new)
    return layout, old, new


def _measured(m: Maker, rows: int) -> tuple[ExactLayout, list[dict[str, Tensor]]]:
    """Rows, each with a plan."""
    layout, old, new = _changed(m, rows)
    cases = []
    for r in range(rows):
        plan = m.garbage(1, layout.plan_words)
        m.reference.measure_exact(new[r : r + 1], old[r : r + 1], plan, layout=layout)
        cases.append({"new": new[r : r + 1], "old": old[r : r + 1], "plan": plan})
    return layout, cases


def _measure_exact(m: Maker) -> Case:
    layout, old, new = _changed(m, 1)
    tensors: dict[str, Tensor | None] = {"new": new, "old": old}
    tensors["plan"] = m.garbage(1, layout.plan_words)
    return m.case(tensors, ["plan"], layout=layout)


def _encode_exact(m: Maker) -> Case:
    layout, (row,) = _measured(m, 1)
    tensors: dict[str, Tensor | None] = {**row, "message": m.garbage(1, layout.words)}
    return m.case(tensors, ["message"], layout=layout)


def _decode_exact(m: Maker) -> Case:
    layout, rows = _measured(m, min(m.call.rows[0], 4))
    message = m.garbage(len(rows), layout.words)
    for words, row in zip(message, rows, strict=True):
        m.reference.encode_exact(**row, message=words[None], layout=layout)
    old = torch.cat([row["old"] for row in rows])
    return m.case({"message": message, "rows": old}, ["rows"], layout=layout)


def _share_of(layout: SketchLayout, capacity: int) -> float:
    """A share of the groups that exceeds the capacity, so that some are dropped."""
    return min(1.0, 1.2 * capacity / max(1, layout.groups))


def _select(m: Maker) -> Case:
    layout, capacity = m.sketch(m.call.option("capacity"))
    R = m.inputs.destinations
    x = m.values(R, layout.numel, dtype=m.call.dtype("x"))
    tensors: dict[str, Tensor | None] = {
        "x": m.spoilt(x),
        "threshold": m.threshold(x, _share_of(layout, capacity), layout.symbol.lanes),
        "bitmap": m.garbage(R, layout.words),
        "counts": m.garbage(R, COUNTS),
    }
    return m.case(tensors, ["bitmap", "counts"], layout=layout, capacity=capacity)


def _encoding(m: Maker, layout: SketchLayout, capacity: int, levels: int, call: Call) -> Case:
    W = m.inputs.destinations
    shape = (W, layout.numel)
    grad = m.values(*shape, dtype=call.dtype("grad"))
    given = call.given("support") is not None
    threshold = m.threshold(grad, _share_of(layout, capacity), layout.symbol.lanes)
    tensors = {
        "grad": m.spoilt(grad),
        "residual": m.optional(*shape, dtype=call.given("residual")),
        "threshold": threshold,
        "step": torch.exp2(torch.log2(threshold).floor() - 2),
        "seed": torch.tensor(
            [zlib.crc32(str(call).encode()) % 2**31], dtype=torch.int32, device="cpu"
        ),
        "index": m.garbage(W, layout.index_words),
        "cells": m.garbage(W, layout.cells),
        "counts": m.garbage(W, COUNTS),
        "support": m.support(W, layout.groups, capacity) if given else None,
    }
    written = ["residual", "index", "cells", "counts"]
    case = m.case(tensors, written, layout=layout, levels=levels, capacity=capacity)
    if m.inputs.kind == "ties" and layout.numel:
        # The largest that is not clipped.
        step = tensors["step"]
        assert step is not None
        m.put(case, levels * step)
    return case


def _encode(m: Maker) -> Case:
    layout, capacity = m.sketch(m.call.option("capacity"))
    return _encoding(m, layout, capacity, m.call.option("levels"), m.call)


def _decode(m: Maker) -> Case:
    layout, keys = m.sketch(m.call.option("layout").keys)
    W, symbol = max(2, m.call.rows[0]), layout.symbol
    out, residual = m.call.dtype("out"), m.call.given("residual")
    # The messages of W ranks, encoded as rows for W destinations.
    x = m.values(W, layout.numel, dtype=torch.float32)
    levels = symbol.levels(W)
    threshold = m.threshold(x, 0.5 * _share_of(layout, keys // W), symbol.lanes)
    index = m.garbage(W, layout.index_words)
    cells = m.garbage(W, layout.cells)
    step = torch.exp2(torch.log2(threshold.mean()).floor() - 2).expand(W).contiguous()
    seed = torch.tensor([12345], dtype=torch.int32, device="cpu")
    m.reference.encode(
        x, None, threshold, step, seed, index, cells, m.garbage(W, COUNTS),
        layout=layout, levels=levels, capacity=keys // W,
    )  # fmt: skip
    tensors = {
        "index": index,
        "cells": cells.sum(0, dtype=cells.dtype),
        "step": step[:1].clone(),
        "seed": seed,
        "out": m.garbage(layout.numel, dtype=out),
        "residual": m.optional(layout.numel, dtype=residual),
        "stats": m.garbage(2),
    }
    return replace(m.case(tensors, ["out", "residual", "stats"], layout=layout), scratch=("cells",))


def _symbols(m: Maker, layout: SketchLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Symbols, bitmap and seed."""
    symbols = (4 * m.values(1, layout.groups, dtype=torch.float32)[0]).to(torch.int32)
    bitmap = m.bits(1, layout.groups, layout.keys)[0]
    return symbols, bitmap, torch.tensor([54321], dtype=torch.int32, device="cpu")


def _insert(m: Maker) -> Case:
    layout, _ = m.sketch(0)
    symbols, bitmap, seed = _symbols(m, layout)
    tensors: dict[str, Tensor | None] = {
        "symbols": symbols,
        "index": bitmap,
        "seed": seed,
        "cells": m.garbage(layout.cells),
    }
    return m.case(tensors, ["cells"], layout=layout)


def _peel(m: Maker) -> Case:
    layout, _ = m.sketch(0)
    symbols, bitmap, seed = _symbols(m, layout)
    cells = m.garbage(layout.cells)
    m.reference.insert(symbols, bitmap, seed, cells, layout=layout)
    tensors: dict[str, Tensor | None] = {"cells": cells, "index": bitmap, "seed": seed}
    return m.case(tensors, [], layout=layout)


def _pack_exponents(m: Maker) -> Case:
    layout = m.call.option("layout")
    layout = small_exponents(layout) if m.inputs.small else layout
    tensors: dict[str, Tensor | None] = {
        "rows": _of_exponents(m, m.inputs.destinations, layout),
        "message": m.garbage(m.inputs.destinations, layout.raw_words),
    }
    return m.case(tensors, ["message"], layout=layout)


def _of_exponents(m: Maker, rows: int, layout: ExponentLayout) -> Tensor:
    """Rows with exceptions, of which the last one's do not all fit, unless inputs are usual."""
    x = m.spoilt(m.values(rows, layout.numel, dtype=torch.bfloat16))
    if m.inputs.kind == "ties":
        x[-1, ::21] *= 2.0**40
        x[:-1, ::101] *= 2.0**-40
    return x


def _unpack_exponents(m: Maker) -> Case:
    layout, rows = m.call.option("layout"), min(m.call.rows[0], 4)
    layout = small_exponents(layout) if m.inputs.small else layout
    x = _of_exponents(m, rows, layout)
    message = m.garbage(rows, layout.raw_words)
    m.reference.pack_exponents(x, message, layout=layout)
    if m.inputs.kind == "usual":
        message = message[:, : layout.words].contiguous()
    out = m.garbage(*x.shape, dtype=x.dtype)
    return m.case({"message": message, "rows": out}, ["rows"], layout=layout)


def _undo_lag(m: Maker) -> Case:
    n = 4 * 1024 + 16 + m.call.rest if m.inputs.elements is None else m.inputs.elements
    tensors: dict[str, Tensor | None] = {
        "decoded": m.spoilt(m.values(1, n, dtype=torch.float32))[0],
        "sent": m.values(n, dtype=torch.float32),
        "out": m.garbage(n, dtype=m.call.dtype("out")),
    }
    return m.case(tensors, ["sent", "out"])


def _fingerprint(m: Maker) -> Case:
    n = 4 * 1024 + 16 + m.call.rest if m.inputs.elements is None else m.inputs.elements
    x = m.values(n, dtype=m.call.dtype("x"))
    sums, before = _no_fingerprint()
    tensors: dict[str, Tensor | None] = {"x": x, "sums": sums, "before": before, "changed": None}
    if m.call.given("changed") is None:
        return m.case(tensors, ["sums", "before"])
    m.reference.fingerprint(x, sums, before)
    tensors["changed"] = torch.zeros(1, dtype=torch.bool, device="cpu")
    x[-1:].neg_()
    return m.case(tensors, ["sums", "changed"])


def _no_fingerprint() -> tuple[Tensor, Tensor]:
    first, second = (torch.zeros(k, dtype=torch.int64, device="cpu") for k in (3, 2))
    return first, second


def _put_dense(m: Maker) -> Case:
    layout, columns, words = m.dense()
    D = m.inputs.destinations
    x = m.spoilt(m.values(D, columns, dtype=m.call.dtype("x")))
    stamp = None if m.call.given("stamp") is None else _stamp()
    tensors = {"x": x, "message": m.garbage(D, words), "stamp": stamp}
    return m.case(tensors, ["message", "stamp"], layout=layout)


def _stamp() -> Tensor:
    return torch.tensor([GARBAGE + 1, 41], dtype=torch.int32, device="cpu")


def _sum_dense(m: Maker) -> Case:
    layout, columns, words = m.dense()
    K, R = min(m.call.rows[0], 2), m.call.rows[1]
    stamp = None if m.call.given("stamp") is None else _stamp()
    message = _dense_messages(m, K * R, layout, columns, words, stamp)
    wrong, spoils = None, m.inputs.kind == "ties"
    if m.call.given("wrong") is not None:
        wrong = torch.tensor([stamp is None and spoils], dtype=torch.bool, device="cpu")
    if stamp is not None and spoils:
        message[-1, layout.tail + m.inputs.seed % STAMP_WORDS] += 1
    tensors: dict[str, Tensor | None] = {
        "message": message.view(K, R, words),
        "out": m.values(K, columns, dtype=m.call.dtype("out")),
        "stamp": stamp,
        "wrong": wrong,
    }
    return m.case(tensors, ["out", "wrong"], layout=layout)


def _quantize_and_put(m: Maker) -> Case:
    if m.call.given("sums") is None:
        return _merged(m, "quantize", "put_dense")
    case = _merged(m.with_one_row(), "quantize", "put_dense")
    case.tensors["sums"], case.tensors["before"] = _no_fingerprint()
    return replace(case, written=(*case.written, "sums", "before"))


def _dequantize_and_sum(m: Maker) -> Case:
    return _merged(m, "dequantize", "sum_dense")


def _merged(m: Maker, blocks: str, pieces: str) -> Case:
    """The tensors of two operators' cases. The second one's messages and rows contain the first
    one's in training; here they are beside them."""
    first = _MAKERS[blocks](m.part(blocks, m.call.option("layout")))
    second = _MAKERS[pieces](m.part(pieces, m.call.option("dense")))
    written = *first.written, *renamed((name, None) for name in second.written)
    layouts = {"layout": first.call.option("layout"), "dense": second.call.option("layout")}
    given = {name: None for name, _ in m.call.dtypes} | first.tensors
    given |= renamed(second.tensors.items())
    return m.case(given, written, **layouts)


def _dense_messages(
    m: Maker, rows: int, layout: DenseLayout, columns: int, words: int, stamp: Tensor | None
) -> Tensor:
    message = m.garbage(rows, words)
    x = m.spoilt(m.values(rows, columns, dtype=layout.wire))
    m.reference.put_dense(x, message, stamp, layout=layout)
    return message


def _steer(m: Maker) -> Case:
    segments, destinations = m.call.rows
    # More than one program has threads for.
    segments += 128 // destinations
    shape = segments, destinations
    # Counts near the target, far from it, and zero; few or many saturated.
    counts = m.uniform(*shape, COUNTS) * torch.exp2(11 * m.uniform(*shape, 1))
    counts[..., SATURATED] *= torch.exp2(-12 * m.uniform(*shape))
    counts[m.uniform(*shape) < 0.1] = 0
    counts[m.uniform(*shape) < 0.1, ABOVE] = 0
    scale = torch.exp2((4 * m.uniform(segments)).floor())
    scale[::7] = 0
    state = torch.empty(STATES, *shape, dtype=torch.float32, device="cpu")
    state[THRESHOLD] = torch.exp2(20 * m.uniform(*shape) - 15)
    state[BOOST] = torch.exp2((3 * m.uniform(*shape)).floor())
    state[BIAS], state[EXPONENT] = 1 + m.uniform(*shape), 1 / 32 + m.uniform(*shape) / 3
    state[SIDE] = (3 * m.uniform(*shape)).floor() - 1
    state[STEP] = torch.nan
    tensors: dict[str, Tensor | None] = {
        "counts": counts.int(),
        "target": 700 * (0.5 + m.uniform(segments)),
        "max_boost": torch.exp2((3 * m.uniform(segments)).floor()),
        "scale": scale,
        "state": state,
    }
    return m.case(tensors, ["state"])


_MAKERS: dict[str, Callable[[Maker], Case]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "quantize_matrix": _quantize_matrix,
    "dequantize_matrix": _dequantize_matrix,
    "measure_exact": _measure_exact,
    "encode_exact": _encode_exact,
    "decode_exact": _decode_exact,
    "pack_exponents": _pack_exponents,
    "unpack_exponents": _unpack_exponents,
    "undo_lag": _undo_lag,
    "steer": _steer,
    "fingerprint": _fingerprint,
    "put_dense": _put_dense,
    "sum_dense": _sum_dense,
    "quantize_and_put": _quantize_and_put,
    "dequantize_and_sum": _dequantize_and_sum,
    "encode": _encode,
    "select": _select,
    "decode": _decode,
    "insert": _insert,
    "peel": _peel,
}

"""Makes small inputs for a call of an operator. The reference makes the messages to be decoded."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tagc.ops import ABOVE, COUNTS, SATURATED
from tagc.ops.blocks import BlockLayout
from tagc.ops.dense import STAMP_WORDS
from tagc.ops.sketch import SketchLayout
from tagc.ops.thresholds import BIAS, BOOST, EXPONENT, SIDE, STATES, STEP, THRESHOLD
from tagc.selfcheck.calls import Call
from tagc.selfcheck.inputs import GARBAGE, USUAL, Case, Inputs, Maker, small_encoder


def case_of(call: Call, inputs: Inputs = USUAL) -> Case:
    """The same inputs every time."""
    name = str(call) if inputs == USUAL else f"{call} {inputs}"
    generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(name.encode()))
    return _MAKERS[call.operator](Maker(call, inputs, generator))


def _quantize(m: Maker) -> Case:
    R = m.inputs.destinations
    case = _elementwise(m, R)
    if m.inputs.kind == "ties" and m.layout.numel:
        m.put(case, _halfway(m.layout.levels).expand(R))
    if m.call["dither"] is not None:
        # Both signs, and a different one for each row.
        signs = [GARBAGE, ~GARBAGE][:R]
        case.tensors["dither"] = torch.tensor(signs, dtype=torch.int32, device="cpu")
    return case


def _halfway(levels: int) -> Tensor:
    """A number that has a scale halfway between two bfloat16; larger than those of ties."""
    half = torch.tensor(4 * (1 + 2.0**-8), dtype=torch.float32, device="cpu")
    near = levels * half * (1 + torch.arange(-8, 9, dtype=torch.float32, device="cpu") * 2.0**-24)
    return near[near * torch.tensor(1 / levels, dtype=torch.float32, device="cpu") == half][0]


def _quantize_matrix(m: Maker) -> Case:
    (D,) = m.call.rows
    if m.inputs.small:
        m.layout, D = small_encoder(m.call["layout"], D)
    return _elementwise(m, D)


def _elementwise(m: Maker, destinations: int) -> Case:
    residual = m.call["residual"]
    return m.case(
        {
            "grad": m.spoilt(m.elements(destinations, m.call["grad"])),
            "residual": None if residual is None else m.elements(destinations, residual),
            "message": m.garbage(destinations, m.layout.words),
        }
    )


def _dequantize(m: Maker) -> Case:
    """Messages for at most two results, of blocks or of matrices."""
    K, R = min(m.call.rows[0], 2), m.call.rows[1]
    message = m.garbage(K * R, m.layout.words)
    quantize = getattr(m.reference, m.call.operator.removeprefix("de"))
    sent = m.spoilt(m.elements(K * R, torch.float32))
    quantize(sent, None, message, layout=m.layout, average=0.0)
    made = m.values if m.call["add"] else m.garbage
    out = made(K, m.layout.numel, dtype=m.call["out"])
    return m.case({"message": message.view(K, R, -1), "out": out})


def _changed(m: Maker, rows: int) -> tuple[Tensor, Tensor]:
    """Old rows, and new ones, of which no two have the same share of changes."""
    shape = rows, m.layout.numel
    old = m.spoilt(m.values(*shape, dtype=m.layout.dtype))
    by = m.values(*shape, dtype=torch.float32)
    step = torch.exp2(m.uniform(rows, 1) * -16)
    if m.inputs.kind == "ties":
        step = (m.uniform(*shape) < step).float()  # some elements change
    new = (old.float() + step * by).to(m.layout.dtype)
    if m.inputs.kind == "rough":
        m.spoilt(new)
    return old, new


def _measured(m: Maker, rows: int) -> list[dict[str, Tensor]]:
    """Rows, each with a plan."""
    found = []
    for old, new in zip(*(x.split(1) for x in _changed(m, rows)), strict=True):
        plan = m.garbage(1, m.layout.plan_words)
        m.reference.measure_exact(new, old, plan, layout=m.layout)
        found.append({"new": new, "old": old, "plan": plan})
    return found


def _measure_exact(m: Maker) -> Case:
    old, new = _changed(m, 1)
    return m.case({"new": new, "old": old, "plan": m.garbage(1, m.layout.plan_words)})


def _encode_exact(m: Maker) -> Case:
    (row,) = _measured(m, 1)
    return m.case({**row, "message": m.garbage(1, m.layout.words)})


def _decode_exact(m: Maker) -> Case:
    rows = _measured(m, min(m.call.rows[0], 4))
    message = m.garbage(len(rows), m.layout.words)
    for words, row in zip(message, rows, strict=True):
        m.reference.encode_exact(**row, message=words[None], layout=m.layout)
    return m.case({"message": message, "rows": torch.cat([row["old"] for row in rows])})


def _share_of(layout: SketchLayout, capacity: int) -> float:
    """A share of the groups that exceeds the capacity, so that some are dropped."""
    return min(1.0, 1.2 * capacity / max(1, layout.groups))


def _select(m: Maker) -> Case:
    layout, capacity, R = m.layout, m.capacity(), m.inputs.destinations
    x = m.values(R, layout.numel, dtype=m.call["x"])
    tensors = {
        "x": m.spoilt(x),
        "threshold": m.threshold(x, _share_of(layout, capacity), layout.symbol.lanes),
        "bitmap": m.garbage(R, layout.words),
        "counts": m.garbage(R, COUNTS),
    }
    return m.case(tensors, capacity=capacity)


def _encode(m: Maker) -> Case:
    layout, capacity, W = m.layout, m.capacity(), m.inputs.destinations
    shape = (W, layout.numel)
    grad = m.values(*shape, dtype=m.call["grad"])
    residual = m.call["residual"]
    threshold = m.threshold(grad, _share_of(layout, capacity), layout.symbol.lanes)
    step = torch.exp2(torch.log2(threshold).floor() - 2)
    seed = zlib.crc32(str(m.call).encode()) % 2**31
    tensors = {
        "grad": m.spoilt(grad),
        "residual": None if residual is None else m.values(*shape, dtype=residual),
        "threshold": threshold,
        "step": step,
        "seed": torch.tensor([seed], dtype=torch.int32, device="cpu"),
        "index": m.garbage(W, layout.index_words),
        "cells": m.garbage(W, layout.cells),
        "counts": m.garbage(W, COUNTS),
        "support": None,
    }
    if m.call["support"] is not None:
        tensors["support"] = m.support(W, layout.groups, capacity)
    case = m.case(tensors, capacity=capacity)
    if m.inputs.kind == "ties" and layout.numel:
        # The largest that is not clipped.
        m.put(case, m.call["levels"] * step)
    return case


def _decode(m: Maker) -> Case:
    layout, out, residual = m.layout, m.call["out"], m.call["residual"]
    # The messages of W ranks, encoded as rows for W destinations.
    W, symbol = max(2, m.call.rows[0]), layout.symbol
    capacity = layout.keys // W
    x = m.values(W, layout.numel, dtype=torch.float32)
    threshold = m.threshold(x, 0.5 * _share_of(layout, capacity), symbol.lanes)
    index = m.garbage(W, layout.index_words)
    cells = m.garbage(W, layout.cells)
    step = torch.exp2(torch.log2(threshold.mean()).floor() - 2).expand(W).contiguous()
    seed = torch.tensor([12345], dtype=torch.int32, device="cpu")
    m.reference.encode(
        x, None, threshold, step, seed, index, cells, m.garbage(W, COUNTS),
        layout=layout, levels=symbol.levels(W), capacity=capacity,
    )  # fmt: skip
    tensors = {
        "index": index,
        "cells": cells.sum(0, dtype=cells.dtype),
        "step": step[:1].clone(),
        "seed": seed,
        "out": m.garbage(layout.numel, dtype=out),
        "residual": None if residual is None else m.values(layout.numel, dtype=residual),
        "stats": m.garbage(2),
    }
    return replace(m.case(tensors), scratch=("cells",))


def _inserted(m: Maker) -> dict[str, Tensor]:
    symbols = 4 * m.values(1, m.layout.groups, dtype=torch.float32)[0]
    return {
        "symbols": symbols.to(torch.int32),
        "index": m.bits(1, m.layout.groups, m.layout.keys)[0],
        "seed": torch.tensor([54321], dtype=torch.int32, device="cpu"),
        "cells": m.garbage(m.layout.cells),
    }


def _peel(m: Maker) -> Case:
    tensors = _inserted(m)
    m.reference.insert(**tensors, layout=m.layout)
    return m.case({name: tensors[name] for name in ("cells", "index", "seed")})


def _pack_exponents(m: Maker) -> Case:
    rows = m.inputs.destinations
    x = _of_exponents(m, rows)
    return m.case({"rows": x, "message": m.garbage(rows, m.layout.raw_words)})


def _of_exponents(m: Maker, rows: int) -> Tensor:
    """Rows with exceptions, of which the last one's do not all fit, unless inputs are usual."""
    x = m.spoilt(m.values(rows, m.layout.numel, dtype=torch.bfloat16))
    if m.inputs.kind == "ties":
        x[-1, ::21] *= 2.0**40
        x[:-1, ::101] *= 2.0**-40
    return x


def _unpack_exponents(m: Maker) -> Case:
    x = _of_exponents(m, min(m.call.rows[0], 4))
    message = m.garbage(len(x), m.layout.raw_words)
    m.reference.pack_exponents(x, message, layout=m.layout)
    if m.inputs.kind == "usual":
        message = message[:, : m.layout.words].contiguous()
    return m.case({"message": message, "rows": m.garbage(*x.shape, dtype=x.dtype)})


def _undo_lag(m: Maker) -> Case:
    n = m.numel
    tensors: dict[str, Tensor | None] = {
        "decoded": m.spoilt(m.values(1, n, dtype=torch.float32))[0],
        "sent": m.values(n, dtype=torch.float32),
        "out": m.garbage(n, dtype=m.call["out"]),
    }
    return m.case(tensors)


def _fingerprint(m: Maker) -> Case:
    x = m.values(m.numel, dtype=m.call["x"])
    tensors = {"x": x, **_no_fingerprint(), "changed": None}
    if m.call["changed"] is not None:
        m.reference.fingerprint(x, tensors["sums"], tensors["before"])
        tensors["changed"] = torch.zeros(1, dtype=torch.bool, device="cpu")
        x[-1:].neg_()
    return m.case(tensors)


def _no_fingerprint() -> dict[str, Tensor]:
    sizes = {"sums": 3, "before": 2}
    return {n: torch.zeros(k, dtype=torch.int64, device="cpu") for n, k in sizes.items()}


def _stamp(m: Maker) -> Tensor | None:
    if m.call["stamp"] is None:
        return None
    return torch.tensor([GARBAGE + 1, 41], dtype=torch.int32, device="cpu")


def _put_dense(m: Maker) -> Case:
    columns, words = m.columns_and_words()
    D = m.inputs.destinations
    x = m.spoilt(m.values(D, columns, dtype=m.call["x"]))
    return m.case({"x": x, "message": m.garbage(D, words), "stamp": _stamp(m)})


def _sum_dense(m: Maker) -> Case:
    columns, words = m.columns_and_words()
    K, R = min(m.call.rows[0], 2), m.call.rows[1]
    stamp = _stamp(m)
    message = m.garbage(K * R, words)
    x = m.spoilt(m.values(K * R, columns, dtype=m.layout.wire))
    m.reference.put_dense(x, message, stamp, layout=m.layout)
    wrong, spoils = None, m.inputs.kind == "ties"
    if m.call["wrong"] is not None:
        wrong = torch.tensor([stamp is None and spoils], dtype=torch.bool, device="cpu")
    if stamp is not None and spoils:
        message[-1, m.layout.tail + m.inputs.seed % STAMP_WORDS] += 1
    out = m.values(K, columns, dtype=m.call["out"])
    return m.case(
        {"message": message.view(K, R, words), "out": out, "stamp": stamp, "wrong": wrong}
    )


def _quantize_and_put(m: Maker) -> Case:
    if m.call["sums"] is None:
        return _merged(m, "quantize", "put_dense")
    case = _merged(m.with_one_row(), "quantize", "put_dense")
    case.tensors.update(_no_fingerprint())
    return case


def _dequantize_and_sum(m: Maker) -> Case:
    case = _merged(m, "dequantize", "sum_dense")
    if m.call["sent"] is None:
        return case
    n = m.layout.numel
    case.tensors["sent"] = m.values(n, dtype=torch.float32)
    case.tensors["ahead"] = m.garbage(n, dtype=m.call["ahead"])
    return replace(case, scratch=("out",))


# What a merged operator calls the arguments of its second part.
_RENAMED = {"message": "whole", "out": "rows"}


def _merged(m: Maker, codes: str, pieces: str) -> Case:
    """The tensors of two operators' cases. The second one's messages and rows contain the first
    one's in training; here they are beside them."""
    layout = m.call["layout"]
    if not isinstance(layout, BlockLayout):
        codes += "_matrix"
    part = m.part(codes, layout)
    first = _MAKERS[codes](part)
    m.layout = part.layout
    message = first.tensors["message"]
    assert message is not None
    if message.dim() == 2:
        m.inputs = replace(m.inputs, destinations=len(message))
    second = _MAKERS[pieces](m.part(pieces, m.call["dense"]))
    given = {name: None for name, _ in m.call.dtypes} | first.tensors
    given |= {_RENAMED.get(name, name): x for name, x in second.tensors.items()}
    return m.case(given, dense=second.call["layout"])


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
    tensors = {
        "counts": counts.int(),
        "target": 700 * (0.5 + m.uniform(segments)),
        "max_boost": torch.exp2((3 * m.uniform(segments)).floor()),
        "scale": scale,
        "state": state,
    }
    return m.case(tensors)


_MAKERS: dict[str, Callable[[Maker], Case]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "quantize_matrix": _quantize_matrix,
    "dequantize_matrix": _dequantize,
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
    "insert": lambda m: m.case(_inserted(m)),
    "peel": _peel,
}

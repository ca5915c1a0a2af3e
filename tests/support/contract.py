"""What the operators return whose code all implementations on a CPU share, in numpy scalars.

The formats' numbers are written out here, so a mistake in `tagc.ops` shows. Only shapes of layouts
are read. Of merged operators, the part for blocks is the reference's. For small inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from support import oracle
from tagc.ops import get_ops

F, F32 = np.float32, torch.float32
REFERENCE = get_ops("cpu", "reference")
Results = dict[str, Tensor]


def results(operator: str, t: dict[str, Any], o: dict[str, Any]) -> Results:
    """What an operator leaves in the tensors that it writes, by argument.

    Args:
        t: its tensors, as they are before.
        o: its other arguments.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return _CONTRACTS[operator](t, o)


def check(got: Results, want: Results) -> None:
    """Compare bits, except those of NaNs."""
    for name, expected in want.items():
        same = oracle.same_values if expected.dtype.is_floating_point else torch.equal
        assert same(got[name], expected), name


def fingerprint(t: dict[str, Any], o: dict[str, Any]) -> Results:
    size = t["x"].element_size()
    raw = t["x"].view(torch.uint8).numpy().tobytes()
    words, end = len(raw) // 8, len(raw) // 8 * 8
    sums = [0, 0]
    for i in range(words):
        word = int.from_bytes(raw[8 * i : 8 * i + 8], "little")
        sums = [a + word * (2 * (i % n) + 1) for a, n in zip(sums, (1024, 1021), strict=True)]
    for j, at in enumerate(range(end, len(raw), size)):
        rest = int.from_bytes(raw[at : at + size], "little", signed=True)
        sums = [a + (rest << 17) * (2 * j + 1) for a in sums]
    found = torch.from_numpy(np.array([a % 2**64 for a in sums], np.uint64).view(np.int64))
    if t["changed"] is None:
        return {"sums": torch.zeros(3, dtype=torch.int64), "before": found}
    return {"changed": torch.tensor([not torch.equal(found, t["before"])])}


def put_dense(t: dict[str, Any], o: dict[str, Any]) -> Results:
    layout, message = o["layout"], t["message"].clone()
    halves = message.numpy().view(np.uint16)
    for column, numel, word in layout.pieces:
        x = t["x"][:, column : column + numel]
        if layout.wire == x.dtype:
            raw = x.contiguous().numpy(force=True) if x.dtype != torch.bfloat16 else None
            raw = x.contiguous().view(torch.int16).numpy() if raw is None else raw
            sent = raw.view(np.uint16)
        else:
            wide = x.float().numpy()
            sent = (oracle.to_bfloat16(wide).view(np.uint32) >> 16).astype(np.uint16)
            sent = np.where(np.isnan(wide), np.uint16(0x7FC0), sent)
        if sent.shape[1] % 2:
            sent = np.pad(sent, ((0, 0), (0, 1)))
        halves[:, 2 * word : 2 * word + sent.shape[1]] = sent
    if t["stamp"] is None:
        return {"message": message}
    stamp = torch.stack((t["stamp"][0], t["stamp"][1] + 1))
    message[:, layout.tail : layout.tail + 2] = stamp
    return {"message": message, "stamp": stamp}


def sum_dense(t: dict[str, Any], o: dict[str, Any]) -> Results:
    layout, message, out = o["layout"], t["message"], t["out"].clone()
    spoilt = t["wrong"] is not None and bool(t["wrong"])
    if t["stamp"] is not None:
        stamps = message[..., layout.tail : layout.tail + 2].reshape(-1, 2).tolist()
        spoilt = any(stamp != t["stamp"].tolist() for stamp in stamps)
    for k in range(len(out)):
        for piece in layout.pieces:
            rows = [wide_piece(row, layout, piece) for row in message[k]]
            total = rows[0]
            for row in rows[1:]:
                total = total + row
            if len(rows) == o["divisor"] == 1 and out.dtype == torch.float16:
                total = np.where(np.isfinite(total), np.clip(total, F(-65504), F(65504)), total)
            total = torch.from_numpy(total / F(o["divisor"]))
            assert total.dtype == F32
            out[k, piece.column : piece.column + piece.numel] = total.to(out.dtype)
    found = {"out": torch.full_like(out, torch.nan) if spoilt else out}
    return found if t["stamp"] is None else found | {"wrong": torch.tensor([spoilt])}


def quantize_and_put(t: dict[str, Any], o: dict[str, Any]) -> Results:
    put = put_dense(t | {"message": t["whole"]}, {"layout": o["dense"]})
    message = t["message"].clone()
    residual = None if t["residual"] is None else t["residual"].clone()
    REFERENCE.quantize(
        t["grad"], residual, message, layout=o["layout"], average=o["average"], dither=t["dither"]
    )
    found = {"whole": put.pop("message"), "message": message, **put}
    if t["sums"] is not None:
        found |= fingerprint(t | {"x": t["x"][0], "changed": None}, {})
    return found if residual is None else found | {"residual": residual}


def dequantize_and_sum(t: dict[str, Any], o: dict[str, Any]) -> Results:
    pieces = {"message": t["whole"], "out": t["rows"], "stamp": t["stamp"], "wrong": t["wrong"]}
    total = sum_dense(pieces, o | {"layout": o["dense"]})
    out = t["out"].clone()
    REFERENCE.dequantize(t["message"], out, layout=o["layout"], divisor=o["divisor"], add=o["add"])
    spoilt = t["wrong"] is not None and bool(total.get("wrong", t["wrong"]))
    return {
        "rows": total.pop("out"), **total, "out": torch.full_like(out, torch.nan) if spoilt else out
    }  # fmt: skip


def wide_piece(message: Tensor, layout: Any, piece: Any) -> np.ndarray:
    """The elements of a piece in float32."""
    words = -(-piece.numel * layout.wire.itemsize // 4)
    raw = message[piece.word : piece.word + words].contiguous().numpy()
    if layout.wire == torch.bfloat16:
        return (raw.view(np.uint16)[: piece.numel].astype(np.uint32) << 16).view(F)
    return raw.view(np.float16 if layout.wire == torch.float16 else F)[: piece.numel].astype(F)


_CONTRACTS = {
    contract.__name__: contract
    for contract in (fingerprint, put_dense, sum_dense, quantize_and_put, dequantize_and_sum)
}

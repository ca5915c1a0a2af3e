"""One shard's reduction over many ranks, by the operators themselves, one process.

Every rank's message and cells for one shard are encoded, summed and decoded as in training; what
comes out must be the sum of what the ranks say they sent, to the bit, but for unresolved keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tagc.codecs import CodecPlan, PlanRequest, plan_codec
from tagc.codecs.dense import DenseConfig, DensePlan
from tagc.codecs.feedback import FeedbackConfig, plan_feedback
from tagc.codecs.packed import PackedConfig, PackedPlan
from tagc.codecs.quantized import QuantizedConfig, QuantizedPlan
from tagc.codecs.selection.capacity import SLACK
from tagc.codecs.sketch import SketchConfig, SketchPlan
from tagc.ops import COUNTS, UNION, UNRESOLVED, Ops
from tagc.ops.sketch import plan_layout

from .overlap import Overlap

# Encoded at a time: memory, not speed.
_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is simulated.

    Attributes:
        overlap: how supports overlap, by group size.
    """

    numel: int
    world_size: int
    density: float
    overlap: dict[int, Overlap]
    seed: int = 0

    def plan(self, codec: Any) -> Any:
        """Sizes of a codec for this shard."""
        kind = "none" if isinstance(codec, DenseConfig) else "residual"
        return plan_codec(
            codec,
            PlanRequest(
                columns=self.numel,
                world_size=self.world_size,
                dtype=torch.float32,
                feedback=plan_feedback(FeedbackConfig(kind=kind)),
            ),
        )

    def gradients(self, group: int) -> Iterator[Tensor]:
        """Every rank's gradient ``[numel]``: at least 1 in its support, 0 elsewhere."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        groups = -(-self.numel // group)
        for support in self.overlap[group].supports(groups, self.world_size, self.seed):
            values = torch.randn(self.numel, generator=generator)
            values += values.sign()
            yield torch.where(support.repeat_interleave(group)[: self.numel], values, 0.0)


def simulate(name: str, setting: Setting, ops: Ops) -> dict[str, Any]:
    """Encode, sum and decode with one of :data:`CODECS`.

    Returns:
        Bytes that a rank sends, for its ``world_size`` shards and per element (with and without
        the factor ``(W - 1) / W``), the union density, and unresolved keys (None where there are
        no keys to resolve).

    Raises:
        AssertionError: if the decoded sum is not what was sent.
    """
    plan, run = CODECS[name](setting)
    said = run(setting, plan, ops)
    W = setting.world_size
    counts = 4 * 2 * COUNTS if isinstance(plan, SketchPlan) else 0
    row = 4 * (plan.words + plan.cells) + counts  # bytes for one destination
    return {
        "codec": name,
        "bytes_per_rank": (W - 1) * row,
        "bytes_per_element": (W - 1) / W * row / setting.numel,
        "bytes_per_element_normalised": row / setting.numel,
        **said,
    }


def _sketch(setting: Setting, plan: SketchPlan, ops: Ops) -> dict[str, Any]:
    layout, symbol = plan.layout, plan.symbol
    W, n = setting.world_size, setting.numel
    one, step = torch.ones(1), torch.full((1,), 2.0 ** -symbol.step_shift(plan.levels))
    seed = torch.tensor([setting.seed], dtype=torch.int32)
    index = torch.empty(W, layout.index_words, dtype=torch.int32)
    cells, total = (torch.zeros(1, layout.cells, dtype=symbol.dtype) for _ in range(2))
    counts, stats = torch.empty(1, COUNTS, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    residual, sent = torch.empty(1, n), torch.zeros(n, dtype=torch.float64)
    support = None

    def encode(rank: int, grad: Tensor) -> None:
        residual.zero_()
        ops.encode(
            grad[None], residual, one, step, seed, index[rank : rank + 1], cells, counts,
            layout=layout, levels=plan.levels, capacity=plan.capacity, support=support,
        )  # fmt: skip

    for rank, grad in enumerate(setting.gradients(symbol.lanes)):
        if plan.shared and support is None:  # what the first rank, the owner, would select
            encode(rank, grad)
            support = index[:1, : layout.words].clone()
        encode(rank, grad)
        total += cells
        sent += grad - residual[0]
    if support is not None:  # the owner's next choice travels in the place of the index
        index[:, : layout.words] = support
    out = torch.empty(n)
    ops.decode(index, total[0], step, seed, out, None, stats, layout=layout, divisor=1)
    unresolved = int(stats[UNRESOLVED])
    wrong = int((out.double() != sent).view(-1).sum())
    if wrong > unresolved * symbol.lanes:
        raise AssertionError(f"{wrong} elements are wrong, and only {unresolved} keys unresolved")
    return {
        "union_density": int(stats[UNION]) / layout.groups,
        "unresolved": unresolved,
        "keys": int(stats[UNION]),
        "direct": layout.direct,
        "shared": plan.shared,
        "symbol": symbol.name,
    }


def _packed(setting: Setting, plan: PackedPlan, ops: Ops) -> dict[str, Any]:
    layout = plan.layout
    W, n = setting.world_size, setting.numel
    messages = torch.empty(W, layout.words, dtype=torch.int32)
    grads = setting.gradients(layout.group)
    sent, union = torch.zeros(n), torch.zeros(n, dtype=torch.bool)
    for start in range(0, W, _ROWS):
        rows = torch.stack([next(grads) for _ in range(min(_ROWS, W - start))])
        R = len(rows)
        residual, threshold = torch.zeros_like(rows), torch.ones(R)
        counts = torch.empty(R, COUNTS, dtype=torch.int32)
        into = messages[start : start + R]
        ops.pack(rows, residual, threshold, into, counts, layout=layout)
        for row in rows - residual:
            sent = sent + row
            union |= row != 0
    out = torch.empty(n)
    ops.unpack(messages, out, layout=layout, divisor=1)
    _check_equal(out, sent)
    density = float(union.float().mean())
    return {"union_density": density, "unresolved": None}


def _quantized(setting: Setting, plan: QuantizedPlan, ops: Ops) -> dict[str, Any]:
    W, n = setting.world_size, setting.numel
    generator = torch.Generator().manual_seed(setting.seed)
    messages = torch.empty(W, plan.layout.words, dtype=torch.int32)
    sent = torch.zeros(n)
    for start in range(0, W, _ROWS):
        rows = torch.randn(min(_ROWS, W - start), n, generator=generator)
        residual = torch.zeros_like(rows)
        into = messages[start : start + len(rows)]
        ops.quantize(rows, residual, into, layout=plan.layout, average=0.0)
        for row in rows - residual:
            sent = sent + row
    out = torch.empty(1, n)
    ops.dequantize(messages[None], out, layout=plan.layout, divisor=1)
    _check_equal(out[0], sent)
    return {"union_density": 1.0, "unresolved": None}


def _dense(setting: Setting, plan: DensePlan, ops: Ops) -> dict[str, Any]:
    return {"union_density": 1.0, "unresolved": None}


def _check_equal(out: Tensor, sent: Tensor) -> None:
    if not torch.equal(out, sent):
        raise AssertionError(f"{int((out != sent).sum())} decoded elements are not what was sent")


def _as_planned(setting: Setting) -> tuple[CodecPlan, Callable]:
    return setting.plan(SketchConfig(density=setting.density)), _sketch


def _union_sized(setting: Setting) -> tuple[CodecPlan, Callable]:
    """The table that suffices where the union is known, instead of ``W`` disjoint supports."""
    plan = setting.plan(SketchConfig(density=setting.density))
    groups = plan.layout.groups
    union = setting.overlap[plan.symbol.lanes].union(setting.world_size)
    keys = min(groups, int(SLACK * union * groups) + 1)
    layout = plan_layout(setting.numel, plan.symbol, keys)
    rest = {"target": plan.target, "capacity": plan.capacity, "levels": plan.levels}
    return SketchPlan(layout=layout, feedback=plan.feedback, **rest), _sketch


def _shared_sketch(symbol: Any) -> Callable[[Setting], tuple[CodecPlan, Callable]]:
    def make(setting: Setting) -> tuple[CodecPlan, Callable]:
        codec = SketchConfig(density=setting.density, support="shared", symbol=symbol)
        return setting.plan(codec), _sketch

    return make


CODECS: dict[str, Callable[[Setting], tuple[Any, Callable]]] = {
    "sketch": _as_planned,
    "sketch sized to the union": _union_sized,
    "sketch shared": _shared_sketch("auto"),
    "sketch int16x2 shared": _shared_sketch("int16x2"),
    "packed int4": lambda s: (s.plan(PackedConfig(density=s.density, bits=4)), _packed),
    "quantized int4": lambda s: (s.plan(QuantizedConfig(bits=4)), _quantized),
    "dense bf16": lambda s: (s.plan(DenseConfig(wire="bfloat16")), _dense),
}

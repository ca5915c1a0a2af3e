"""One unit's reducer and gradients for it, without a model."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.codecs.workspace import Workspace
from tagc.collect import UnitReducer
from tagc.ops import get_ops
from tagc.plan import Direction, UnitInfo, UnitParam, UnitPlan, build_plan
from tagc.policy import Policy

AVG = dist.ReduceOp.AVG


def policy(*rules: tuple[dict, float], symbol: str = "auto", stored: str = "float32") -> Policy:
    """Sketches with a density for each `when`; everything else is dense."""
    return Policy.load(
        {
            "schema": 1,
            "gradients": [
                {
                    "when": when,
                    "codec": {"kind": "sketch", "density": density, "symbol": symbol},
                    "feedback": {"kind": "residual", "dtype": stored},
                }
                for when, density in rules
            ],
        }
    )


# A shard's shapes of parameters, by name. `a` has an odd number of columns.
Shapes = dict[str, tuple[int, ...]]
NARROW: Shapes = {"a": (911, 1), "b": (30, 1), "c": (303, 1), "d": (5, 1)}
# `c0` to `c2` are one segment of two times 3 x 33 and, with three dimensions, 4 x 30.
MATRICES: Shapes = {
    "a": (13, 70), "b": (6, 5), "c0": (3, 33), "c1": (3, 33), "c2": (4, 5, 6), "d": (1, 5),
}  # fmt: skip


def unit_plan(world_size: int, **spec: Any) -> UnitPlan:
    """A unit of 1249 columns; `a` and `c` are sketched, `b` and `d` dense."""
    rules = policy(({"name": "a.*"}, 0.1), ({"name": "c.*"}, 0.4), **spec)
    return plan_of(world_size, torch.float32, rules)


def codec_plan(
    world_size: int,
    codec: dict[str, Any],
    feedback: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    direction: Direction = "gradients",
    shapes: Shapes = NARROW,
) -> UnitPlan:
    """The same unit, or one of other shapes, with any codec for `a` and `c`."""
    rule = {"when": {"name": ["a.*", "c*"]}, "codec": codec}
    rule |= {} if feedback is None else {"feedback": feedback}
    dense = {"when": {}, "codec": {"kind": "dense"}}
    rules = Policy.load({"schema": 1, "gradients": [dense], direction: [rule]})
    return plan_of(world_size, dtype, rules, shapes, direction)


def matrix_plan(*how: Any, **more: Any) -> UnitPlan:
    """:func:`codec_plan` of matrices."""
    return codec_plan(*how, **more, shapes=MATRICES)


def plan_of(
    world_size: int,
    dtype: torch.dtype,
    rules: Policy,
    shapes: Shapes = NARROW,
    direction: Direction = "gradients",
) -> UnitPlan:
    params = tuple(
        UnitParam(
            name=f"{name}.weight",
            shape=(shape[0] * world_size, *shape[1:]),
            columns=math.prod(shape),
        )
        for name, shape in shapes.items()
    )
    info = UnitInfo(name="unit", params=params, world_size=world_size, dtype=dtype)
    with warnings.catch_warnings():
        # Units as small as this one may send more when compressed.
        warnings.simplefilter("ignore")
        if direction == "replicas":
            return build_plan([info], rules, replicas=[info]).replicas[0]
        return build_plan([info], rules).units[0]


def unit_reducer(plan: UnitPlan, ops: str = "reference", **options: Any) -> UnitReducer:
    cpu = torch.device("cpu")
    options["rank"] = dist.get_rank() if dist.is_initialized() else 0
    return UnitReducer(plan, get_ops(cpu, ops), cpu, Workspace(cpu), seed=7, **options)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def reduce(reducer: UnitReducer, inp: Tensor, op: Any = AVG) -> Tensor:
    """This rank's shard; unwritten elements are NaN."""
    out = torch.full((reducer.plan.columns,), torch.nan, dtype=inp.dtype)
    reducer.reduce(out, inp.clone().view(-1), world(), op)
    return out


def normal(world_size: int, columns: int, step: int) -> Tensor:
    """Buffers of all ranks, `[R, W, S]`, with scales that differ between columns."""
    generator = torch.Generator().manual_seed(step)
    shape = (world_size, world_size, columns)
    scale = 10 ** torch.linspace(-3, 1, columns)
    return torch.randn(shape, generator=generator) * scale


def on_grid(world_size: int, columns: int, step: int) -> Tensor:
    """Like `normal`, in multiples of 2**-10 below 4: a few dozen of these add without rounding."""
    return (normal(world_size, columns, step) * 2**10).round().clamp(-4095, 4095) / 2**10


def gathered(t: Tensor) -> Tensor:
    """`[R, ...]`."""
    out = torch.empty(dist.get_world_size(), *t.shape, dtype=t.dtype)
    dist.all_gather(list(out.unbind()), t.contiguous())
    return out

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


def unit_plan(
    world_size: int,
    dtype: torch.dtype = torch.float32,
    density: tuple[float, float] = (0.1, 0.4),
    **spec: Any,
) -> UnitPlan:
    """A unit of 1249 columns; `a` (911, odd) and `c` (303) are sketched, `b` and `d` dense."""
    rules = policy(({"name": "a.*"}, density[0]), ({"name": "c.*"}, density[1]), **spec)
    return plan_of(world_size, dtype, rules)


def codec_plan(
    world_size: int,
    codec: dict[str, Any],
    feedback: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    direction: Direction = "gradients",
) -> UnitPlan:
    """The same unit, with any codec for `a` and `c`."""
    rules = _with_rule(["a.*", "c.*"], codec, feedback, direction)
    return plan_of(world_size, dtype, rules, direction=direction)


def matrix_plan(
    world_size: int,
    codec: dict[str, Any],
    feedback: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    direction: Direction = "gradients",
) -> UnitPlan:
    """Any codec for `a` (13 x 70 in a shard) and for `c0` to `c2`, which are one segment of two
    times 3 x 33 and, with three dimensions, 4 x 30; `b` and `d` are dense."""
    shapes = {
        "a": (13, 70), "b": (6, 5), "c0": (3, 33), "c1": (3, 33), "c2": (4, 5, 6), "d": (1, 5),
    }  # fmt: skip
    params = tuple(
        UnitParam(
            name=f"{name}.weight",
            shape=(shape[0] * world_size, *shape[1:]),
            columns=math.prod(shape),
        )
        for name, shape in shapes.items()
    )
    rules = _with_rule(["a.*", "c*"], codec, feedback, direction)
    return plan_of(world_size, dtype, rules, params, direction)


def _with_rule(
    names: list[str], codec: dict[str, Any], feedback: dict[str, Any] | None, direction: Direction
) -> Policy:
    dense = {"when": {}, "codec": {"kind": "dense"}}
    rule = {"when": {"name": names}, "codec": codec}
    rule |= {} if feedback is None else {"feedback": feedback}
    return Policy.load({"schema": 1, "gradients": [dense], direction: [rule]})


def plan_of(
    world_size: int,
    dtype: torch.dtype,
    rules: Policy,
    params: tuple[UnitParam, ...] = (),
    direction: Direction = "gradients",
) -> UnitPlan:
    columns = {"a": 911, "b": 30, "c": 303, "d": 5}
    narrow = tuple(
        UnitParam(name=f"{name}.weight", shape=(n * world_size, 1), columns=n)
        for name, n in columns.items()
    )
    info = UnitInfo(name="unit", params=params or narrow, world_size=world_size, dtype=dtype)
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


def spiky(world_size: int, columns: int, step: int) -> Tensor:
    """Like `normal`, with one outlier per hundred elements, enough that steps must grow."""
    buffers = normal(world_size, columns, step)
    picked = torch.rand(buffers.shape, generator=torch.Generator().manual_seed(step)) < 0.01
    return torch.where(picked, 1000 * buffers, buffers)


def on_grid(world_size: int, columns: int, step: int) -> Tensor:
    """Like `normal`, in multiples of 2**-10 below 4: a few dozen of these add without rounding."""
    return (normal(world_size, columns, step) * 2**10).round().clamp(-4095, 4095) / 2**10


def gathered(t: Tensor) -> Tensor:
    """`[R, ...]`."""
    out = torch.empty(dist.get_world_size(), *t.shape, dtype=t.dtype)
    dist.all_gather(list(out.unbind()), t.contiguous())
    return out

"""What a unit's plan is checked against, before anything of a reduction is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from tagc.plan import UnitPlan


def check_reduction(
    plan: UnitPlan,
    out: Tensor,
    inp: Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType,
    without_gradient: Callable[[], Sequence[str]],
    *,
    remedy: str,
) -> None:
    """Refuse buffers, group or operation that the plan was not made for.

    Args:
        without_gradient: finds the names of the unit's parameters that FSDP does not reduce.
        remedy: what to do about these.

    Raises:
        RuntimeError: naming the unit, what differs, and the remedy.
    """
    name = plan.info.label
    info = plan.info
    columns = plan.buffer_columns
    if group.size() != info.world_size:
        raise RuntimeError(
            f"tagc: unit {name!r} was planned for {info.world_size} ranks, but FSDP "
            f"reduces over {group.size()}; call tagc.wrap after the model is sharded for good"
        )
    rows = 1 if plan.for_all else info.world_size
    if out.numel() != columns or inp.numel() != columns * rows:
        names = without_gradient()
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        who = f"{', '.join(names[:8])}{more}" if names else "some of its parameters"
        raise RuntimeError(
            f"tagc: unit {name!r} was planned for {columns} gradient columns per rank, "
            f"but FSDP reduces {out.numel()}: {who} got no gradient in this "
            "backward, or requires_grad changed after tagc.wrap. Freeze parameters before "
            f"tagc.wrap, and {remedy}"
        )
    if inp.dtype != info.dtype:
        raise RuntimeError(
            f"tagc: unit {name!r} was planned for gradients of {info.dtype}, but FSDP "
            f"reduces {inp.dtype}; call tagc.wrap after the model's dtypes are set for good"
        )
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise RuntimeError(
            f"tagc: unit {name!r} is reduced with {name_of(op)}, but only SUM and AVG "
            "can be compressed; with a gradient divide factor, also call "
            "set_force_sum_reduction_for_comms(True) on the FSDP modules"
        )


def name_of(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> str:
    """An operation in words."""
    # An operation with a factor is an object that does not say its name.
    kinds = dist.ReduceOp.RedOpType.__members__.items()
    return next((name for name, kind in kinds if op == kind), str(op))

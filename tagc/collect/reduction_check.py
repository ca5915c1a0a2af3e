"""Checks that a reduction fits the unit's plan, before anything is sent."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from tagc.plan import UnitPlan
from tagc.plan.part import Part
from tagc.plan.table import as_list


def check_reduction(
    plan: UnitPlan,
    part: Part | None,
    out: Tensor,
    inp: Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType,
) -> None:
    """Raise if the plan was not made for these buffers, this group or this operation.

    Args:
        part: the part that the backward reached; None for all parameters of the unit.

    Raises:
        RuntimeError: naming the unit, what differs, and the remedy.
    """
    name = plan.info.label
    info = plan.info
    columns = plan.buffer_columns if part is None else part.columns
    unknown = sorted(part.names - {p.name for p in info.params}) if part is not None else []
    if group.size() != info.world_size:
        raise RuntimeError(
            f"tagc: unit {name!r} was planned for {info.world_size} ranks, but FSDP "
            f"reduces over {group.size()}; call tagc.wrap after the model is sharded for good"
        )
    expected = columns * plan.received_rows, columns * plan.rows
    if unknown or (out.numel(), inp.numel()) != expected:
        more = f", {as_list(unknown)} among them" if unknown else ""
        raise RuntimeError(
            f"tagc: unit {name!r} was planned for {columns} gradient columns per rank, but FSDP "
            f"reduces {out.numel()}{more}: requires_grad or the sharding changed after tagc.wrap. "
            "Unfreeze and shard parameters before tagc.wrap, or remove() it and wrap again"
        )
    if inp.dtype != info.dtype:
        raise RuntimeError(
            f"tagc: unit {name!r} was planned for gradients of {info.dtype}, but FSDP "
            f"reduces {inp.dtype}; call tagc.wrap after the model's dtypes are set for good"
        )
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise RuntimeError(
            f"tagc: unit {name!r} is reduced with {_name_of(op)}, but only SUM and AVG "
            "can be compressed; with a gradient divide factor, also call "
            "set_force_sum_reduction_for_comms(True) on the FSDP modules"
        )


def refuse_others(plan: UnitPlan, op: dist.ReduceOp.RedOpType, ranks: int) -> None:
    """Raise because micro-batches wait inside the host, and this reduction cannot include them.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"tagc: micro-batches of unit {plan.info.label!r} wait inside the host, but now it is "
        f"reduced with {_name_of(op)} over {ranks} ranks; reduce all micro-batches of a step alike"
    )


def _name_of(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> str:
    """The operation's name."""
    # An operation with a factor has no name of its own.
    kinds = dist.ReduceOp.RedOpType.__members__.items()
    return next((name for name, kind in kinds if op == kind), str(op))

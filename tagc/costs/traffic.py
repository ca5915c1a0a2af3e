"""Bytes that a rank must send, predicted from a plan."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tagc.plan import StagePlan, UnitPlan


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a rank must send for one unit in one step.

    Attributes:
        collectives: how many collectives start.
        reduced: bytes in the backend's own reduce-scatter.
        gathered: bytes in the backend's own all-gather.
        ring: bytes in all-reduces, and in messages that are the same for all ranks.
        all_to_all: bytes in messages or cells that differ for each rank.
        across: bytes between hosts, if the ranks of a host add up gradients first. Each rank sends
            to the ranks with its place on the other hosts.
        inside: bytes to ranks of the same host.
    """

    collectives: int = 0
    reduced: float = 0.0
    gathered: float = 0.0
    ring: float = 0.0
    all_to_all: float = 0.0
    across: float = 0.0
    inside: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Traffic(**sums)


def traffic(unit: UnitPlan, micro_batches: int = 1) -> Traffic:
    """Traffic of a unit in a step of ``micro_batches`` backwards.

    Some stages run only in the last backward: gradients between hosts and over replicas
    (``set_requires_all_reduce(False)``), and changes of parameters.
    """
    total = Traffic()
    for stage in unit.route:
        for _ in range(micro_batches if stage.each_backward else 1):
            total += _of_stage(stage)
    return total


def _of_stage(stage: StagePlan) -> Traffic:
    sent, counts, starts = stage.bytes, stage.count_bytes, stage.starts
    if stage.ranks == 1:
        return Traffic()
    if stage.level == "inside":
        return Traffic(collectives=starts, inside=sent)
    if stage.level == "across":
        return Traffic(collectives=starts, across=sent + counts)
    if stage.collective == "reduce-scatter":
        return Traffic(collectives=starts, reduced=sent)
    if stage.collective == "all-to-all":
        # Cells go by all-to-all on gloo; NCCL's ring is no worse.
        return Traffic(collectives=starts, ring=counts, all_to_all=sent)
    if stage.collective == "all-gather" and stage.messages is None:
        return Traffic(collectives=starts, gathered=sent)
    return Traffic(collectives=starts, ring=sent + counts)

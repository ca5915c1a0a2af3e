"""Units that are left to FSDP while others are compressed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from tagc.attach.integrations import integration_of
from tagc.attach.unit import Unit
from tagc.plan import as_list


def check_left(units: Sequence[Unit], left: Mapping[str, str], *, averages: bool) -> None:
    """Refuse a model if tagc can compress no unit of it, or if its replicas would diverge.

    Args:
        left: see :attr:`Integration.left_to_fsdp`.
        averages: whether tagc averages over replicas that FSDP does not know.

    Raises:
        ValueError: the message names the units and the remedy.
    """
    if not units:
        raise ValueError(
            f"tagc can compress no unit of this model: {_listed(left)}. Torch replaces collectives "
            "only of modules with one parameter group: apply fully_shard to each child "
            "separately, or train without tagc.wrap"
        )
    if averages and left:
        raise ValueError(
            f"with replicas=..., tagc averages over replicas, but it cannot reach "
            f"{_listed(left)}: shard over a mesh with a replicated dimension (HSDP), and leave "
            "replicas out of tagc.wrap"
        )


def notes_on_left(model: nn.Module) -> Iterator[str]:
    """Notes for the plan on the units that are not in it."""
    left = integration_of(model).left_to_fsdp(model)
    if left:
        yield (
            f"left to FSDP, and not in the table: {_listed(left)}. Torch replaces collectives only "
            "of modules with one parameter group"
        )


def _listed(left: Mapping[str, str]) -> str:
    return as_list([f"unit {name!r} with {what}" for name, what in left.items()])

"""The contract of an integration with a way of sharding or replicating: how to find units, what a
unit can do.

To add an integration, write a file with a subclass of :class:`Unit` and an :class:`Integration`,
and add it to :mod:`tagc.attach.integrations`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tagc.collect import ReplicaAverage, UnitGatherer, UnitReducer
from tagc.plan import UnitInfo
from tagc.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One communication unit of a model.

    Attributes:
        info: its reduce-scatter, or with DDP its all-reduce, with the trainable parameters.
        group: the ranks over which it is sharded; with DDP, replicated.
        gather_info: its all-gather, with all parameters; None if the all-gather, and therefore the
            all-reduce over replicas, cannot be replaced.
        replicas: the ranks with the same shard in other replicas of the model, if FSDP itself
            all-reduces over them.
        parallel: tensor-parallel groups that divide or duplicate parameters of the unit.
    """

    captures: ClassVar[bool] = False
    """Whether CUDA graphs may hold its collectives."""

    info: UnitInfo
    group: dist.ProcessGroup
    device: torch.device
    gather_info: UnitInfo | None = None
    replicas: dist.ProcessGroup | None = None
    parallel: Sequence[dist.ProcessGroup] = ()

    @property
    def reached(self) -> Set[str] | None:
        """Names of the parameters in the running reduction, which reads it; None if they are all of
        ``info``. The same on all ranks, because FSDP itself needs that."""
        return None

    def install(self, reducer: UnitReducer) -> None:
        """Let ``reducer`` reduce this unit's gradients."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the unit's own collectives."""
        raise NotImplementedError

    @property
    def all_reduces(self) -> bool:
        """Whether this backward sends the gradient on to other hosts or replicas, after the first
        reduction. False for micro-batches with ``set_requires_all_reduce(False)``."""
        return True

    def trainable(self) -> list[nn.Parameter]:
        """The parameters of ``info``, in that order, as an optimizer holds them now; or the flat
        parameter that contains them."""
        raise NotImplementedError

    # The rest is only for units with a `gather_info`.

    def check_own(self, *, gather: bool, average: bool) -> None:
        """Raise ValueError if someone else replaced the all-gather, or set an all-reduce hook, and
        :meth:`install_gather` or :meth:`install_all_reduce` would replace that."""
        raise NotImplementedError

    def install_gather(self, gatherer: UnitGatherer) -> None:
        """Let ``gatherer`` gather this unit's parameters."""
        raise NotImplementedError

    def send_ahead(self, gatherer: UnitGatherer) -> None:
        """Let ``gatherer`` send what it owes other ranks now, and not in a forward."""
        raise NotImplementedError

    def install_all_reduce(self, average: ReplicaAverage) -> None:
        """Let ``average`` average this unit's reduced gradient ``[S]`` in place; it replaces FSDP's
        own all-reduce if there is one. Call it after :meth:`install`."""
        raise NotImplementedError

    def frozen_shards(self) -> dict[str, Tensor]:
        """This rank's part of every frozen parameter, by name, without padding, in the dtype of the
        all-gather."""
        raise NotImplementedError

    def shard(self) -> Tensor:
        """This rank's current input of the all-gather, ``[S]``."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Integration:
    """A way of sharding or replicating a model.

    Attributes:
        name: short name, for users.
        description: name with the function or class that users call.
        shards: whether it shards, or with DDP replicates, any module of a model.
        sharding_groups: the groups of the ranks that share a model, even an invalid one.
        find_units: the units of a model, in module order; raises ValueError if a collective cannot
            be replaced, or already is.
        check_policy: raises PolicyError if the policy asks for something unsupported. The second
            argument says whether gradients are to be averaged over replicas.
    """

    name: str
    description: str
    shards: Callable[[nn.Module], bool]
    sharding_groups: Callable[[nn.Module], list[dist.ProcessGroup]]
    find_units: Callable[[nn.Module], list[Unit]]
    check_policy: Callable[[Policy, bool], None]


def already_wrapped(name: str) -> ValueError:
    """The error about a model with a part, ``name``, whose collectives tagc already replaces."""
    return ValueError(
        f"{name} is already wrapped, by itself or as a part of another model; call "
        "tagc.compressor(that_model).remove() first"
    )


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The group's ranks among all processes, in its order."""
    return tuple(dist.get_process_group_ranks(group))

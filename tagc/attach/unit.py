"""What an integration with a way of sharding is: how it finds units, and what a unit can do.

Another integration is a file with a subclass of :class:`Unit` and an :class:`Integration`, and a
line in :mod:`tagc.attach.integrations`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tagc.collect import ReplicaAverage, UnitGatherer, UnitReducer
from tagc.plan import UnitInfo
from tagc.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One communication unit of a sharded model.

    Attributes:
        info: its reduce-scatter, with the trainable parameters.
        group: ranks that it is sharded over.
        gather_info: its all-gather, with all parameters; None where that cannot be replaced, and
            then nor can the all-reduce over replicas.
        replicas: ranks with the same shard in other replicas of the model, where FSDP itself
            all-reduces over them.
        parallel: groups of ranks that tensor parallelism divided parameters of the unit among, or
            gave duplicates of them, before FSDP sharded these.
    """

    info: UnitInfo
    group: dist.ProcessGroup
    device: torch.device
    gather_info: UnitInfo | None = None
    replicas: dist.ProcessGroup | None = None
    parallel: Sequence[dist.ProcessGroup] = ()

    @property
    def reached(self) -> Set[str] | None:
        """Names of the parameters in the reduction that runs, called from within it; None if all of
        ``info`` are. The same on all ranks: FSDP itself needs that."""
        return None

    def install(self, reducer: UnitReducer) -> None:
        """Let ``reducer`` reduce this unit's gradients."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give the unit its own collectives back."""
        raise NotImplementedError

    @property
    def all_reduces(self) -> bool:
        """Whether the gradient leaves the ranks that reduce it first, for other hosts or replicas,
        in this backward; False between the micro-batches of ``set_requires_all_reduce(False)``."""
        return True

    def trainable(self) -> list[nn.Parameter]:
        """The parameters of ``info`` as an optimizer knows them now: in that order, or one that has
        them all."""
        raise NotImplementedError

    # What follows is for units with a `gather_info` only.

    def check_gather(self) -> None:
        """Before :meth:`install_gather`.

        Raises:
            ValueError: if somebody else replaced the all-gather.
        """
        raise NotImplementedError

    def install_gather(self, gatherer: UnitGatherer) -> None:
        """Let ``gatherer`` gather this unit's parameters."""
        raise NotImplementedError

    def install_all_reduce(self, average: ReplicaAverage) -> None:
        """Let ``average`` change this unit's reduced gradient ``[S]``; in place of FSDP's own
        all-reduce where there is one. After :meth:`install`."""
        raise NotImplementedError

    @property
    def has_all_reduce_hook(self) -> bool:
        """Whether somebody else set one."""
        raise NotImplementedError

    def frozen_shards(self) -> dict[str, Tensor]:
        """This rank's part of every parameter without a gradient, by name, in the dtype that the
        all-gather has; without padding."""
        raise NotImplementedError

    def shard(self) -> Tensor:
        """This rank's part of what the all-gather sends now, ``[S]``."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Integration:
    """A way of sharding.

    Attributes:
        name: short, for people.
        spelled: with what users call, for people.
        shards: whether it shards any module of a model.
        sharding_groups: of the ranks that share a model, whatever else may be wrong with it.
        find_units: the units of a model, in module order; raises ValueError for what cannot be
            replaced, or already is.
        left_to_fsdp: units whose collectives cannot be replaced, but that need not keep people from
            having the others compressed: by their label, what they are.
        check_policy: raises PolicyError for what it offers no way to do; the second argument says
            whether gradients are to be averaged over replicas.
    """

    name: str
    spelled: str
    shards: Callable[[nn.Module], bool]
    sharding_groups: Callable[[nn.Module], list[dist.ProcessGroup]]
    find_units: Callable[[nn.Module], list[Unit]]
    check_policy: Callable[[Policy, bool], None]
    left_to_fsdp: Callable[[nn.Module], Mapping[str, str]] = lambda model: {}

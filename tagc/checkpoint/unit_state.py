"""The tensors that a unit stores for its parameters between steps, by their names in a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from tagc.checkpoint.locations import ParamLocation, locations, slice_locations
from tagc.codecs.feedback import OWNER_RESIDUAL, OWNER_STATES
from tagc.collect import UnitReducer


@dataclass(frozen=True, kw_only=True)
class UnitState:
    """A unit in one direction of gradients.

    Attributes:
        direction: ``gradients`` or ``replicas``.
        shard, shards: index of this rank's shard of the unit's parameters, and number of shards.
        replica: index of the replica that this rank is in, from 0; 0 without replicas.
        shared: tensors ``[S]`` that all replicas hold alike, by kind; see
            :attr:`tagc.site.anchor.Anchor.shared`.
        owners: whether residuals of owners of slices are part of it.
    """

    direction: str
    reducer: UnitReducer
    shard: int
    shards: int
    replica: int = 0
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    owners: bool = True

    @property
    def name(self) -> str:
        """The unit's name in a state."""
        return f"unit.{self.direction}.{self.reducer.plan.info.name or '(root)'}"

    def residuals(self) -> Iterator[tuple[str, ParamLocation, Tensor]]:
        """For every parameter, the name in a state, the place, and the residual of its segment.

        With a lead, also what was ``sent`` last, which the owner of a shard keeps. With two shots
        across replicas, also the residual of the sum, which the owner of a slice keeps.
        """
        for kind, place, tensor in self._stored():
            yield f"{kind}.{self.direction}.{place.param.name}{place.suffix}", place, tensor

    def _stored(self) -> Iterator[tuple[str, ParamLocation, Tensor]]:
        """:meth:`residuals`, with the kind of tensor in place of its name."""
        plan, residuals = self.reducer.plan, self.reducer.residuals
        for kind, values in self.shared.items():
            rows = {s.start: values[None, s.start : s.stop] for s in plan.segments}
            for place, tensor in locations(plan, rows, self.shards, self.shard):
                yield kind, place, tensor
        owned = self._by_kind()
        if plan.shots is not None:
            for place, tensor in slice_locations(plan, residuals, self.shards, self.shard):
                yield "residual", place, tensor
            owned |= {OWNER_RESIDUAL: self.reducer.owner_residuals} if self.owners else {}
            for kind, stored in owned.items():
                for place, tensor in slice_locations(
                    plan, stored, self.shards, self.shard, self.replica
                ):
                    yield kind, place, tensor
            return
        stored_by_kind = [("residual", *rows) for rows in self._by_shards(residuals)]
        stored_by_kind += [(kind, stored, self.shard) for kind, stored in owned.items()]
        for kind, stored, shard in stored_by_kind:
            for place, tensor in locations(plan, stored, self.shards, shard):
                yield kind, place, tensor

    def _by_kind(self) -> dict[str, dict[int, Tensor]]:
        """The tensors that owners keep, by kind as named in checkpoints."""
        found: dict[str, dict[int, Tensor]] = {kind: {} for kind in OWNER_STATES}
        for i, state in self.reducer.owner_states.items():
            kind = self.reducer.rules[i].owner_state
            assert kind is not None
            found[kind][i] = state
        return found

    def _by_shards(
        self, residuals: dict[int, Tensor]
    ) -> Iterator[tuple[dict[int, Tensor], int | None]]:
        """The residuals, and the only shard that they belong to; None for all shards."""
        plan = self.reducer.plan
        if plan.for_all:  # across replicas, a rank has a residual only for its own shard
            yield residuals, self.shard
        elif plan.info.ranks_per_host == 1:
            yield residuals, None
        else:  # one for each host: for the shard of the rank at this rank's position there
            R = plan.info.ranks_per_host
            for host in range(plan.messages.made):
                rows = {i: rows[host : host + 1] for i, rows in residuals.items()}
                yield rows, host * R + self.shard % R

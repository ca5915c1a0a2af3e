"""The compressor's state: copies it from the units of this rank, and loads it into them.

A state exists between two steps. It has every parameter's residual under the parameter's name, in
the parameter's shape. For each unit it has everything else that the next step depends on:
thresholds and how they are steered, seeds, supports, counters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.basics.warn import warn
from tagc.checkpoint.by_parameter import UnitState
from tagc.checkpoint.format import BY_HANDLE, Copies, Source, StateError, StateHeader
from tagc.checkpoint.resharding import Merge, merged, plan_merge
from tagc.codecs.state import nested, part_of
from tagc.collect import UnitGatherer, agree_on, gather_by_rank
from tagc.collect.gauge import NoiseGauge
from tagc.collect.reducer_state import ReducerState
from tagc.collect.waiting import Waiting
from tagc.plan import Plan

# The name of the clock in a state.
_CLOCK = "sites"
_Tensors = dict[str, Tensor]


class Kept(Protocol):
    """What has state besides the state by parameter."""

    def state(self) -> dict[str, Tensor]: ...

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never returns."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class State:
    plan: Plan
    groups: Sequence[dist.ProcessGroup]  # that share the model, including tensor-parallel ones
    reduced: Sequence[UnitState]  # the units in each direction of gradients
    gathered: Sequence[UnitGatherer]  # empty if FSDP gathers parameters
    waiting: Sequence[Waiting] = ()  # gradients of micro-batches, which a state cannot contain
    clock: Kept | None = None  # of sites: counts optimizer steps, knows what is in flight

    @property
    def step(self) -> int:
        """Number of reductions so far: the largest of any unit."""
        return max((r.reducer.counters.all_steps for r in self.reduced), default=0)

    def header(self) -> StateHeader:
        return StateHeader(
            policy=self.plan.policy.name,
            policy_hash=self.plan.policy.hash,
            layout=self.plan.fingerprint,
            world_size=dist.get_world_size(),
            rank=dist.get_rank(),
            step=self.step,
            parts=self._parts,
        )

    @property
    def _parts(self) -> str:
        params = (param for unit in self.plan.units for param in unit.info.params)
        parts = {(param.name, param.box, param.duplicate) for param in params}
        if all(box is duplicate is None for _, box, duplicate in parts):
            return ""
        return hashlib.sha256(repr(sorted(parts)).encode()).hexdigest()[:16]

    def take(self) -> Copies:
        """Copies of all tensors of the state, by name, on the host. Waits for the device. Raises
        RuntimeError in the middle of a step, when gradients of micro-batches wait."""
        _synchronize()
        for waiting in self.waiting:
            waiting.check_between_steps()
        copies = Copies({}, {})
        for reduced in self.reduced:
            for name, place, residual in reduced.residuals():
                copies.add(name, place.take(residual))
        for name, tensor in self._units().items():
            copies.add(name, tensor.clone())
        _synchronize()
        return copies

    def load(self, open_source: Callable[[], Source], *, force: bool) -> None:
        """Load a state, on all ranks or on none.

        Raises:
            StateError: if there is none, it is not valid, or, unless forced, if it is of another
                policy or part of it would be dropped. Nothing has changed then.
            RuntimeError: if that happened on another rank, or the ranks have different states.
        """
        here = self.header()
        own = {name: place for reduced in self.reduced for name, place, _ in reduced.residuals()}
        everyone = gather_by_rank(self.groups, {here.rank: (here, own)})
        headers = {rank: header for rank, (header, _) in everyone.items()}
        holdings = {rank: held for rank, (_, held) in everyone.items()}
        doing, remedy = "loading tagc's state", "All ranks must load what was saved together"

        def read() -> tuple[tuple[Source, Callable[[], None], Merge | None], str]:
            source = open_source()
            saved = source.first
            # A plan says everything about a step but when sites exchange. So a policy's file that
            # repeats the choices of codec auto continues a run of that.
            same = saved.policy_hash == here.policy_hash or (
                saved.layout == here.layout and self.clock is None
            )
            if not same and not force:
                raise StateError(
                    f"{source.where}: saved with policy {saved.policy!r} "
                    f"({saved.policy_hash[:12]}), but the model has policy {here.policy!r} "
                    f"({here.policy_hash[:12]}). Give it the policy of the checkpoint, or "
                    f"load(..., force=True), which keeps the residuals of all parameters that "
                    "still have one, and warns about the others"
                )
            needed = [here.rank] if source.alone else headers
            if same and all(
                rank in source.ranks and source.ranks[rank].header.is_laid_out_as(headers[rank])
                for rank in needed
            ):
                return (source, self._exactly(source, here.rank), None), source.identity
            if source.alone and (saved.rank, saved.world_size) != (here.rank, here.world_size):
                raise StateError(
                    f"{source.where}: saved by rank {saved.rank} of {saved.world_size}, but this "
                    f"is rank {here.rank} of {here.world_size}, and residuals of other ranks are "
                    f"needed: {BY_HANDLE}"
                )
            held = {here.rank: holdings[here.rank]} if source.alone else holdings
            merge = plan_merge(source, held, here.rank)
            if merge.dropped and not force:
                raise StateError(
                    f"{source.where}: {_listed(merge.dropped)} would be dropped: the model "
                    "has no residual for them, or one of another shape; load(..., force=True) "
                    f"loads the rest{self._about_auto(saved)}"
                )
            if source.alone:
                merge.check(source.where, {here.rank: merge.taken})
            answer = source, self._merging(source, merge, saved.step), merge
            return answer, f"{source.identity}, for another layout"

        answers = agree_on(self.groups, {"state": read}, doing=doing, remedy=remedy)
        source, apply, merge = answers["state"]
        if merge is not None and not source.alone:
            # The sum over ranks is conserved: every saved element is taken over once (all ranks
            # compare the same numbers here), and the rounding was checked above.
            everyones = gather_by_rank(self.groups, {dist.get_rank(): merge.taken})
            merge.check(source.where, everyones)
        apply()
        for waiting in self.waiting:
            waiting.drop()
        if merge is not None and merge.dropped:
            warn(
                f"{source.where}: dropped {_listed(merge.dropped)}: the model has no "
                "residual for them, or one of another shape"
            )

    def _about_auto(self, saved: StateHeader) -> str:
        """What may be the matter if codec auto chose differently in the run that saved a state."""
        if not self.plan.frozen or saved.world_size != dist.get_world_size():
            return ""
        return (
            ". Codec auto measures at every start, and chose differently in the run that saved "
            "this: wrap with the policy of its choice, which plan().freeze(file) writes there"
        )

    def _units(self, saved: Mapping[str, object] | None = None) -> dict[str, Tensor]:
        """State tensors of the units. They include measured noise where ``saved`` has it; without
        ``saved``, where noise is measured."""
        state: dict[str, Tensor] = {}
        for name, unit in self._parts_of_state():
            if isinstance(unit, ReducerState):
                noise = None if saved is None else NoiseGauge.in_state(part_of(name, saved))
                state |= nested(name, unit.state(noise=noise))
            else:
                state |= nested(name, unit.state())
        return state

    def _exactly(self, source: Source, rank: int) -> Callable[[], None]:
        """Read and check this rank's own state. The returned function loads it and cannot fail."""
        state = source.ranks[rank]
        targets = [item for reduced in self.reduced for item in reduced.residuals()]
        expected = {name: (tensor.dtype, place.shape) for name, place, tensor in targets}
        # A run may start to measure noise, or load measured noise before it asks for any.
        units = self._units(state.shapes)
        expected |= {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in units.items()}
        for name in [*expected, *state.shapes]:
            if expected.get(name) != state.shapes.get(name):
                raise StateError(
                    f"{source.where}: rank {rank} has {name} as "
                    f"{_described(state.shapes.get(name))}, not as {_described(expected.get(name))}"
                )
        tensors = state.tensors
        for name, tensor in tensors.items():
            if name in units and name.endswith(".copy"):
                continue  # what parameters hold, such as the infinities of a frozen mask
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise StateError(f"{source.where}: {name} of rank {rank} is not finite")
        for name, unit in self._parts_of_state():
            _checked(unit, source, name, tensors)

        def apply() -> None:
            _synchronize()
            for name, unit in self._parts_of_state():
                unit.load_state(part_of(name, tensors))
            for reduced in self.reduced:
                reduced.put(tensors)

        return apply

    def _merging(self, source: Source, merge: Merge, step: int) -> Callable[[], None]:
        """Add up the residuals that this rank takes over. The returned function loads them, and
        restarts steering and counters."""
        values = {
            name: merged(source, merge.parts.get(name, []), place, residual.dtype)
            for reduced in self.reduced
            for name, place, residual in reduced.residuals()
        }
        clock: _Tensors = {}
        if self.clock is not None:  # the same on all saved ranks
            first = next(iter(source.ranks.values())).tensors
            clock = _checked(self.clock, source, _CLOCK, first)

        def apply() -> None:
            _synchronize()
            if self.clock is not None:
                self.clock.load_state(clock)
            for reduced in self.reduced:
                reduced.reducer.state()  # waits for messages in flight
                reduced.reducer.reset(step)
                reduced.put(values)
            for gatherer in self.gathered:
                # Gathers have no residuals: parameters are exact on the ranks that own them.
                gatherer.refresh()

        return apply

    def _parts_of_state(self) -> Iterator[tuple[str, Kept]]:
        """All that has state besides the state by parameter, by name in a state."""
        if self.clock is not None:
            yield _CLOCK, self.clock
        yield from ((reduced.name, reduced.reducer) for reduced in self.reduced)
        for gatherer in self.gathered:
            yield f"unit.parameters.{gatherer.plan.info.label}", gatherer


def _checked(unit: Kept, source: Source, name: str, tensors: Mapping[str, Tensor]) -> _Tensors:
    state = part_of(name, tensors)
    try:
        unit.check_state(state)
    except ValueError as error:
        raise StateError(f"{source.where}: {name}: {error}") from None
    return state


def _listed(names: Sequence[str]) -> str:
    return "the saved " + ", ".join(name.replace(".", " of ", 2) for name in names)


def _described(what: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "nothing" if what is None else f"{str(what[0]).removeprefix('torch.')} {list(what[1])}"


def _synchronize() -> None:
    # FSDP reduces in its own streams.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()

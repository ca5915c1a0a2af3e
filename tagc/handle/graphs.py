"""CUDA graphs: what happens outside of them, between replays.

A graph repeats what it captured. So all that a step decides or counts is done here, before the
capture and before every replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tagc.attach import Unit
from tagc.collect import UnitGatherer, UnitReducer
from tagc.groups.mesh import live_groups
from tagc.policy.rules import DimensionRule


class Graphs:
    """The graph that holds a model's forward and backward, if there is one."""

    def __init__(
        self,
        units: Sequence[Unit],
        reducers: Sequence[UnitReducer],
        gatherers: Sequence[UnitGatherer],
        dimensions: Mapping[str, DimensionRule],
    ) -> None:
        """``dimensions`` are the policy's rules for groups of a mesh."""
        self._units, self._reducers, self._dimensions = units, reducers, dimensions
        self._gathering = list(zip(units, gatherers, strict=bool(gatherers)))
        self._parts = [*gatherers, *reducers]

    @property
    def steps_left(self) -> int:
        """Steps that must run before a capture."""
        return max((part.steps_before_capture for part in self._parts), default=0)

    @property
    def captured(self) -> bool:
        """Whether a graph holds the model's reductions."""
        return any(reducer.captured for reducer in self._reducers)

    def before_capture(self) -> None:
        """See :meth:`tagc.Compressor.before_capture`."""
        if not all(unit.captures for unit in self._units):
            raise ValueError(
                "CUDA graphs can hold the collectives of tagc for FSDP2 only (fully_shard or "
                "replicate): train without a graph"
            )
        for dimension, rule in self._dimensions.items():
            if rule.codec.kind == "exact":
                raise ValueError(
                    f"with codec 'exact' the ranks of dimension {dimension!r} agree on the size of "
                    "every message, which a CUDA graph cannot hold: train without a graph, or "
                    "choose another codec"
                )
        if self.steps_left:
            raise RuntimeError(
                f"tagc: {self.steps_left} more steps must run without a CUDA graph before one can "
                "be captured (tagc.compressor(model).steps_before_capture)"
            )
        self._end_rounds()
        for unit, gatherer in self._gathering:
            if gatherer.sends_ahead:
                unit.send_ahead(gatherer)
            if not gatherer.has_read:
                unit.send_ahead(gatherer)  # reads the copy, as the graph will
        for part in self._parts:
            part.before_capture()
        for group in live_groups():
            group.captured_bytes = (0, 0)

    def before_replay(self) -> None:
        """See :meth:`tagc.Compressor.before_replay`."""
        if self._reducers and not self.captured:
            raise RuntimeError(
                "tagc: no CUDA graph was captured since tagc.wrap, or since the last call of "
                "tagc.compressor(model).before_capture()"
            )
        for reducer in self._reducers:
            reducer.check_replay()
        self._end_rounds()
        for unit, gatherer in self._gathering:
            if gatherer.sends_ahead:
                unit.send_ahead(gatherer)
        for part in self._parts:
            part.before_replay()
        for group in live_groups():
            wire, dense = group.captured_bytes
            group.wire_bytes += wire
            group.dense_bytes += dense

    def _end_rounds(self) -> None:
        """End a round of flags, which the parts then check."""
        for workspace in {part.store.workspace for part in self._parts}:
            workspace.before_graph()

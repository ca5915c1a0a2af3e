"""The plan of a model: how every parameter is sent, what a rank sends in a step, and the
fingerprint that ranks compare."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tagc.codecs import CodecPlan
from tagc.codecs.exact import ExactChanges
from tagc.plan.programs import Memory, bytes_in_step, memory_of
from tagc.plan.sites import anchor_bytes, exchange_buffers
from tagc.plan.table import Row, as_text, format_bytes, merged
from tagc.plan.unit_plan import Segment, UnitPlan
from tagc.plan.units import UnitParam
from tagc.policy import ParameterRule, ParamInfo, Policy, Rule, first_match, nearest_miss
from tagc.policy.rules import Miss, Near


@dataclass(frozen=True)
class Plan:
    """What ``tagc.wrap`` does to every parameter.

    ``str(plan)`` is a table. Parameters whose names differ only in numbers, such as those of equal
    blocks, share a line; ``full`` has a line for each.

    Attributes:
        units: gradients in the reduce-scatter.
        parameters: parameters in the all-gather; empty if the policy has no rules for them.
        replicas: gradients in the all-reduce across replicas; empty without replicas.
        native: the all-gathers that FSDP does itself, because the policy has no rules for
            parameters.
        micro_batches: backwards in an optimizer step.
        notes: text for users, such as the choices of ``codec: auto`` and their reasons.
        warnings: reasons not to use this plan.
        gloo: whether the backend is gloo.
        frozen: the text of a policy's file that repeats the choices of ``codec: auto``; empty
            without them.
        learning_rate: the one that bytes of codec ``exact`` are expected at; None if not given.
    """

    policy: Policy
    units: tuple[UnitPlan, ...]
    parameters: tuple[UnitPlan, ...] = ()
    replicas: tuple[UnitPlan, ...] = ()
    native: tuple[UnitPlan, ...] = ()
    micro_batches: int = 1
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    gloo: bool = False
    frozen: str = ""
    learning_rate: float | None = None

    def at_learning_rate(self, rate: float) -> Plan:
        """The plan with the bytes that codec ``exact`` is expected to send at a learning rate of
        AdamW. Nothing else depends on it.

        Raises:
            ValueError: if codec ``exact`` sends no changes, or the rate is not above zero.
        """
        if not self.exact:
            raise ValueError(
                f"the plan of policy {self.policy.name!r} does not depend on the learning rate: "
                "no parameter is sent as changes by codec 'exact'"
            )
        if not rate > 0:
            raise ValueError(f"a learning rate must be above zero, not {rate}")

        def at_rate(segment: Segment) -> CodecPlan:
            codec = segment.codec
            return codec.at_rate(rate) if isinstance(codec, ExactChanges) else codec

        parameters = tuple(unit.with_codecs(at_rate) for unit in self.parameters)
        return replace(self, parameters=parameters, learning_rate=rate)

    def freeze(self, file: str | os.PathLike[str]) -> None:
        """Write a policy's file that repeats the choices of ``codec: auto``, so that another start
        does not measure and choose anew. Call it on one rank.

        Raises:
            ValueError: if the policy chose nothing.
        """
        if not self.frozen:
            raise ValueError(
                f"policy {self.policy.name!r} has nothing to freeze: it has no codec auto, and is "
                "the same at every start"
            )
        Path(file).write_text(self.frozen, encoding="utf-8")

    @property
    def memory(self) -> Memory:
        """Memory that a rank needs in addition to FSDP's own."""
        memory = memory_of(self.all_units, gloo=self.gloo)
        if self.policy.sites is None:
            return memory
        return replace(
            memory,
            stored=memory.stored + anchor_bytes(self.units, self.policy.sites),
            buffers=exchange_buffers(self.units, self.policy.sites, gloo=self.gloo),
        )

    @property
    def all_units(self) -> tuple[UnitPlan, ...]:
        """The units of all directions, without :attr:`native`."""
        return self.units + self.parameters + self.replicas

    @cached_property
    def sent(self) -> dict[str, Sent]:
        """Bytes that a rank sends in a step, and that it would send uncompressed, by direction.
        Those of parameters include what FSDP sends itself."""
        gradients = "gradients" if self.policy.sites is None else "changes of parameters"
        units = {
            gradients: self.units,
            "parameters": self.parameters or self.native,
            "replicas": self.replicas,
        }
        return {
            name: sent_in_step(some, self.micro_batches) for name, some in units.items() if some
        }

    @property
    def exact(self) -> tuple[ExactChanges, ...]:
        """The segments whose changes codec ``exact`` sends."""
        codecs = (segment.codec for unit in self.parameters for segment in unit.segments)
        return tuple(codec for codec in codecs if isinstance(codec, ExactChanges))

    @property
    def about_exact(self) -> Iterator[str]:
        """A note on what codec ``exact`` is expected to send, and can send at most."""
        most = tuple(unit.with_codecs(lambda s: s.codec.largest) for unit in self.parameters)
        if most == self.parameters:
            return
        expected, at_most = (
            format_bytes(sent_in_step(units, self.micro_batches)[0])
            for units in (self.parameters, most)
        )
        how = ""
        if exact := self.exact:
            numel = sum(codec.layout.numel for codec in exact)
            bits = 32 * sum(codec.words for codec in exact) / max(1, numel)
            how = f", with {bits:.2g} bits for an exact change"
        if self.learning_rate is not None:
            how += f" at a learning rate of {self.learning_rate:g}"
        yield f"parameters: expected {expected} per step{how}; at most {at_most}"

    @property
    def headline(self) -> str:
        """What a rank sends in a step, and how much less that is, in one line."""
        per = "step" if self.micro_batches == 1 else f"step of {self.micro_batches} micro-batches"
        per = per if self.policy.sites is None else "exchange"
        parts = [f"{name} {times_less(one)}" for name, one in self.sent.items()]
        if not self.parameters:
            parts = [f"{p} (FSDP sends them)" if p.startswith("param") else p for p in parts]
        wire, dense = total(self.sent)
        if len(parts) > 1:
            parts.append(f"together {times_less((wire, dense))}")
        return (
            f"a rank sends {format_bytes(wire)} per {per} instead of {format_bytes(dense)}: "
            f"{', '.join(parts)} less"
        )

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return tuple(
            row for unit in self.all_units for row in _rows(unit, self.policy, self.micro_batches)
        )

    @property
    def warmup_steps(self) -> int:
        """How many reductions are dense at first: the maximum over units."""
        return max((unit.warmup_steps for unit in self.all_units), default=0)

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the units' fields: all that determines arithmetic and shapes. Ranks
        must have the same to exchange messages, and a checkpoint resumes exactly with the same.

        Fields declared with ``repr=False`` may differ between ranks, and are not in it.
        """
        return hashlib.sha256(repr(self.all_units).encode()).hexdigest()

    def __str__(self) -> str:
        return self._as_text(merged(self.rows))

    @property
    def full(self) -> str:
        """The table with a line for each parameter."""
        return self._as_text(self.rows)

    def _as_text(self, rows: Sequence[Row]) -> str:
        units = (*self.all_units, *self.native)
        steps = about_steps(units, self.micro_batches) if self.policy.sites is None else ()
        notes = (
            self.memory.note,
            *self.about_exact,
            *steps,
            *self.notes,
            *(f"warning: {warning}" for warning in self.warnings),
        )
        per = "step" if self.policy.sites is None else "exchange"
        after = f", after {self.warmup_steps} uncompressed {per}s" if self.warmup_steps else ""
        return as_text(f"policy {self.policy.name}: {self.headline}{after}", rows, notes)


def _rows(unit: UnitPlan, policy: Policy, micro_batches: int) -> Iterator[Row]:
    sent = bytes_in_step(unit, micro_batches)
    for segment, wire_bytes in zip(unit.segments, sent, strict=True):
        total = sum(unit.dense_columns([param]) for param in segment.params) or 1
        for param, own, wire_share in unit.shares(segment):
            info = policy.describe(param.name, param.shape, unit.info.dtype_name)
            why = "" if segment.compressed else _why_dense(unit, segment, param, policy, info)
            yield Row(
                direction=unit.direction,
                unit=unit.info.label,
                param=param.name,
                shape=param.shape,
                role=info.role,
                codec=segment.codec.name,
                density=segment.codec.density,
                dense_bytes=unit.dense_bytes(own, micro_batches),
                wire_bytes=wire_bytes * wire_share,
                stored_bytes=unit.stored_bytes(segment) * own / total,
                why_dense=why,
            )


def _why_dense(
    unit: UnitPlan, segment: Segment, param: UnitParam, policy: Policy, info: ParamInfo
) -> str:
    rules = getattr(policy, unit.direction)
    if unit.info.native:
        return unit.info.native
    if segment.rule is None or not rules:
        return why_missed(param, rules, info).why
    if not rules[segment.rule].codec.compresses:
        return f"rule {unit.direction}[{segment.rule}]"
    if not segment.columns:
        return "no elements"
    return "chosen by codec auto"


def why_missed(param: UnitParam, rules: Sequence[Rule | ParameterRule], info: ParamInfo) -> Miss:
    """Why none of these rules compresses a parameter."""
    if param.special is not None and first_match(rules, info) is not None:
        return Miss(Near.NOTHING, f"frozen, with {param.special.value}")
    return nearest_miss(rules, info)


Sent = tuple[float, float]
"""Bytes that a rank sends, and that it would send uncompressed."""


def sent_in_step(units: Sequence[UnitPlan], micro_batches: int) -> Sent:
    wire = dense = 0.0
    for unit in units:
        wire += sum(bytes_in_step(unit, micro_batches))
        columns = sum(unit.dense_columns(segment.params) for segment in unit.segments)
        dense += unit.dense_bytes(columns, micro_batches)
    return wire, dense


def total(sent: Mapping[str, Sent]) -> Sent:
    wires, denses = zip(*sent.values(), strict=True) if sent else ((), ())
    return sum(wires), sum(denses)


def times_less(sent: Sent) -> str:
    """The ratio as text: ``7.87×``."""
    wire, dense = sent
    ratio = dense / wire if wire else 1.0
    return f"{ratio:,.0f}×" if ratio >= 100 else f"{ratio:.3g}×"


def about_steps(units: Sequence[UnitPlan], micro_batches: int) -> Iterator[str]:
    """A note on what a step is, and what micro-batches send, for the units of all directions, those
    that FSDP sends itself included."""
    more = [b - a for a, b in zip(sent_in_step(units, 1), sent_in_step(units, 2), strict=True)]
    step = "one backward" if micro_batches == 1 else f"{micro_batches} backwards"
    if any(unit.info.replicated for unit in units):
        yield f"a step is {step}; with no_sync() only the last micro-batch sends"
    elif any(sent_in_step(units, 1)):
        once = any(unit.all_reduced or unit.info.ranks_per_host > 1 for unit in units)
        how = ", with set_requires_all_reduce(False)" if once else ""
        yield (
            f"a step is {step}; each micro-batch after the first sends {format_bytes(more[0])} "
            f"(uncompressed {format_bytes(more[1])}){how}"
        )

"""The state that a unit's reduction keeps between steps, and its counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from tagc.codecs import CodecSetup, Coder, SelectionCount
from tagc.codecs.feedback import MeasuredShare, SegmentFeedback
from tagc.codecs.workspace import Workspace
from tagc.collect.counters import Counters, Parts, check_parts, load_parts, state_of
from tagc.collect.gauge import NoiseGauge
from tagc.collect.host_sum import HostSum
from tagc.collect.lockstep import Lockstep
from tagc.collect.stage import Messages, Native, ReduceMessages, StageSetup, Sum
from tagc.collect.transport import Transport
from tagc.collect.two_shots import TwoShots
from tagc.collect.waiting import Waiting
from tagc.ops import Ops
from tagc.plan import UnitPlan


class ReducerState:
    """A unit's stages and their state.

    Attributes:
        plan: the unit's plan.
        inside: the stage in which ranks of a host add up; None if every rank sends for itself.
        messages: the stage that sends messages.
        counters: counts of reductions and bytes.
        waiting: the sum of micro-batches that wait inside a host, or in a replica.
        gauge: measures the RMS of gradients relative to dense; None unless asked for.
        announces: whether ranks exchange headers first, see :class:`Lockstep`. False if the caller
            has compared more than those say.
        before: called before every reduction with the number of those before it; may raise.
    """

    def __init__(
        self,
        plan: UnitPlan,
        ops: Ops,
        device: torch.device,
        workspace: Workspace,
        *,
        seed: int,
        rank: int,
        inside: Transport | None,
    ) -> None:
        self.plan = plan
        self._transport_inside = inside
        self._lockstep = Lockstep(plan.direction, plan.info.label, device)
        self._codec_setup = CodecSetup(
            destinations=plan.messages.made,
            world_size=plan.messages.read,
            dtype=plan.info.dtype,
            ops=ops,
            device=device,
            workspace=workspace,
            seed=seed,
            rank=rank,
            stage=1 if plan.direction == "replicas" else 0,
        )
        self.gauge: NoiseGauge | None = None
        self.announces = True
        self.before: Callable[[int], None] | None = None
        # Inside hosts in float32, whatever FSDP reduces: there may be many micro-batches to sum.
        self.waiting = Waiting(plan, torch.float32 if plan.direction == "gradients" else None)
        self.reset()

    def reset(self, earlier_steps: int = 0) -> None:
        """Start over with empty residuals.

        Args:
            earlier_steps: see :class:`Counters`.
        """
        plan = self.plan
        self._lockstep.forget()
        on_hosts = plan.info.ranks_per_host > 1
        self.counters = Counters(earlier_steps=earlier_steps, on_hosts=on_hosts)
        setup = StageSetup(
            unit=plan, codec=self._codec_setup, lockstep=self._lockstep, counters=self.counters
        )
        self._sum, self._native = Sum(setup), Native(setup)
        self.messages: Messages = (
            ReduceMessages(plan.messages, setup) if plan.shots is None else TwoShots(setup)
        )
        self.inside = HostSum(setup, self._transport_inside) if on_hosts else None
        compressed_before = max(0, earlier_steps - plan.warmup_steps)
        self.messages.skip(compressed_before)
        if self.inside is not None:
            self.inside.skip(compressed_before)
        if self.gauge is not None:
            self.measure_noise()

    def free_buffers(self) -> None:
        """Free the scratch buffers, which other units use, too, unless each has its own."""
        self._codec_setup.workspace.clear()

    def measure_noise(self) -> None:
        """Measure the RMS of gradients relative to dense from now on, if anything is compressed."""
        self.gauge = (
            NoiseGauge(self.plan, self._codec_setup.device) if self.plan.compressed else None
        )

    @property
    def coder(self) -> Coder:
        """The coder of the messages that carry gradients."""
        return self.messages.coder

    @property
    def wire_bytes(self) -> int:
        """Bytes sent so far for all columns; if ranks of a host add up first, only those to other
        hosts."""
        return self.counters.sent_bytes

    @property
    def compressed_wire_bytes(self) -> int:
        """Bytes sent so far for the columns that the policy compresses, including the warm-up."""
        columns = sum(self.plan.dense_columns(s.params) for s in self.plan.compressed)
        if not columns:
            return 0
        messages = self.plan.messages
        by_segment = [(s, messages.words_of(s)) for s in messages.segments]
        words = sum(n for segment, n in by_segment if segment.compressed)
        all_words = sum(n for _, n in by_segment)
        sent = self.counters
        return (
            int(sent.native_bytes * columns // self.plan.buffer_columns)
            + int(sent.message_bytes * words // all_words)
            + sent.other_bytes
        )

    @property
    def feedbacks(self) -> Mapping[int, SegmentFeedback]:
        """Every segment's feedback, by the segment's first column in the unit."""
        return self.messages.feedbacks

    @property
    def owner_feedbacks(self) -> Mapping[int, SegmentFeedback]:
        """The feedbacks of the sums that this rank sends out in the second of two shots; empty in
        one shot."""
        return self.messages.owner_feedbacks

    @property
    def _shares(self) -> dict[str, MeasuredShare]:
        """The measured shares, by the segment's first column in the unit."""
        return {str(i): f.share for i, f in self.feedbacks.items() if f.share is not None}

    @property
    def residuals(self) -> dict[int, Tensor]:
        """Residuals ``[D, columns]``, by the segment's first column in the unit, to read; in two
        shots ``[N, columns of a slice]``."""
        return _read(self.feedbacks)

    @property
    def owner_residuals(self) -> dict[int, Tensor]:
        """This rank's residuals as the owner of a slice, ``[1, columns of a slice]``, by the
        segment's first column in the unit."""
        return _read(self.owner_feedbacks)

    @property
    def owner_states(self) -> dict[int, Tensor]:
        """Owner states ``[1, columns]``, by the segment's first column in the unit, of the
        feedbacks that have one."""
        found = {i: f.owner_state for i, f in self.feedbacks.items()}
        return {i: state[None] for i, state in found.items() if state is not None}

    @contextmanager
    def open_residuals(self) -> Iterator[dict[int, Tensor]]:
        """:attr:`residuals`, to change in place."""
        with _opened(self.feedbacks) as residuals:
            yield residuals

    @contextmanager
    def open_owner_residuals(self) -> Iterator[dict[int, Tensor]]:
        """:attr:`owner_residuals`, to change in place."""
        with _opened(self.owner_feedbacks) as residuals:
            yield residuals

    def selection_counts(self) -> list[SelectionCount]:
        """Counts of the selected and kept groups so far, by segment. Waits for the device."""
        return self.coder.selection_counts()

    def note(self, call: str) -> None:
        self._lockstep.note(call)

    def rescale(self, factor: float | Tensor) -> None:
        """Multiply all state that is in units of the gradients by ``factor``, the same on every
        rank. Call it if gradients become ``factor`` times as large."""
        for share in self._shares.values():
            share.rescale(factor)
        with self.open_residuals() as residuals, self.open_owner_residuals() as owed:
            for stored in (*residuals.values(), *owed.values(), *self.owner_states.values()):
                stored.mul_(factor)
        for codec in self.coder.codecs.values():
            for controller in codec.controllers:
                controller.rescale(factor)

    def drop_owed(self) -> None:
        """Owe nothing any more; thresholds and counters stay."""
        with self.open_residuals() as residuals, self.open_owner_residuals() as owed:
            for stored in (*residuals.values(), *owed.values(), *self.owner_states.values()):
                stored.zero_()

    def release(self) -> None:
        """Free the operators' scratch buffers."""
        self._codec_setup.ops.release()

    def state(self, *, noise: bool | None = None) -> dict[str, Tensor]:
        """All state except the residuals and owner states; names and shapes never change. Waits for
        work in flight.

        Args:
            noise: whether to include measured noise; by default if it is measured.
        """
        return state_of(self._parts(self.gauge is not None if noise is None else noise))

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never returns."""
        check_parts(self._parts(NoiseGauge.in_state(state)), state)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a :meth:`state` that passes :meth:`check_state`. If it has measured noise,
        continue measuring; if not, and noise is measured here, start measuring afresh."""
        self._lockstep.forget()
        noise = NoiseGauge.in_state(state)
        if noise or self.gauge is not None:
            self.measure_noise()
        load_parts(self._parts(noise), state)

    def memory(self) -> Parts:
        """The parts that hold the codecs' state between steps, except residuals and owner states;
        no counters of bytes, and no measured noise."""
        if self.inside is not None:
            yield from self.inside.memory()
        yield from self.messages.memory()
        yield from ((f"share.{name}", share) for name, share in self._shares.items())

    def _parts(self, noise: bool) -> Parts:
        yield "", self.counters
        yield from self.memory()
        if noise and self.plan.compressed:
            yield "", self.gauge or NoiseGauge(self.plan, self._codec_setup.device)


def _read(feedbacks: Mapping[int, SegmentFeedback]) -> dict[int, Tensor]:
    return {i: f.residual.read() for i, f in feedbacks.items() if f.residual is not None}


@contextmanager
def _opened(feedbacks: Mapping[int, SegmentFeedback]) -> Iterator[dict[int, Tensor]]:
    with ExitStack() as stack:
        yield {
            i: stack.enter_context(f.residual.opened())
            for i, f in feedbacks.items()
            if f.residual is not None
        }

"""What a unit's reduction remembers from step to step, and its counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    """The stages of a unit that keep a state, and that state.

    Attributes:
        plan: segments of the unit.
        inside: the stage in which ranks of a host add up; None where every rank sends for itself.
        messages: the stage that sends messages.
        counters: of reductions and bytes.
        waiting: micro-batches that stay inside a host, or in a replica.
        gauge: measures how much larger gradients come out than densely; None where nobody asked.
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
        # Inside hosts in float32, whatever FSDP reduces: there may be many of them.
        self.waiting = Waiting(plan, torch.float32 if plan.direction == "gradients" else None)
        self.reset()

    def reset(self, earlier_steps: int = 0) -> None:
        """Start anew, with empty residuals, after so many reductions elsewhere."""
        plan = self.plan
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

    def measure_noise(self) -> None:
        """Measure from now on how much larger gradients come out than densely, where anything is
        compressed."""
        self.gauge = (
            NoiseGauge(self.plan, self._codec_setup.device) if self.plan.compressed else None
        )

    @property
    def coder(self) -> Coder:
        """Of the gradients' messages."""
        return self.messages.coder

    @property
    def wire_bytes(self) -> int:
        """Bytes sent so far, all columns; where ranks of a host add up first, those to other
        hosts."""
        return self.counters.sent_bytes

    @property
    def compressed_wire_bytes(self) -> int:
        """Bytes sent so far for the columns that the policy compresses, warm-up included."""
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
        """Of every segment, by its first column in the unit."""
        return self.messages.feedbacks

    @property
    def owner_feedbacks(self) -> Mapping[int, SegmentFeedback]:
        """The same for the sums that this rank sends out in the second of two shots; empty without
        one."""
        return self.messages.owner_feedbacks

    @property
    def _shares(self) -> dict[str, MeasuredShare]:
        """Where they are measured, by the first column of the segment in the unit."""
        return {str(i): f.share for i, f in self.feedbacks.items() if f.share is not None}

    @property
    def residuals(self) -> dict[int, Tensor]:
        """Residual ``[D, columns]`` by first column of the segment in the unit, to look at; in two
        shots ``[N, columns of a slice]``."""
        return _read(self.feedbacks)

    @property
    def owner_residuals(self) -> dict[int, Tensor]:
        """What this rank owes as the owner of a slice, ``[1, columns of a slice]``, likewise."""
        return _read(self.owner_feedbacks)

    @property
    def owner_states(self) -> dict[int, Tensor]:
        """What this rank keeps as the owner of its shard, ``[1, columns]``, likewise, where the
        feedback has such a state."""
        found = {i: f.owner_state for i, f in self.feedbacks.items()}
        return {i: state[None] for i, state in found.items() if state is not None}

    @contextmanager
    def open_residuals(self) -> Iterator[dict[int, Tensor]]:
        """:attr:`residuals` to be changed in place."""
        with _opened(self.feedbacks) as residuals:
            yield residuals

    @contextmanager
    def open_owner_residuals(self) -> Iterator[dict[int, Tensor]]:
        """:attr:`owner_residuals` to be changed in place."""
        with _opened(self.owner_feedbacks) as residuals:
            yield residuals

    def selection_counts(self) -> list[SelectionCount]:
        """What codecs that select did so far, by segment. Waits for the device."""
        return self.coder.selection_counts()

    def rescale(self, factor: float | Tensor) -> None:
        """Expect gradients that are ``factor`` times as large, the same on every rank."""
        for share in self._shares.values():
            share.rescale(factor)
        with self.open_residuals() as residuals, self.open_owner_residuals() as owed:
            for stored in (*residuals.values(), *owed.values(), *self.owner_states.values()):
                stored.mul_(factor)
        for codec in self.coder.codecs.values():
            for controller in codec.controllers:
                controller.rescale(factor)

    def release(self) -> None:
        """Let go of the scratch buffers of the operators."""
        self._codec_setup.ops.release()

    def state(self, *, noise: bool | None = None) -> dict[str, Tensor]:
        """What the next reduction and the counters depend on, beside the residuals; names and
        shapes never change. Waits for what is in flight.

        Args:
            noise: with measured noise, or without; by default if it is measured.
        """
        return state_of(self._parts(self.gauge is not None if noise is None else noise))

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never has."""
        check_parts(self._parts(NoiseGauge.in_state(state)), state)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where :meth:`state` was taken, given that it passes the check. If that has measured
        noise, measure on; if not, and noise is measured here, begin anew."""
        noise = NoiseGauge.in_state(state)
        if noise or self.gauge is not None:
            self.measure_noise()
        load_parts(self._parts(noise), state)

    def memory(self) -> Parts:
        """What codecs remember from step to step, beside residuals; not what was sent so far, nor
        the noise that was measured."""
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

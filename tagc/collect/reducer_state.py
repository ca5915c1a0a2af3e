"""The state that a unit's reductions keep between steps, and their counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tagc.codecs import kind_of
from tagc.codecs.feedback import OWNER_RESIDUAL, OWNER_STATES, FeedbackRule
from tagc.codecs.quantized import dither_seeds
from tagc.codecs.sketch import COUNTING, SelectionCount
from tagc.codecs.sketch.threshold import STATES, rescale
from tagc.codecs.state import check_counts, part_of
from tagc.codecs.workspace import Workspace
from tagc.collect.alarm import Alarm
from tagc.collect.gauge import NoiseGauge
from tagc.collect.lockstep import Lockstep
from tagc.collect.replay import Replay, Store
from tagc.collect.waiting import Waiting
from tagc.ops import Ops
from tagc.ops.program import Place, Program
from tagc.plan import UnitPlan
from tagc.plan.part import Part
from tagc.plan.reductions import Reductions, Variant

_RESIDUAL = "residual"
_BY_PARAMETER = (_RESIDUAL, OWNER_RESIDUAL, *OWNER_STATES)
# The codecs that count what they encode.
_COUNTING = ("quantized", "matrix")
# The order in checkpoints.
_COUNTERS = (
    "steps",
    "compressed_steps",
    "earlier_steps",
    "native_bytes",
    "message_bytes",
    "other_bytes",
)


@dataclass
class Counters:
    """Counts one unit's reductions and bytes.

    Attributes:
        steps: reductions so far.
        compressed_steps: reductions that sent messages.
        earlier_steps: reductions of an earlier run with another layout, which this run continues.
            They count for the warm-up, but not in the metrics.
        native_bytes, message_bytes, other_bytes: bytes sent so far in dense collectives, in
            messages, and in the codecs' other exchanges; if ranks of a host add up first, only
            those to other hosts.
        inside_bytes: bytes sent so far to ranks of the same host.
        on_hosts: whether ranks of a host add up first.
    """

    steps: int = 0
    compressed_steps: int = 0
    earlier_steps: int = 0
    native_bytes: int = 0
    message_bytes: int = 0
    other_bytes: int = 0
    inside_bytes: int = 0
    on_hosts: bool = False

    @property
    def all_steps(self) -> int:
        """Reductions, including those of the earlier run."""
        return self.earlier_steps + self.steps

    @property
    def sent_bytes(self) -> int:
        """All bytes except those inside hosts."""
        return self.native_bytes + self.message_bytes + self.other_bytes

    def add(self, sent: Mapping[tuple[str, str], int]) -> None:
        """Count the bytes of a program, by level and flight."""
        for (level, flight), size in sent.items():
            if level == "inside":
                self.inside_bytes += size
            elif flight == "sums":
                self.native_bytes += size
            elif flight in ("messages", "sums_of_slices"):
                self.message_bytes += size
            else:
                self.other_bytes += size

    def state(self) -> dict[str, Tensor]:
        counts = [getattr(self, name) for name in _COUNTERS]
        found = {"counters": torch.tensor(counts, dtype=torch.int64, device="cpu")}
        if self.on_hosts:
            inside = torch.tensor(self.inside_bytes, dtype=torch.int64, device="cpu")
            found["inside_bytes"] = inside
        return found

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        for name in ("counters", "inside_bytes") if self.on_hosts else ("counters",):
            check_counts(name, state[name])

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, value in zip(_COUNTERS, state["counters"].tolist(), strict=True):
            setattr(self, name, value)
        if self.on_hosts:
            self.inside_bytes = int(state["inside_bytes"])


@dataclass
class Progress:
    """What a unit's reductions have done so far, as the host counts it. It selects variants.

    Attributes:
        encodings, inside: encodings so far of the messages, and of those inside hosts.
        begun: whether sketches have thresholds.
    """

    encodings: int = 0
    inside: int = 0
    begun: bool = False


class ReducerState:
    """A unit's programs, their tensors, and what the host counts.

    Attributes:
        plan: the unit's plan.
        programs: the programs of the plan.
        store: their tensors.
        progress: what they have done so far.
        counters: counts of reductions and bytes.
        waiting: the sum of micro-batches that wait inside a host, or in a replica.
        gauge: measures the RMS of gradients relative to dense; None unless asked for.
        stamped: whether messages carry stamps; None before the first.
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
    ) -> None:
        self.plan, self._ops = plan, ops
        self._seed, self._rank = seed, rank
        self._lockstep = Lockstep(plan.direction, plan.info.label, device)
        self.store = Store(device, workspace)
        self.programs = Reductions(plan)
        self._mix_up = Alarm(self._lockstep.mix_up, self.store, self.programs.mistaken)
        self.gauge: NoiseGauge | None = None
        self.stamped: bool | None = None
        self.before: Callable[[int], None] | None = None
        # Inside hosts in float32, whatever FSDP reduces: there may be many micro-batches to sum.
        self.waiting = Waiting(plan, torch.float32 if plan.direction == "gradients" else None)
        if plan.compressed:
            programs = self.programs
            self.store.declare(*programs.state, programs.stamp)
            for program in programs.programs:
                self.store.declare(*program.places)
        self.reset()

    def reset(self, earlier_steps: int = 0) -> None:
        """Start over with empty residuals.

        Args:
            earlier_steps: see :class:`Counters`.
        """
        plan = self.plan
        self._lockstep.forget()
        self._stamped: int | None = None
        on_hosts = plan.info.ranks_per_host > 1
        self.counters = Counters(earlier_steps=earlier_steps, on_hosts=on_hosts)
        before = max(0, earlier_steps - plan.warmup_steps)
        self.progress = Progress(encodings=before, inside=before)
        self.store.wait(COUNTING)
        for place in self.programs.state:
            self.store[place].zero_()
        if plan.compressed:
            for _ in self._bind(self.programs.start(self._seed)).running({}):
                pass
        self._follow()
        if self.gauge is not None:
            self.measure_noise()

    def _bind(self, program: Program) -> Replay:
        raise NotImplementedError

    def variant(self, *, messages: bool, mean: bool, part: Part | None, always: bool) -> Variant:
        """The variant of the next reduction.

        Args:
            always: whether it measures what later ones may have to: those that replay it.
        """
        reached = None if part is None else part.names
        if not messages:
            return Variant(messages=False, mean=mean, reached=reached)
        return Variant(
            mean=mean,
            stamped=bool(self.stamped),
            begun=self.progress.begun or self.programs.sketches is None,
            noise=self.gauge is not None and (always or self._measures_noise(1)),
            reached=reached,
        )

    def _measures_noise(self, messages: int) -> bool:
        first = self.counters.compressed_steps + 1
        return any(map(NoiseGauge.measures, range(first, first + messages)))

    def prepare_messages(self, messages: int, *, noise: bool) -> None:
        """Do what the next message needs that depends on the host's counts. It happens before a
        program, and before every replay of a CUDA graph that holds programs for several messages,
        which then restart and measure alike.

        Args:
            noise: whether programs measure noise, unless its step is negative.
        """
        if self._periods:
            self.restart_feedback(messages)
        if noise:
            step = self.counters.compressed_steps + 1 if self._measures_noise(messages) else -1
            self.store[self.programs.noise_step].fill_(step)

    def restart_feedback(self, messages: int = 1) -> None:
        """Restart the feedback whose period ends before any of the next messages from zero."""
        done = self.progress.encodings
        for start, period in self._periods.items():
            if done and -done % period < messages:
                self.residuals[start].zero_()

    def advance(self, variant: Variant) -> None:
        """Count what a variant did."""
        if not variant.messages:
            return
        progress = self.progress
        if variant.levels != "across" and self.plan.inside is not None:
            progress.inside += 1
        if variant.levels != "inside":
            reached = variant.reached
            misses = reached is not None and self.programs.misses_sketches(Part(self.plan, reached))
            progress.encodings += 1
            progress.begun = progress.begun or not misses

    def mark_stamps(self, mark: int) -> None:
        """Set the first word of stamps."""
        if self._stamped != mark:
            self._usual = None
            self.store[self.programs.stamp][:1].fill_(mark)
            self._stamped = mark

    def measure_noise(self) -> None:
        """Measure the RMS of gradients relative to dense from now on, if anything is compressed."""
        self._usual = None
        if self.plan.compressed:
            self.store.declare(self.programs.noise, self.programs.noise_step)
            self.gauge = NoiseGauge(self.store[self.programs.noise])

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
    def rules(self) -> dict[int, FeedbackRule]:
        """The feedback rules, by the segment's first column in the unit."""
        return self.programs.rules

    @property
    def residuals(self) -> dict[int, Tensor]:
        """Residuals ``[D, columns]``, by the segment's first column in the unit; in two shots
        ``[N, columns of a slice]``."""
        return self._stored(_RESIDUAL)

    @property
    def owner_residuals(self) -> dict[int, Tensor]:
        """This rank's residuals as the owner of a slice, ``[1, columns of a slice]``, by the
        segment's first column in the unit."""
        return self._stored(OWNER_RESIDUAL)

    @property
    def owner_states(self) -> dict[int, Tensor]:
        """Owner states ``[1, columns]``, by the segment's first column in the unit, of the
        feedbacks that have one."""
        return self._stored(*OWNER_STATES)

    def selection_counts(self) -> list[SelectionCount]:
        """Counts of the selected and kept groups so far, by segment. Waits for the device."""
        sketches = self.programs.sketches
        return [] if sketches is None else sketches.selection_counts(self.store[sketches.totals])

    def note(self, call: str) -> None:
        self._usual = None
        self._lockstep.note(call)

    def rescale(self, factor: float | Tensor) -> None:
        """Multiply all state that is in units of the gradients by ``factor``, the same on every
        rank. Call it if gradients become ``factor`` times as large."""
        for stored in self._by_parameter():
            stored.mul_(factor)
        sketches = self.programs.sketches
        if sketches is not None:
            rescale(self.store[sketches.controller], factor)
            if sketches.supports:
                rescale(self.store[sketches.choice], factor)

    def drop_owed(self) -> None:
        """Owe nothing any more; thresholds and counters stay."""
        for stored in self._by_parameter():
            stored.zero_()

    def release(self) -> None:
        """Free the operators' scratch buffers."""
        self._ops.release()

    def step_tensors(self) -> list[Tensor]:
        """What a step changes: the state by parameter, then that of codecs."""
        return [*self._by_parameter(), *self._codec_state().values()]

    def restore_step(self, copy: Sequence[Tensor], where: bool | Tensor) -> None:
        """Go back to a copy of :meth:`step_tensors`.

        Args:
            where: whether; if it is a tensor ``[]``, the host does not wait for it. Then counts on
                the host stay, and what must match them.
        """
        by_parameter, state = self._by_parameter(), self._codec_state()
        before = dict(zip(state, copy[len(by_parameter) :], strict=True))
        pairs = list(zip(by_parameter, copy, strict=False))
        if isinstance(where, Tensor):
            flag = where.to(self.store.device, torch.bool)
            for now, then in pairs:
                now.copy_(torch.where(flag, then, now))
        elif where:
            for now, then in pairs:
                now.copy_(then)
            # Totals count every group that was sent, even in a skipped step.
            self._load_codecs({k: t for k, t in before.items() if not k.endswith(".totals")})

    def state(self, *, noise: bool | None = None) -> dict[str, Tensor]:
        """All state except the residuals and owner states; names and shapes never change. Waits for
        work in flight.

        Args:
            noise: whether to include measured noise; by default if it is measured.
        """
        found = self.counters.state() | self._codec_state()
        if (self.gauge is not None if noise is None else noise) and self.plan.compressed:
            found |= (self.gauge or self._unmeasured()).state()
        return found

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never returns."""
        self.counters.check_state(state)
        for name in self._steps:
            check_counts(name.rpartition(".")[2], state[name])
        if self.programs.sketches is not None:
            self.programs.sketches.check_state(part_of("sketch", state))
        if NoiseGauge.in_state(state):
            NoiseGauge.check_state(state)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a :meth:`state` that passes :meth:`check_state`. If it has measured noise,
        continue measuring; if not, and noise is measured here, start measuring afresh."""
        self._lockstep.forget()
        noise = NoiseGauge.in_state(state)
        if noise or self.gauge is not None:
            self.measure_noise()
        self.counters.load_state(state)
        self._load_codecs(state)
        if noise and self.gauge is not None:
            self.gauge.load_state(state)

    @cached_property
    def _periods(self) -> dict[int, int]:
        """After how many encodings feedback restarts, by the segment's first column."""
        rules = self.programs.rules.items()
        return {start: rule.restarts for start, rule in rules if rule.restarts is not None}

    @property
    def _steps(self) -> dict[str, str]:
        """The counts in a state, each with its name in :class:`Progress`."""
        found: dict[str, str] = {}
        plan, shots = self.plan, self.plan.shots
        for stage, messages, count in (
            ("inside.", plan.inside, "inside"),
            ("", self.programs.messages, "encodings"),
            ("second_shot.", shots and shots.gather, "encodings"),
        ):
            for kind in _COUNTING:
                segments = () if messages is None else messages.segments
                if any(kind_of(s.codec).name == kind for s in segments):
                    found[f"{stage}{kind}.steps"] = count
        return found

    def _codec_state(self) -> dict[str, Tensor]:
        self.store.wait(COUNTING)
        found: dict[str, Tensor] = {}
        for name, count in self._steps.items():
            steps = getattr(self.progress, count)
            found[name] = torch.tensor(steps, dtype=torch.int64, device="cpu")
        if self.programs.sketches is not None:
            begun = torch.tensor(self.progress.begun, dtype=torch.bool, device="cpu")
            found["sketch.started"] = begun
        for place in self.programs.state:
            if _kind(place) in _BY_PARAMETER:
                continue
            tensor = self.store[place]
            if place.name.endswith("controller"):
                found |= {f"{place.name}.{part}": tensor[row] for part, row in STATES.items()}
            else:
                found[place.name] = tensor
        return found

    def _load_codecs(self, state: Mapping[str, Tensor]) -> None:
        counts = {count: int(state[name]) for name, count in self._steps.items()}
        if self.programs.sketches is not None:
            counts["begun"] = bool(state["sketch.started"])
        for name, tensor in self._codec_state().items():
            if name in state and name not in self._steps and name != "sketch.started":
                tensor.copy_(state[name])
        self.progress = replace(self.progress, **counts)
        self._follow()

    def _follow(self) -> None:
        """Compute what follows from the state, and forget what did."""
        self._usual = None
        for stage, encoding in self.programs.encodings.items():
            if not encoding.dithered:
                continue
            starts, rows = [s.columns.start for s in encoding.dithered], encoding.messages.made
            encodings = self.progress.inside if stage == "inside" else self.progress.encodings
            seeds = dither_seeds(
                starts, rows, unit=self._seed, rank=self._rank, stage=stage,
                step=encodings - 1,  # they advance before they are used
            )  # fmt: skip
            self.store[encoding.seeds].copy_(seeds)

    def _stored(self, *kinds: str) -> dict[int, Tensor]:
        places = [p for p in self.programs.state if _kind(p) in kinds]
        return {int(p.name.rpartition(".")[2]): self.store[p] for p in places}

    def _by_parameter(self) -> list[Tensor]:
        found = (self.residuals, self.owner_residuals, self.owner_states)
        return [tensor for stored in found for tensor in stored.values()]

    def _unmeasured(self) -> NoiseGauge:
        place = self.programs.noise
        return NoiseGauge(torch.zeros(place.shape, dtype=place.dtype, device=self.store.device))


def _kind(place: Place) -> str:
    return place.name.partition(".")[0]

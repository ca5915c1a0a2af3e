"""The programs of a unit's reductions, from its plan.

A rank encodes ``[D, S]`` gradients to ``D`` messages, one for each destination, or one for all, and
decodes its row from the messages of ``W`` ranks. If ranks of a host add up first, ``[W, S]``
becomes ``[H, S]`` before; with DDP, ``[R, S]`` becomes ``[1, S]``, and the averages are handed on
to the host's ranks afterwards. In two shots (:mod:`tagc.plan.two_shots`) messages are about slices
of the shard, and the owners of slices send messages about their sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from tagc.codecs import Span
from tagc.codecs.feedback import OWNER_RESIDUAL, FeedbackRule
from tagc.codecs.quantized import SEED_STEP, QuantizedPlan, Stage
from tagc.codecs.sketch import COUNTING, Sketches, SketchPlan
from tagc.ops.dense import STAMP_WORDS, DenseLayout
from tagc.ops.launches import ByRank, Put, Sum, UndoLag, together
from tagc.ops.program import OWN, Launch, Level, Place, Program, Send, Step, Wait
from tagc.ops.sampling import CompareNoise, SampleGradient, noise_samples
from tagc.ops.torch_operators import (
    Advance,
    ByNeighbour,
    Copy,
    Divide,
    Expand,
    Pick,
    Pieces,
    Saturate,
)
from tagc.plan.param_slices import filled_columns, is_whole, param_slices
from tagc.plan.part import Part, preserving
from tagc.plan.two_shots import slicing_of
from tagc.plan.unit_plan import COLLECTIVES, MessagePlan, Segment, UnitPlan

Range = tuple[str, list[Step]]
Ranges = Iterator[Range]


class Variant(NamedTuple):
    """What the host decides in a step.

    Attributes:
        levels: both levels, the sum inside hosts alone, or what follows it alone.
        messages: whether messages are sent; otherwise gradients are summed uncompressed.
        mean: whether sums are divided by the number of ranks.
        stamped: whether messages carry stamps; see :mod:`tagc.collect.lockstep`.
        begun: whether sketches have thresholds.
        noise: whether noise is measured, unless its step is negative.
        reached: the parameters that the backward reached, if not all.
    """

    levels: Literal["both", "inside", "across"] = "both"
    messages: bool = True
    mean: bool = True
    stamped: bool = False
    begun: bool = True
    noise: bool = False
    reached: frozenset[str] | None = None


@dataclass(frozen=True)
class Encoding:
    """Messages that a rank encodes: whom they are for, and the name of their residuals, if any."""

    stage: Stage
    messages: MessagePlan
    residual: str | None

    @cached_property
    def dithered(self) -> list[Span[Segment]]:
        """The segments with a dither."""
        plans = ((span, span.segment.codec) for span in self.messages.spans)
        return [span for span, c in plans if isinstance(c, QuantizedPlan) and c.dithered]

    @property
    def seeds(self) -> Place:
        """The seeds of their dither, ``[segments, rows]``."""
        shape = (len(self.dithered), self.messages.made)
        return Place(f"seeds.{self.stage}", shape, torch.int32, "kept")


class Reductions:
    """The programs of one unit. The gradients ``inp`` ``[rows, columns]`` and the result ``out``
    come late.

    Attributes:
        messages: the messages that carry gradients.
        encodings: all messages, by stage.
        sketches: the steps of the sketched ones; None if there are none.
        total: the sum inside the host, ``[H, S]``.
        noise: the measured noise, see :class:`tagc.ops.sampling.CompareNoise`.
        stamp, mistaken: this rank's stamp, and whether a received one differs.
    """

    def __init__(self, unit: UnitPlan) -> None:
        self._unit, info = unit, unit.info
        self._what = f"{COLLECTIVES[unit.direction]} of unit {info.label!r}"
        self._hosts = info.ranks_per_host > 1
        self._level: Level = "across" if self._hosts else "flat"
        self.messages = messages = unit.messages
        # Segments of slices have other columns than in the unit.
        self._starts = {
            id(part): whole.start
            for found in (messages, *unit.flights.values())
            for part, whole in zip(found.segments, unit.segments, strict=True)
        }
        sketched = [s for s in messages.spans if isinstance(s.segment.codec, SketchPlan)]
        rows, ranks, for_all = messages.made, messages.read, messages.for_all
        self.sketches = (
            Sketches(sketched, rows=rows, ranks=ranks, level=self._level, for_all=for_all)
            if sketched
            else None
        )
        each = unit.rows // info.ranks_per_host
        self.total = Place("inside_sum", (each, unit.columns), info.dtype)
        self.stamp = Place("stamp", (STAMP_WORDS,), torch.int32, "kept")
        self.mistaken = Place("stamps_differ", (1,), torch.bool, "flag")
        self.noise = Place("noise", (len(unit.compressed), 2), torch.float64, "state")
        self.noise_step = Place("noise_step", (), torch.int64, "kept")
        own: Stage = "replicas" if unit.direction == "replicas" else "gradients"
        self._first = Encoding(own, messages, "residual")
        self.encodings: dict[Stage, Encoding] = {own: self._first}
        if unit.shots is not None:
            self.encodings["owners"] = Encoding("owners", unit.shots.gather, OWNER_RESIDUAL)
        if unit.inside is not None:
            self.encodings["inside"] = Encoding("inside", unit.inside, None)

    @cached_property
    def state(self) -> tuple[Place, ...]:
        """The state of all programs, except measured noise."""
        if not self._unit.compressed:
            return ()
        found = [p for program in (self.start(0), *self.programs) for p in program.places]
        return tuple(dict.fromkeys(p for p in found if p.kind == "state"))

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """:meth:`in_order`, without stamps."""
        return tuple(self.in_order(stamped=False))

    def in_order(self, *, stamped: bool) -> Iterator[Program]:
        """The programs for whole units, in the order of a run."""
        if self._hosts and (not self._unit.compressed or self._unit.warmup_steps):
            yield self.lower(Variant(messages=False))
        if self._unit.compressed:
            yield self.lower(Variant(stamped=stamped, begun=False))
            yield self.lower(Variant(stamped=stamped))

    @cached_property
    def rules(self) -> dict[int, FeedbackRule]:
        """The feedback rules, by the segment's first column in the unit."""
        found = ((s.start, s.codec.feedback) for s in self._unit.segments)
        return {start: rule for start, rule in found if rule is not None}

    def start(self, seed: int) -> Program:
        """The first values of the state, and constants."""
        steps = () if self.sketches is None else self.sketches.start(seed)
        return Program.of(self._what, [("start", steps)])

    def lower(self, variant: Variant) -> Program:
        """The program of a variant."""
        unit, dtype, columns = self._unit, self._unit.info.dtype, self._unit.buffer_columns
        part = None if variant.reached is None else Part(unit, variant.reached)
        width = columns if part is None else part.columns
        inp = Place("inp", (unit.rows, width), dtype, "late")
        out = Place("out", (unit.received_rows, width), dtype, "late")
        if part is None:
            return Program.of(self._what, self._body(variant, inp, out))
        expanded = Place("part_expanded", (unit.rows, columns), dtype)
        # In place where all ranks get all rows, as natives do.
        reduced = expanded
        if not unit.all_reduced:
            reduced = Place("part_reduced", (unit.received_rows, columns), dtype)
        body = [*self._body(variant, expanded, reduced)]
        if variant.messages:
            body = self._aside(part, body)
        if variant.levels != "across":
            body.insert(0, ("encode", [Launch(Expand(part.runs), (inp, expanded))]))
        if variant.levels != "inside":
            body.append(("decode", [Launch(Pick(part.runs), (reduced, out))]))
        return Program.of(self._what, body)

    def _body(self, variant: Variant, inp: Place, out: Place) -> Ranges:
        unit, info = self._unit, self._unit.info
        divisor = info.world_size if variant.mean else 1
        average = out
        if self._hosts:
            if variant.levels != "across":
                inside = unit.inside if variant.messages else None
                yield "add inside the host", [*self._inside(inp, inside)]
            if variant.levels == "inside":
                return
            inp = self.total
            if unit.all_reduced:
                average = Place("host_average", (1, unit.columns), info.dtype)
        if not variant.messages:
            yield "exchange", [*self._sum(inp, average, divisor)]
        elif unit.shots is None:
            yield from self._in_messages(variant, inp, average, divisor)
        else:
            yield from self._in_two_shots(variant, inp, average, divisor)
        if average is not out:
            ranks = info.ranks_per_host
            send = Send("all-gather", "inside", ranks, out, average, "averages")
            yield "hand on", [send, Wait("averages")]

    def _sum(self, inp: Place, out: Place, divisor: int) -> Iterator[Step]:
        """Sums of gradients in their own dtype, which are then divided."""
        unit, ranks = self._unit, self._unit.peers
        if unit.all_reduced:
            yield Launch(Copy(), (inp, out))
            yield Send("all-reduce", self._level, ranks, out, out, "sums")
        else:
            yield Send("reduce-scatter", self._level, ranks, out, inp, "sums")
        yield Wait("sums")
        if divisor > 1:
            yield Launch(Divide(divisor), (out,))

    def _inside(self, inp: Place, messages: MessagePlan | None) -> Iterator[Step]:
        """The ranks of a host add up, uncompressed or in messages without feedback. Messages are
        added in rank order, uncompressed gradients in that of the backend, or torch's ``sum``."""
        ranks, total = self._unit.info.ranks_per_host, self.total
        if messages is None:
            yield Send("reduce-scatter", "inside", ranks, total, inp, "sums_inside")
            yield Wait("sums_inside")
            return
        rows, words = total.shape[0], messages.row_words
        # [q, h] is for, then from, neighbour q, about host h's row. A neighbour gets its messages
        # for all hosts in one call of the backend. Gradients are in the order of hosts: with
        # several, messages are first written where those of the neighbours will arrive.
        first = "inside_received" if rows > 1 else "inside_send"
        encoded = Place(first, (ranks * rows, words), torch.int32)
        send, received = (
            Place(name, (ranks, rows, words), torch.int32)
            for name in ("inside_send", "inside_received")
        )
        yield from together(inp, self._encode(self.encodings["inside"], inp, encoded, Variant()))
        if rows > 1:
            yield Launch(ByNeighbour(), (encoded, send))
        yield Send("all-to-all", "inside", ranks, received, send, "messages_inside")
        yield Wait("messages_inside")
        launches = []
        for segment, columns, words in messages.spans:
            launches += segment.codec.summing(received[words], total[columns], 1)
        yield from together(total, launches)

    def _in_messages(self, variant: Variant, inp: Place, out: Place, divisor: int) -> Ranges:
        unit, begin, end = self._unit, [], []
        if unit.info.flat is not None and not is_whole(unit.info, unit.segments[0].params):
            rows = Place("flat_grad", (unit.rows, unit.columns), inp.dtype)
            begin, inp = [Launch(_arranging(unit), (inp, rows))], rows
            shard = Place("flat_shard", (1, unit.columns), out.dtype)
            end, out = [Launch(_restoring(unit), (shard, out))], shard
        look, compare = self._measuring(variant, inp, out, divisor)
        yield from self._shot(variant, [*begin, *look], inp, out, divisor)
        yield "decode", [*compare, *end]

    def _in_two_shots(self, variant: Variant, inp: Place, out: Place, divisor: int) -> Ranges:
        unit, shots = self._unit, self._unit.shots
        assert shots is not None
        owners, columns, words = unit.peers, shots.gather.columns, shots.gather.row_words
        slices = Place("slices", (owners, columns), inp.dtype)
        total = Place("slice_sum", (1, columns), torch.float32)
        look, compare = self._measuring(variant, inp, out, divisor)
        slicing = slicing_of(unit)
        cut = Launch(slicing, (inp, slices))
        yield from self._shot(variant, [*look, cut], slices, total, divisor)
        # Sums are not rounded before they are encoded. Ranks that were in lockstep in the first
        # shot are so in the second: it has no stamps.
        own = Place("sums_send", (1, words), torch.int32)
        received = Place("sums_recv", (owners, words), torch.int32)
        steps = together(total, self._encode(self.encodings["owners"], total, own, Variant()))
        steps += [
            Send("all-gather", self._level, owners, received, own, "sums_of_slices"),
            Wait("sums_of_slices", turn=True),
        ]
        wide, decode = Place("slices", (owners, columns), torch.float32), []
        for segment, span, part in shots.gather.spans:
            decode += segment.codec.decoding(received[part], wide[span])
        steps += together(wide, decode)
        steps += [Launch(replace(slicing, back=True, empty=()), (wide, out)), *compare]
        yield "second shot", steps

    def _shot(
        self, variant: Variant, first: Sequence[Step], inp: Place, out: Place, divisor: int
    ) -> Ranges:
        """Messages about the rows ``[D, S]`` of ``inp``, and the sum of those about this rank's
        row."""
        messages, sketches = self.messages, self.sketches
        send = Place("message_send", (messages.made, messages.row_words), torch.int32)
        received = Place("message_recv", (messages.read, messages.row_words), torch.int32)
        encode: list[Step] = [*self._encode(self._first, inp, send, variant)]
        # Of messages that are sent in part, the end is not sent.
        stamped = variant.stamped and messages.sent is None
        tail = DenseLayout(inp.dtype, (), tail=messages.words)
        if stamped:
            encode.append(Launch(Put(tail), (inp, send, self.stamp)))
        yield "encode", [*first, *together(inp, encode)]
        kind = "all-gather" if messages.for_all else "all-to-all"
        exchange: list[Step] = [
            Send(kind, self._level, messages.read, received, send, "messages", messages.sent)
        ]
        if sketches is not None:
            exchange += sketches.beside()
        exchange.append(Wait("messages", turn=True))
        if sketches is not None:
            exchange.append(Wait("cells"))
        yield "exchange", exchange
        decode = [
            step for span in messages.spans for step in self._decode(span, received, out, divisor)
        ]
        if stamped:
            total = Sum(layout=tail, divisor=divisor)
            decode.append(Launch(total, (received, out, self.stamp, self.mistaken)))
        decode = together(out, decode)
        if sketches is not None:
            decode += sketches.count()
        yield "decode", decode

    def _encode(
        self, encoding: Encoding, x: Place, message: Place, variant: Variant
    ) -> Iterator[Step]:
        if self.sketches is not None and encoding is self._first:
            residuals = [self._residual(s.segment, encoding) for s in self.sketches.spans]
            yield from self.sketches.encode(x, message, residuals, begun=variant.begun)
        dithered, seeds = encoding.dithered, encoding.seeds
        if dithered:
            yield Launch(Advance(SEED_STEP), (seeds,))
        for span in encoding.messages.spans:
            codec = span.segment.codec
            if isinstance(codec, SketchPlan):
                continue
            residual = self._residual(span.segment, encoding)
            own = seeds.row(dithered.index(span)) if span in dithered else None
            yield from codec.encoding(x[span.columns], message[span.words], residual, own)

    def _decode(
        self, span: Span[Segment], received: Place, out: Place, divisor: int
    ) -> Iterator[Step]:
        """Write one segment's sum, as the optimizer gets it, to its columns of ``out``.

        With a loss scale, gradients fill the range of float16. So in float16, values that exceed
        the range by no more than codes and residuals can cause become the largest number instead of
        an overflow.
        """
        segment, codec = span.segment, span.segment.codec
        rule, columns = codec.feedback, out[span.columns]
        owner_state = None if rule is None else rule.owner_state
        half = out.dtype == torch.float16
        decoded = columns
        if codec.compressed and (half or (owner_state and out.dtype != torch.float32)):
            width = span.columns.stop - span.columns.start
            decoded = Place("decoded", (1, width), torch.float32)
        if self.sketches is not None and isinstance(codec, SketchPlan):
            i = self.sketches.spans.index(span)
            residual = self._residual(segment, self._first)
            yield from self.sketches.decode(i, received, decoded, residual, divisor)
        else:
            yield from codec.summing(received[span.words], decoded, divisor)
        wide, start = decoded, self._starts[id(segment)]
        if rule is not None and owner_state is not None:
            wide = decoded if half else columns
            sent = Place(f"{owner_state}.{start}", (1, segment.columns), torch.float32, "state")
            yield Launch(UndoLag(rule.lead), (decoded, sent, wide), codec.name)
        if wide is not columns:
            # A sum up to this many times float16's largest number is no overflow.
            reach = (1 + codec.overshoot) * (1.0 if rule is None else rule.gain)
            yield Launch(Saturate(reach), (wide, columns), codec.name)

    def _residual(self, segment: Segment, encoding: Encoding) -> Place | None:
        rule = segment.codec.feedback
        if rule is None or encoding.residual is None:
            return None
        name = f"{encoding.residual}.{self._starts[id(segment)]}"
        return Place(name, (encoding.messages.made, segment.columns), rule.dtype, "state")

    def _measuring(
        self, variant: Variant, inp: Place, out: Place, divisor: int
    ) -> tuple[list[Launch], list[Launch]]:
        """Launches before and after an exchange that measure its noise."""
        if not variant.noise:
            return [], []
        spans = tuple((s.start, s.stop) for s in self._unit.compressed)
        own = Place("noise_own", (noise_samples(spans),), torch.float64)
        row = inp if inp.shape[0] == 1 else inp.row(OWN)
        compare = CompareNoise(spans, self._unit.peers / divisor)
        return (
            [Launch(SampleGradient(spans), (row, self.noise_step, own))],
            [Launch(compare, (out, self.noise_step, own, self.noise))],
        )

    def _aside(self, part: Part, body: list[Range]) -> list[Range]:
        """Preserve the feedback state of parameters that the backward did not reach: copy it
        before, and put it back after. Messages carry some of these residuals, but FSDP has no
        buffer for the result."""
        places = Program.of(self._what, body).places
        state = {place.name: place for place in places if place.kind == "state"}
        misses = self.misses_sketches(part)
        before, after = preserving(part, state, sketches=misses)
        if misses:
            before.insert(0, Wait(COUNTING))
            after.insert(0, Wait(COUNTING))
        return [("encode", before), *body, ("decode", after)]

    def misses_sketches(self, part: Part) -> bool:
        """Whether no sketched segment has any of these parameters. Thresholds would follow the
        zeros, so their state is preserved, too."""
        return self.sketches is not None and not any(
            part.reaches(span.segment) for span in self.sketches.spans
        )


# Rearranging FSDP1's flat gradient so that segments are columns: :mod:`tagc.plan.param_slices` says
# which elements go where. Those in no segment (padding and frozen parameters) are dropped on the
# way in and come out as zeros.


def _arranging(unit: UnitPlan) -> Pieces:
    """``(gradient [W, S], rows [W, columns])``."""
    unused = [
        (slice(row, row + 1), slice(segment.start + used, segment.stop))
        for segment in unit.segments
        for row, used in enumerate(filled_columns(unit.info, segment.params))
        if used < segment.columns
    ]
    pieces = []
    for row, copies in enumerate(_copies(unit)):
        before = row * unit.buffer_columns
        for start, column, n in copies:
            block = slice(row, row + 1), slice(column, column + n)
            pieces.append((before + start, before + start + n, *block))
    return Pieces(tuple(pieces), tuple(unused))


def _restoring(unit: UnitPlan) -> ByRank:
    """``(shard [1, columns], out [1, S])``, of every rank."""
    everything = ((slice(None), slice(None)),)
    ranks = []
    for copies in _copies(unit):
        pieces = [(a, a + n, slice(0, 1), slice(column, column + n)) for a, column, n in copies]
        gaps = sum(n for _, _, n in copies) < unit.buffer_columns
        ranks.append(Pieces(tuple(pieces), everything if gaps else (), back=True))
    return ByRank(tuple(ranks))


def _copies(unit: UnitPlan) -> list[list[tuple[int, int, int]]]:
    """For each row, elements that are contiguous both in FSDP's row and in ours: the first in each,
    and how many."""
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(unit.info.world_size)]
    for segment in unit.segments:
        for piece in param_slices(unit.info, segment.params):
            row, column, length = rows[piece.row], segment.start + piece.column, piece.length
            start, at, n = row[-1] if row else (0, 0, 0)
            if n and (start + n, at + n) == (piece.start, column):  # it continues the last one
                row[-1] = start, at, n + length
            else:
                row.append((piece.start, column, length))
    return rows

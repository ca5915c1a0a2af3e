"""The programs of a unit's all-gathers, from its plan.

Every rank encodes one message about its shard for all others, and decodes the messages of all. With
a codec of changes (``delta``) the ranks of a host share a copy of the unit's parameters: each keeps
the shards of the ranks with its own place on all hosts, ``[H, S]``, and exchanges messages with
these ranks. All ranks that keep a row, including its owner, compute it from the same messages with
the same arithmetic, so all have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import torch

from tagc.codecs import CodecPlan
from tagc.codecs.exact import ExactChanges
from tagc.ops.dense import DenseLayout
from tagc.ops.launches import EncodeExact, Fingerprint, Sum, together, with_fingerprint
from tagc.ops.program import OWN, Launch, Level, Place, Program, Send, Step, Wait
from tagc.ops.torch_operators import ClearUnchanged, Copy, Spoil, Subtract
from tagc.plan.unit_plan import COLLECTIVES, Segment, UnitPlan

# Columns that take less time than another launch.
_GAP = 1 << 16
# Sizes of messages whose programs are kept.
_SIZES = 32


class Gathers:
    """The programs of one unit. ``inp``, this rank's shard ``[1, S]``, and ``out``, all shards
    ``[W, S]``, come late.

    Attributes:
        changed: set if ``inp`` has changed since :attr:`fingerprint` was taken; boolean, ``[1]``.
        changed_early: the same, before a backward of the old parameters was over.
        fingerprint: of the shard that the last message was made from, int64 ``[2]``.
        copy: the parameters as all other ranks know them, ``[H, S]``; only with a codec of changes.
        measured: by segment, if the sizes of its messages vary: what :attr:`sizes` measured.
        unfit: by frozen segment, unless its codec carries all values: set if it cannot carry
            those of the last message; boolean, ``[1]``.
    """

    def __init__(self, unit: UnitPlan) -> None:
        self._unit, info = unit, unit.info
        self._what = f"{COLLECTIVES['parameters']} of unit {info.label!r}"
        self._level: Level = "across" if info.ranks_per_host > 1 else "flat"
        self._inp = Place("inp", (1, unit.columns), info.dtype, "late")
        self._out = Place("out", (info.world_size, unit.columns), info.dtype, "late")
        self._send = Place("parameters_send", (1, unit.messages.row_words), torch.int32)
        self.changed = Place("changed", (1,), torch.bool, "flag")
        self.changed_early = Place("changed_early", (1,), torch.bool, "flag")
        self._sums = Place("fingerprint_sums", (3,), torch.int64, "kept")
        self.fingerprint = Place("fingerprint", (2,), torch.int64, "state")
        self.copy = Place("copy", (unit.peers, unit.columns), info.dtype, "state")
        self.unfit: dict[Segment, Place] = {}
        for segment in unit.compressed:
            flag = Place(f"unfit.{segment.start}", (1,), torch.bool, "flag")
            if segment.frozen and [*segment.codec.finding_unfit(self._send, info.dtype, flag)]:
                self.unfit[segment] = flag
        self._fitted: dict[tuple[int, ...], Gathers] = {}
        self.measured: dict[Segment, Place] = {}
        for segment in unit.segments:
            if words := segment.codec.measured_words:
                name = f"measured.{segment.start}"
                self.measured[segment] = Place(name, (1, words), torch.int32, "kept")
        self._measured_fingerprint = Place("measured_fingerprint", (2,), torch.int64, "kept")
        self._spans = unit.messages.spans

    @cached_property
    def message(self) -> Program:
        """Messages about whole shards. If a backward reads them again, they are kept."""
        return self._message(keep=False)

    @cached_property
    def kept_message(self) -> Program:
        """:attr:`message`, for a forward whose backward reads it."""
        return self._message(keep=True)

    @cached_property
    def again(self) -> Program:
        """Decodes the messages that the forward kept, and sends nothing."""
        received = self._received(keep=True)
        # Compare before decoding, which overwrites `inp`: it is this rank's row of `out`.
        compare = self._fingerprint(self.fingerprint, self.changed)
        decode = [compare, *self._decode(received, self._out, check=True)]
        return self._program(("decode parameters", decode))

    @cached_property
    def uncompressed(self) -> Program:
        """What FSDP's own all-gather does; on hosts in two levels."""
        if self._unit.info.ranks_per_host == 1:
            return self._program(("gather parameters", self._gather(self._out, self._inp)))
        rows = Place("across_recv", (self._unit.peers, self._unit.columns), self._inp.dtype)
        steps = [*self._gather(rows, self._inp), *self._hand_on(self._out, rows)]
        return self._program(("gather parameters", steps))

    @cached_property
    def rows(self) -> Program:
        """Fills the other rows of a copy of which this rank knows its own, after a load."""
        return self._program(("gather parameters", self._gather(self.copy, self.copy.row(OWN))))

    @cached_property
    def whole(self) -> Program:
        """Shards as they are, which become the copy."""
        return self._whole(self._share())

    @cached_property
    def whole_ahead(self) -> Program:
        """:attr:`whole`, which nothing reads yet."""
        return self._whole(())

    def _whole(self, share: Iterable[Step]) -> Program:
        own = self.copy.row(OWN)
        note = [Launch(Copy(), (self._inp, own)), self._fingerprint(self.fingerprint)]
        steps = [*note, *self._gather(self.copy, own), *share]
        return self._program(("gather parameters", steps))

    @cached_property
    def changes(self) -> Program:
        """Changes since the last message, which are added to the copy."""
        return self._changes(self._share())

    @cached_property
    def changes_ahead(self) -> Program:
        """:attr:`changes`, which nothing reads yet."""
        return self._changes(())

    def _changes(self, share: Iterable[Step]) -> Program:
        received = Place("parameters_recv", (self._unit.peers, self._send.shape[1]), torch.int32)
        encode, share = self._encode_changes(), [*share]
        if self.measured:
            # What has changed since it was measured may not fit. This rank then says that nothing
            # has changed, and raises.
            check: list[Step] = [self._fingerprint(self._measured_fingerprint, self.changed)]
            for segment, plan in self.measured.items():
                if segment.codec.of_changes:
                    check.append(Launch(Spoil(1), (plan[:1], self.changed)))
            note = Launch(Copy(), (self._measured_fingerprint, self.fingerprint))
            encode = [*check, *encode, note]
            if share:
                share.append(Launch(Spoil(), (self._out[:1], self.changed)))
        else:
            encode = with_fingerprint(encode, self._fingerprint(self.fingerprint))
        return self._program(
            ("encode parameters", encode),
            ("gather parameters", self._gather(received, self._send)),
            ("decode parameters", self._decode(received, self.copy)),
            ("gather parameters", share),
        )

    @cached_property
    def sizes(self) -> Program | None:
        """Measures the next message of :meth:`fitted`; None if messages have one size."""
        if not self.measured:
            return None
        measure = []
        if self._unit.keeps_copy:
            measure.append(self._fingerprint(self._measured_fingerprint))
        for segment, place in self.measured.items():
            columns = slice(segment.start, segment.stop)
            old = self.copy.row(OWN)[columns]
            measure += segment.codec.measuring(self._inp[columns], old, place)
        return self._program(("encode parameters", measure))

    def fitted(self, measured: Sequence[int]) -> Gathers:
        """The programs for the next message, by the largest number that a rank measured of each
        segment."""
        fitting = zip(self.measured, measured, strict=True)
        return self._with({s.start: s.codec.fitting(n) for s, n in fitting})

    @property
    def saves(self) -> bool:
        """Whether messages are shorter than the shards themselves."""
        return 4 * self._unit.messages.row_words < self._unit.columns * self._inp.dtype.itemsize

    @property
    def largest(self) -> Gathers:
        """The programs for the longest messages that can occur."""
        return self._with({s.start: s.codec.largest for s in self.measured})

    def _with(self, codecs: Mapping[int, CodecPlan]) -> Gathers:
        rooms = tuple(codec.words for codec in codecs.values())
        if rooms not in self._fitted:
            if len(self._fitted) == _SIZES:
                self._fitted.clear()
            unit = self._unit.with_codecs(lambda s: codecs.get(s.start, s.codec))
            self._fitted[rooms] = Gathers(unit)
        return self._fitted[rooms]

    @cached_property
    def read(self) -> Program:
        """Reads the copy. Nothing leaves a host."""
        return self._read(self.changed)

    @cached_property
    def read_early(self) -> Program:
        """:attr:`read` in a backward after a step of the optimizer, which is an error if it changed
        the parameters."""
        return self._read(self.changed_early)

    def _read(self, changed: Place) -> Program:
        steps = [self._fingerprint(self.fingerprint, changed), *self._share(changed)]
        return self._program(("gather parameters", steps))

    @cached_property
    def measure(self) -> Program:
        """What a message would make of this rank's shard, in ``out`` ``[1, S]``; nothing is
        sent. Exact segments stay as they are."""
        out = Place("out", self._inp.shape, self._inp.dtype, "late")
        if self._unit.keeps_copy:
            steps = [Launch(Copy(), (self.copy.row(OWN), out)), *self._encode_changes(exact=False)]
        else:
            steps = [*self._encode(self._inp)]
        steps += self._decode(self._send, out, exact=False)
        for segment in self.measured:
            columns = slice(segment.start, segment.stop)
            steps.append(Launch(Copy(), (self._inp[columns], out[columns])))
        return self._program(("encode parameters", steps))

    def _program(self, *parts: tuple[str, Iterable[Step]]) -> Program:
        return Program.of(self._what, parts)

    def _message(self, *, keep: bool) -> Program:
        received = self._received(keep=keep)
        gather = self._gather(received, self._send)
        if self._unit.info.ranks_per_host > 1:
            rows = Place("across_recv", (self._unit.peers, self._send.shape[1]), torch.int32)
            gather = [*self._gather(rows, self._send), *self._hand_on(received, rows)]
        unfit: list[Launch] = []
        for segment, columns, words in self._spans:
            flag = self.unfit.get(segment)
            if flag is not None:
                unfit += segment.codec.finding_unfit(received[words], self._inp.dtype, flag)
                unfit.append(Launch(Spoil(), (self._out[columns][:1], flag)))
        encode = self._encode(self._inp)
        if keep:
            encode = with_fingerprint(encode, self._fingerprint(self.fingerprint))
        return self._program(
            ("encode parameters", encode),
            ("gather parameters", gather),
            ("decode parameters", [*self._decode(received, self._out), *unfit]),
        )

    def _received(self, *, keep: bool) -> Place:
        shape = (self._unit.info.world_size, self._send.shape[1])
        if keep:
            return Place("kept_message", shape, torch.int32, "kept")
        return Place("parameters_recv", shape, torch.int32)

    def _fingerprint(self, before: Place, *changed: Place) -> Launch:
        """Takes a fingerprint, or compares one: see :class:`Fingerprint`."""
        return Launch(Fingerprint(), (self._inp, self._sums, before, *changed))

    def _encode(self, x: Place) -> list[Step]:
        launches = []
        for segment, columns, words in self._spans:
            launches += segment.codec.encoding(x[columns], self._send[words])
        return together(x, launches)

    def _encode_changes(self, *, exact: bool = True) -> list[Step]:
        """``exact``: whether to encode exact segments, too."""
        changes = Place("changes", self._inp.shape, torch.float32)
        own, launches = self.copy.row(OWN), []
        lossy = (s for s in self._unit.segments if s.codec.of_changes and s not in self.measured)
        for span in _joined(lossy):
            launches.append(Launch(Subtract(), (self._inp[span], own[span], changes[span])))
        for segment, columns, words in self._spans:
            x, codec = self._inp[columns], segment.codec
            if segment in self.measured and not exact:
                continue
            if isinstance(codec, ExactChanges):
                places = (x, own[columns], self.measured[segment], self._send[words])
                launches.append(Launch(EncodeExact(codec.layout), places, codec.name))
                continue
            if codec.of_changes:
                if segment.frozen:
                    # A mask's infinities do not change, but their difference would be NaN.
                    places = (x, own[columns], changes[columns])
                    launches.append(Launch(ClearUnchanged(), places, codec.name))
                x = changes[columns]
            launches += codec.encoding(x, self._send[words])
        return together(self._inp, launches)

    def _decode(
        self, received: Place, rows: Place, *, check: bool = False, exact: bool = True
    ) -> list[Step]:
        """``check``: whether rows become NaN if :attr:`changed` is set; ``exact``: whether exact
        segments are decoded, too."""
        launches = []
        for segment, columns, words in self._spans:
            if exact or segment not in self.measured:
                launches += segment.codec.decoding(received[words], rows[columns])
        if check:
            nothing = Sum(layout=DenseLayout(rows.dtype, ()))
            launches.append(Launch(nothing, (received, rows, None, self.changed)))
        return together(rows, launches)

    def _gather(self, out: Place, inp: Place) -> Iterator[Step]:
        yield Send("all-gather", self._level, self._unit.peers, out, inp, "messages")
        yield Wait("messages")

    def _share(self, changed: Place | None = None) -> Iterator[Step]:
        """The copy, or NaN if ``changed`` is set."""
        if self._unit.info.ranks_per_host == 1:
            flags = () if changed is None else (changed,)
            yield Launch(Copy(), (self.copy, self._out, *flags))
            return
        yield from self._hand_on(self._out, self.copy)
        if changed is not None:
            yield Launch(Spoil(), (self._out[:1], changed))

    def _hand_on(self, out: Place, rows: Place) -> Iterator[Step]:
        """The ranks of a host send each other rows: row ``h`` of rank ``r`` becomes row
        ``h * R + r`` of ``out``."""
        ranks = self._unit.info.ranks_per_host
        yield Send("all-gather each", "inside", ranks, out, rows, "rows")
        yield Wait("rows")


def _joined(segments: Iterable[Segment]) -> list[slice]:
    """The columns of segments, with short gaps between them, such as norms."""
    spans: list[slice] = []
    for segment in segments:
        first = segment.start
        if spans and first - spans[-1].stop <= _GAP:
            first = spans.pop().start
        spans.append(slice(first, segment.stop))
    return spans

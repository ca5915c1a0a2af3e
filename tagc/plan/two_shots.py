"""Two shots: an all-reduce of messages whose bytes do not grow with the number of replicas.

In *one shot* every replica sends its message to all others, and each sums all messages: it receives
``(N - 1) * b`` bits per element. In *two shots* each of the ``N`` replicas owns a slice of the
shard. It gets a message about its slice from every replica, sums them, and sends one message about
the sum to all others, with the same codec and a residual of its own: ``2 * b * (N - 1) / N`` bits.
That is less with 3 or more replicas, and the same with 2::

    shard [S]           slices [N, C]       message about each      the owner's sum [C]
     a a a a b b   ->    a a b         ->    to its owner     ->     one message to all
                         a a b                                       rows [N, C] -> shard [S]

Codecs that send every element can be cut: ``quantized`` between blocks, ``matrix`` between the rows
of each matrix, ``dense`` anywhere. ``sketch`` uses one shot: its cells are summed on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tagc.codecs import CodecPlan, Cut
from tagc.codecs.feedback import FeedbackRule
from tagc.ops.torch_operators import Pieces
from tagc.plan.param_slices import ParamSlice
from tagc.plan.unit_plan import MessagePlan, Segment, TwoShots, UnitPlan


def in_fewest_bytes(unit: UnitPlan) -> UnitPlan:
    """The unit in two shots if that is possible and sends less, otherwise as it is."""
    if not unit.all_reduced or why_one_shot(unit) is not None:
        return unit
    other = in_two_shots(unit)
    return other if _words(other) < _words(unit) else unit


def in_two_shots(unit: UnitPlan) -> UnitPlan:
    """The unit with its average over replicas in two shots, unless :func:`why_one_shot` says why it
    cannot go so."""
    slices: list[Segment] = []
    cuts: list[tuple[Cut, ...]] = []
    start = 0
    for segment in unit.segments:
        found = segment.codec.cut(unit.peers)
        assert found is not None
        codec, of_segment = found
        stop = start + sum(cut.length for cut in of_segment)
        cuts.append(of_segment)
        slices.append(replace(segment, start=start, stop=stop, params=(), codec=codec))
        start = stop
    owners = unit.peers
    sums = [replace(segment, codec=_of_sums(segment.codec)) for segment in slices]
    shots = TwoShots(
        reduce=MessagePlan(segments=tuple(slices), made=owners, read=owners),
        gather=MessagePlan(segments=tuple(sums), made=1, read=owners, rows=owners, for_all=True),
        cuts=tuple(cuts),
    )
    return replace(unit, shots=shots)


def _of_sums(codec: CodecPlan) -> CodecPlan:
    """Sums have no warm-up, and error feedback if slices have any feedback."""
    owed = None if codec.feedback is None else FeedbackRule(dtype=codec.feedback.dtype)
    return replace(codec, feedback=owed, warmup_steps=0)


def why_one_shot(unit: UnitPlan) -> str | None:
    """Why the average of a unit over replicas cannot go in two shots; None if it can."""
    owners = unit.peers
    uncut = [s.codec.name for s in unit.segments if s.codec.cut(owners) is None]
    if uncut:
        return f"codec {uncut[0]!r} needs all messages where they are added up"
    if not unit.compressed:
        return "nothing of it is compressed"
    if unit.info.dtype == torch.float16:
        return "sums may leave the range of float16"
    if any(param.dim != 0 for param in unit.info.params):
        return "parameters are sharded in another dimension than the first"
    return None


def slicing_of(unit: UnitPlan) -> Pieces:
    """Moves elements between a shard ``[1, S]`` and its slices ``[N, C]``."""
    assert unit.shots is not None
    pieces, empty = [], []
    at = column = 0
    for cut in (cut for of_segment in unit.shots.cuts for cut in of_segment):
        if not cut.columns:
            continue
        end = column + cut.length
        full, rest = divmod(cut.columns, cut.length)
        if full:
            stop = at + full * cut.length
            pieces.append((at, stop, slice(0, full), slice(column, end)))
        if rest:
            stop, owner = at + cut.columns, slice(full, full + 1)
            pieces.append((stop - rest, stop, owner, slice(column, column + rest)))
            empty.append((owner, slice(column + rest, end)))
        used = full + (rest > 0)
        if used < unit.peers:
            empty.append((slice(used, unit.peers), slice(column, end)))
        at, column = at + cut.columns, end
    return Pieces(tuple(pieces), tuple(empty))


def slices_of(unit: UnitPlan, segment: Segment) -> Iterator[ParamSlice]:
    """Locate the elements of a segment's parameters in the slices of two shots. ``row`` is the
    owner of the slice; ``offset`` counts from the first element of the parameter's shard."""
    assert unit.shots is not None
    start, column = segment.start, 0
    for cut in unit.shots.cuts[unit.segments.index(segment)]:
        first = segment.start
        for param in segment.params:
            for owner in range(unit.peers):
                left = start + owner * cut.length
                right = min(left + cut.length, start + cut.columns)
                low, high = max(left, first), min(right, first + param.columns)
                if low < high:
                    yield ParamSlice(
                        param=param.name,
                        offset=low - first,
                        length=high - low,
                        row=owner,
                        column=column + low - left,
                        start=low,
                    )
            first += param.columns
        start += cut.columns
        column += cut.length


def _words(unit: UnitPlan) -> int:
    return sum(s.codec.words for found in unit.flights.values() for s in found.segments)

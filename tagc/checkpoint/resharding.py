"""Redistributes residuals: decides what every new rank takes over, so that nothing is lost.

The sum of a parameter's residuals over all ranks must stay the same. New rank ``j`` of ``n`` adds
up the residuals of the saved ranks ``j``, ``j + n``, ``j + 2n`` and so on, counted among the ranks
that have the parameter. Ranks that get none start empty. (An average then divides the residuals by
the new number of ranks, like the gradients.) Replicas, each of which has the parameter in shards,
take over residuals in the same way.

The state that the owner of a shard keeps (with a lead, what was sent last) is not a residual: it is
on the scale of the gradient itself. So every new replica takes the mean over the saved replicas.
(In rules for replicas they are all equal.) FSDP1 cuts parameters anywhere, so there this state is
saved and put together by elements.

With tensor parallelism every sharding group has a box of a parameter, and all of the above holds
for its elements. Several groups may also have the same elements, perhaps the whole parameter. Such
duplicates get the same gradients and have equal residuals. Every new group takes over the residual
of the first saved duplicate, so all of them stay equal.

Sites hold their anchors and the outer momentum alike, so these are taken over in the same way.

With two shots across replicas, the owner of a slice also has a residual of the sum that it sends.
New owners take it over unchanged. If there are no owners any more, because all replicas send each
other everything, it is added to the first replica's residual, times the number of ranks, by which
the average divides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product

import torch
from torch import Tensor

from tagc.checkpoint.by_parameter import ParamLocation, Part, split_part
from tagc.checkpoint.format import BY_HANDLE, Source, StateError
from tagc.codecs.feedback import OWNER_RESIDUAL, OWNER_STATES
from tagc.plan import Box

Holdings = Mapping[int, Mapping[str, ParamLocation]]

_RESIDUAL, _OWED_BY_OWNERS, _ANCHOR = "residual.", f"{OWNER_RESIDUAL}.", "anchor."
_OWNED = (
    *(f"{kind}." for kind in OWNER_STATES),
    _OWED_BY_OWNERS,
    # Of sites, which hold them alike.
    *(_ANCHOR, "momentum.", "in_flight."),
)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The residual that a rank saved under a name; ``share`` of it is taken over."""

    rank: int
    name: str
    part: Part
    shape: tuple[int, ...]
    share: float = 1.0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def duplicate(self) -> int:
        return 0 if self.part.duplicate is None else self.part.duplicate[0]

    def fits(self, place: ParamLocation) -> bool:
        try:
            return self.shape == self.part.shape(place.param.shape, place.param.dim)
        except ValueError:
            return False

    def overlaps(self, place: ParamLocation) -> Iterator[tuple[int, Box, int, Box, Box]]:
        """Its overlaps with a place: first element and box in the saved tensor, first element and
        box in the place, and the box of the elements that are in both."""
        theirs = _with_offsets(self.part.boxes(place.param.shape, place.param.dim))
        for (start, source), (at, target) in product(theirs, _with_offsets(place.boxes)):
            both = source.overlap(target)
            if both is not None:
                yield start, source, at, target, both

    def numel_for(self, place: ParamLocation) -> int:
        return sum(both.numel for *_, both in self.overlaps(place))


def _with_offsets(boxes: Sequence[Box]) -> list[tuple[int, Box]]:
    offsets = accumulate((box.numel for box in boxes), initial=0)
    return list(zip(offsets, boxes, strict=False))


@dataclass(kw_only=True)
class Merge:
    """The saved residuals that a rank takes over. Elements are counted by saved rank and name."""

    # What to add up, by the name of this rank's residual.
    parts: dict[str, list[Saved]] = field(default_factory=dict)
    # Names, without the part, of what no rank takes; the same on all ranks.
    dropped: list[str] = field(default_factory=list)
    taken: Counter[tuple[int, str]] = field(default_factory=Counter)  # elements this rank uses
    saved: dict[tuple[int, str], int] = field(default_factory=dict)  # and all that are not dropped

    def check(self, where: str, taken: Mapping[int, Mapping[tuple[int, str], int]]) -> None:
        """Raise StateError unless every saved element is taken once, by :attr:`taken` of every
        rank."""
        for (rank, name), numel in self.saved.items():
            used = sum(of_rank.get((rank, name), 0) for of_rank in taken.values())
            if used != numel:
                raise StateError(
                    f"{where}: {used} of the {numel} elements of {name} of rank {rank} would be "
                    "taken over: the ranks that saved it and those that load it do not fit"
                )


def plan_merge(source: Source, holdings: Holdings, rank: int) -> Merge:
    """Plan which residuals of a source ``rank`` takes over; ``holdings`` has the places of every
    rank's residuals, by name. Raises StateError if the source lacks what this rank needs."""
    old: dict[str, list[Saved]] = {}
    for saved_rank, state in sorted(source.ranks.items()):
        for full, (_, shape) in state.shapes.items():
            if full.startswith((_RESIDUAL, *_OWNED)):
                name, part = split_part(full)
                saved = Saved(rank=saved_rank, name=full, part=part, shape=shape)
                old.setdefault(name, []).append(saved)
    new: dict[str, list[tuple[int, str, ParamLocation]]] = {}
    for holder, held in sorted(holdings.items()):
        for full, place in held.items():
            new.setdefault(split_part(full)[0], []).append((holder, full, place))
    for name in new:
        if name.startswith(_ANCHOR) and name not in old:
            raise StateError(
                f"{source.where}: it has no {name.replace('.', ' of ', 2)}: it was not saved by "
                "tagc.sites, or for another model"
            )
    if source.alone:
        _check_parts(source, old, new)
    merge = Merge()
    for name, found in old.items():
        first = min(saved.duplicate for saved in found)  # in a single rank's state it may not be 0
        found = [saved for saved in found if saved.duplicate == first]
        holders = new.get(name, [])
        if not holders and name.startswith(_OWED_BY_OWNERS):
            # Each element had one owner, so the first copy of each shard takes it.
            holders = new.get(_without_owner(name), [])
            ranks = max((place.ranks for _, _, place in holders), default=1)
            found = [replace(saved, share=float(ranks)) for saved in found]
        if not holders or not all(saved.fits(holders[0][2]) for saved in found):
            merge.dropped.append(name)
            continue
        for saved in found:
            merge.saved[saved.rank, saved.name] = saved.numel
        copies: dict[Part, list[Saved]] = {}
        for saved in found:
            copies.setdefault(saved.part, []).append(saved)
        for holder, full, place in holders:
            if holder == rank:
                alike = [other for other, _, there in holders if there.part == place.part]
                turn, owned = alike.index(rank), full.startswith(_OWNED)
                if owned:  # all saved copies of each shard, with equal shares
                    parts = [replace(s, share=1 / len(of)) for of in copies.values() for s in of]
                    # No other rank has what the owner did not save.
                    covered = sum(of[0].numel_for(place) for of in copies.values())
                    if covered != place.numel:
                        raise StateError(
                            f"{source.where}: it has {covered} of the {place.numel} elements of "
                            f"{full}. Load the states of all ranks: {BY_HANDLE}"
                        )
                else:  # the turn of this rank among those that have the same part
                    parts = [s for of in copies.values() for s in of[turn :: len(alike)]]
                parts = [saved for saved in parts if saved.numel_for(place)]
                merge.parts.setdefault(full, []).extend(parts)
                duplicates = place.part.duplicate != holders[0][2].part.duplicate
                if duplicates or (turn and owned):
                    continue  # another rank counts it
                for saved in parts:
                    # With hosts, a rank may take several shards of a residual that was saved whole.
                    merge.taken[saved.rank, saved.name] += saved.numel_for(place)
    return merge


def merged(source: Source, parts: list[Saved], place: ParamLocation, dtype: torch.dtype) -> Tensor:
    """The sum of saved residuals, or of shares of them, in a residual's dtype.

    It is summed in float64 and rounded once. The rounding is checked: at most half a unit in the
    last place. Raises StateError if a residual is not finite, or the sum is beyond the dtype.
    """
    total = torch.zeros(place.numel, dtype=torch.float64, device="cpu")
    for saved in parts:
        tensor = source.ranks[saved.rank].tensors[saved.name].to("cpu", torch.float64)
        if not bool(tensor.isfinite().all()):
            raise StateError(f"{source.where}: {saved.name} of rank {saved.rank} is not finite")
        flat = tensor.reshape(-1)
        for start, source_box, at, target_box, both in saved.overlaps(place):
            there = flat[start : start + source_box.numel].view(source_box.shape)
            here = total[at : at + target_box.numel].view(target_box.shape)
            here[target_box.index(both)] += saved.share * there[source_box.index(both)]
    stored = total.view(place.shape).to(dtype)
    facts = torch.finfo(dtype)
    # The conversion from float64 may go through float32, which rounds twice.
    bound = total.abs() * (facts.eps / 2 + 2**-24) + facts.smallest_normal
    if not bool(((stored.double().view(-1) - total).abs() <= bound).all()):
        raise StateError(f"{source.where}: the sum of {parts[0].name} over ranks exceeds {dtype}")
    return stored


def _check_parts(
    source: Source,
    old: Mapping[str, list[Saved]],
    new: Mapping[str, list[tuple[int, str, ParamLocation]]],
) -> None:
    """Refuse a single rank's state if other ranks saved what this rank now needs: other hosts,
    tensor parallelism or owners gave it other parts of a parameter."""
    for name in dict.fromkeys([*old, *new]):
        had = {str(saved.part) or " all of it" for saved in old.get(name, [])}
        has = {str(place.part) or " all of it" for _, _, place in new.get(name, [])}
        kind = f"{name.partition('.')[0]}."
        # What has a residual only now starts empty; owners' state is with an owner, if with any.
        owned = kind in _OWNED and any(other.startswith(kind) for other in old)
        lost = kind == _OWED_BY_OWNERS and not has and _without_owner(name) in new
        if (had and has and had != has) or (owned and not had) or lost:
            raise StateError(
                f"{source.where}: of {name}, this rank saved{_listed(had)}, but needs"
                f"{_listed(has)}: hosts, meshes or owners divide parameters in another way now. "
                f"Load the states of all ranks ({BY_HANDLE}), or wrap the model as in the saved run"
            )


def _without_owner(name: str) -> str:
    """The residual that takes over one of owners, if there are none any more."""
    return name.replace(_OWED_BY_OWNERS, _RESIDUAL, 1)


def _listed(parts: set[str]) -> str:
    return ",".join(sorted(part.replace(".", " ") for part in parts)) or " nothing"

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

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tagc.checkpoint.format import BY_HANDLE, Source, StateError
from tagc.checkpoint.locations import ParamLocation
from tagc.checkpoint.saved import Saved
from tagc.checkpoint.suffix import Suffix, split_suffix
from tagc.codecs.feedback import OWNER_RESIDUAL, OWNER_STATES

Holdings = Mapping[int, Mapping[str, ParamLocation]]

_OWED_BY_OWNERS = f"{OWNER_RESIDUAL}."
_ANCHOR = "anchor."
_OWNED = (
    *(f"{kind}." for kind in OWNER_STATES),
    _OWED_BY_OWNERS,
    # Of sites, which hold them alike.
    *(_ANCHOR, "momentum.", "in_flight."),
)
# Owner states of a removed kind of feedback: read only to report that they are dropped.
_REMOVED = ("average.",)


@dataclass(kw_only=True)
class Merge:
    """The saved residuals that a rank takes over.

    Attributes:
        parts: the saved residuals to add up, by the name of this rank's residual.
        dropped: names, without suffix, of residuals that no rank takes; the same on all ranks.
        taken: number of elements that this rank uses, by saved rank and name.
        saved: number of elements that were saved and are not dropped, by saved rank and name.
    """

    parts: dict[str, list[Saved]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    taken: dict[tuple[int, str], int] = field(default_factory=dict)
    saved: dict[tuple[int, str], int] = field(default_factory=dict)

    def check(self, where: str, taken: Mapping[int, Mapping[tuple[int, str], int]]) -> None:
        """Raise StateError unless every saved element is taken once.

        Args:
            taken: :attr:`taken` of every rank.
        """
        for (rank, name), numel in self.saved.items():
            used = sum(of_rank.get((rank, name), 0) for of_rank in taken.values())
            if used != numel:
                raise StateError(
                    f"{where}: {used} of the {numel} elements of {name} of rank {rank} would be "
                    "taken over: the ranks that saved it and those that load it do not fit"
                )


def plan_merge(source: Source, holdings: Holdings, rank: int) -> Merge:
    """Plan which residuals of a source ``rank`` takes over.

    Args:
        holdings: the places of every rank's residuals, by name.
    """
    old: dict[str, list[Saved]] = {}
    for saved_rank in sorted(source.headers()):
        for full, (_, shape) in source.shapes(saved_rank).items():
            if full.startswith(("residual.", *_OWNED, *_REMOVED)):
                name, part = split_suffix(full)
                saved = Saved(rank=saved_rank, name=full, part=part, shape=shape)
                old.setdefault(name, []).append(saved)
    new: dict[str, list[tuple[int, str, ParamLocation]]] = {}
    for holder in sorted(holdings):
        for full, place in holdings[holder].items():
            new.setdefault(split_suffix(full)[0], []).append((holder, full, place))
    merge = Merge()
    for name in new:
        if name.startswith(_ANCHOR) and name not in old:
            raise StateError(
                f"{source.where}: it has no {name.replace('.', ' of ', 2)}: it was not saved by "
                "tagc.sites, or for another model"
            )
    if source.alone:
        _check_owned(source, old, holdings[rank])
        _check_hosts(source, old, new)
        _check_parallel(source, old, new)
    for name, found in old.items():
        found = _first_duplicates(found)
        holders = new.get(name, [])
        if not holders and name.startswith(_OWED_BY_OWNERS):
            holders = new.get(name.replace(_OWED_BY_OWNERS, "residual.", 1), [])
            found = _without_owners(source, holders, found)
        if not holders or not all(saved.fits(holders[0][2]) for saved in found):
            merge.dropped.append(name)
            continue
        for saved in found:
            merge.saved[saved.rank, saved.name] = saved.numel
        for holder, full, place in holders:
            if holder == rank:
                turn, turns = _turn(holders, holder, place)
                if full.startswith(_OWNED):
                    parts = _means(found, place)
                    _check_covered(source, found, full, place)
                else:
                    parts = _parts(found, place, turn, turns)
                merge.parts.setdefault(full, []).extend(parts)
                duplicates = place.param.duplicate != holders[0][2].param.duplicate
                if duplicates or (turn and full.startswith(_OWNED)):
                    continue  # another rank counts it
                for saved in parts:
                    # With hosts, a rank may take several shards of a residual that was saved whole.
                    key = saved.rank, saved.name
                    merge.taken[key] = merge.taken.get(key, 0) + saved.numel_for(place)
    return merge


def merged(source: Source, parts: list[Saved], place: ParamLocation, dtype: torch.dtype) -> Tensor:
    """The sum of saved residuals, or of shares of them, in a residual's dtype.

    It is summed in float64 and rounded once. The rounding is checked: at most half a unit in the
    last place.

    Raises:
        StateError: if a saved residual is not finite, or the sum is beyond the dtype.
    """
    total = torch.zeros(place.numel, dtype=torch.float64, device="cpu")
    for saved in parts:
        tensor = source.read(saved.rank, saved.name).to("cpu", torch.float64)
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


def _turn(
    holders: list[tuple[int, str, ParamLocation]], rank: int, place: ParamLocation
) -> tuple[int, int]:
    """Index of this rank among the ranks with the same part of a parameter, and their number."""
    alike = [holder for holder, _, other in holders if other.suffix == place.suffix]
    return alike.index(rank), len(alike)


def _parts(found: list[Saved], place: ParamLocation, turn: int, turns: int) -> list[Saved]:
    """Every ``turns``-th of the saved ranks, or of the saved copies of each shard."""
    mine = [saved for copies in _copies(found) for saved in copies[turn::turns]]
    return [saved for saved in mine if saved.numel_for(place)]


def _first_duplicates(found: list[Saved]) -> list[Saved]:
    """The residuals of the first saved duplicate; in a single rank's state it may not be 0."""
    first = min(saved.duplicate for saved in found)
    return [saved for saved in found if saved.duplicate == first]


def _without_owners(
    source: Source, holders: list[tuple[int, str, ParamLocation]], found: list[Saved]
) -> list[Saved]:
    """The residuals of owners, scaled to be added to residuals if there are no owners any more.
    (Each element had one owner, so the first copy of each shard takes it.)"""
    if source.alone and holders:
        raise StateError(
            f"{source.where}: it has the residual of an owner in two shots, but now all replicas "
            "send each other everything. Load the states of all ranks: "
            f"{BY_HANDLE}"
        )
    ranks = max((place.ranks for _, _, place in holders), default=1)
    return [replace(saved, share=float(ranks)) for saved in found]


def _means(found: list[Saved], place: ParamLocation) -> list[Saved]:
    """All saved copies of each shard, with equal shares."""
    every = [replace(saved, share=1 / len(c)) for c in _copies(found) for saved in c]
    return [saved for saved in every if saved.numel_for(place)]


def _check_owned(
    source: Source, old: Mapping[str, list[Saved]], places: Mapping[str, ParamLocation]
) -> None:
    """Refuse a single rank's state if it lacks owner state that this rank now needs."""
    for full in places:
        name = split_suffix(full)[0]
        kind = next((kind for kind in _OWNED if name.startswith(kind)), None)
        if kind and name not in old and any(other.startswith(kind) for other in old):
            raise StateError(_not_mine(source, 0, full, places[full]))


def _check_hosts(
    source: Source,
    old: Mapping[str, list[Saved]],
    new: Mapping[str, list[tuple[int, str, ParamLocation]]],
) -> None:
    """Refuse a single rank's state if its residuals belong to other shards than now, because ranks
    lay on hosts in another way."""
    for name in old.keys() & new.keys():
        if not name.startswith("residual.gradients."):
            continue
        owed = {saved.part.shard for saved in old[name]}
        owes = {place.suffix.shard for _, _, place in new[name]}
        if owed != owes:
            raise StateError(
                f"{source.where}: saved where ranks lay on hosts in another way than now. Load "
                f"the states of all ranks ({BY_HANDLE}), or wrap the model with "
                "the hosts=... of the saved run"
            )


def _check_parallel(
    source: Source,
    old: Mapping[str, list[Saved]],
    new: Mapping[str, list[tuple[int, str, ParamLocation]]],
) -> None:
    """Refuse a single rank's state if tensor parallelism gives the rank other elements now."""
    for name in old.keys() & new.keys():
        had = {(saved.part.box, saved.part.duplicate) for saved in old[name]}
        has = {(place.param.box, place.param.duplicate) for _, _, place in new[name]}
        if had != has:
            raise StateError(
                f"{source.where}: saved where tensor parallelism gave this rank another part of "
                f"{name} than now. Load the states of all ranks: {BY_HANDLE}"
            )


def _not_mine(source: Source, covered: int, name: str, place: ParamLocation) -> str:
    return (
        f"{source.where}: it has {covered} of the {place.numel} elements of {name}, the others are "
        f"another rank's. Load the states of all ranks: {BY_HANDLE}"
    )


def _check_covered(source: Source, found: list[Saved], name: str, place: ParamLocation) -> None:
    """Refuse owner state that lacks elements: no other rank has what the owner did not save."""
    firsts = [copies[0] for copies in _copies(found)]
    covered = sum(saved.numel_for(place) for saved in firsts)
    if covered != place.numel:
        raise StateError(_not_mine(source, covered, name, place))


def _copies(found: list[Saved]) -> list[list[Saved]]:
    by_part: dict[Suffix, list[Saved]] = {}
    for saved in found:
        by_part.setdefault(saved.part, []).append(saved)
    return list(by_part.values())

"""The end of a saved tensor's name, which says what part of a parameter it is."""

from __future__ import annotations

import re
from typing import NamedTuple

from tagc.plan import Box, span_of


class Elements(NamedTuple):
    """Elements ``first`` to ``last``, excluding ``last``, of a flattened parameter, or of the
    sharding group's box of it."""

    first: int
    last: int


class Suffix(NamedTuple):
    """The part of a parameter, as a name states it; see :attr:`ParamLocation.suffix`.

    Attributes:
        box: the box of the parameter, with tensor parallelism; None for the whole parameter.
        duplicate: index and number of tensor parallelism's duplicates; None if there is only one.
        shard: index and number of shards of the box, or elements of it; None for the whole box.
    """

    box: Box | None
    duplicate: tuple[int, int] | None
    shard: tuple[int, int] | Elements | None

    def __str__(self) -> str:
        said = ""
        if self.box is not None:
            said += f".box_{_spell(self.box.start)}_to_{_spell(self.box.stop)}"
        if self.duplicate is not None:
            said += ".duplicate_{}_of_{}".format(*self.duplicate)
        if isinstance(self.shard, Elements):
            said += ".elements_{}_to_{}".format(*self.shard)
        elif self.shard is not None:
            said += ".shard_{}_of_{}".format(*self.shard)
        return said

    def boxes(self, shape: tuple[int, ...], dim: int) -> list[Box]:
        """The elements of a parameter of ``shape`` whose shards are cut along ``dim``, as boxes in
        the order of the saved tensor.

        Raises:
            ValueError: if the parameter has no such elements.
        """
        own = Box.whole(shape) if self.box is None else self.box
        if len(own.start) != len(shape) or not all(
            0 <= first <= last <= size
            for first, last, size in zip(own.start, own.stop, shape, strict=True)
        ):
            raise ValueError(f"there is no such box in {list(shape)}")
        if isinstance(self.shard, Elements):
            first, last = self.shard
            if not 0 <= first < last <= own.numel:
                raise ValueError(f"there are no such elements in {list(own.shape)}")
            return list(own.runs(first, last))
        if self.shard is None:
            return [own]
        shard, shards = self.shard
        if not 0 <= shard < shards:
            raise ValueError(f"there is no shard {shard} of {shards}")
        return [own.narrow(dim, *span_of(own.shape[dim], shard, shards))]


_NUMBER = "[0-9]{1,15}"
_SUFFIX = re.compile(
    rf"(?P<name>.*?)(\.box_(?P<start>{_NUMBER}(_{_NUMBER})*)_to_(?P<stop>{_NUMBER}(_{_NUMBER})*))?"
    rf"(\.duplicate_(?P<duplicate>{_NUMBER})_of_(?P<duplicates>{_NUMBER}))?"
    rf"(\.(?P<kind>shard|elements)_(?P<first>{_NUMBER})_(of|to)_(?P<last>{_NUMBER}))?",
    re.DOTALL,
)


def split_suffix(name: str) -> tuple[str, Suffix]:
    """Split a name into the name without :attr:`ParamLocation.suffix`, and the suffix."""
    found = _SUFFIX.fullmatch(name)
    assert found is not None  # every part of the suffix is optional
    box = duplicate = shard = None
    if found["start"] is not None:
        start, stop = (tuple(map(int, found[end].split("_"))) for end in ("start", "stop"))
        box = Box(start, tuple(last - first for first, last in zip(start, stop, strict=False)))
    if found["duplicate"] is not None:
        duplicate = int(found["duplicate"]), int(found["duplicates"])
    if found["kind"] is not None:
        shard = int(found["first"]), int(found["last"])
        shard = Elements(*shard) if found["kind"] == "elements" else shard
    return found["name"], Suffix(box, duplicate, shard)


def _spell(indices: tuple[int, ...]) -> str:
    return "_".join(map(str, indices))

"""What policies could once say, and what to write instead."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["REMOVED", "Removed", "remedy_for"]


@dataclass(frozen=True)
class Removed:
    """A value that a key no longer takes.

    `kind` is that of the codec or feedback which has the key, '' for any; `remedy` follows "was
    removed: " in the error.
    """

    kind: str
    key: str
    value: object
    remedy: str


_GROUPS = "write group: 4, the largest"

REMOVED: tuple[Removed, ...] = (
    Removed("delta", "bits", 1, "write bits: 2, which sends 1 bit per element more"),
    Removed(
        "momentum",
        "kind",
        "momentum",
        "write kind: residual, and give the optimizer its first momentum back",
    ),
    Removed("packed", "support", "own", "leave the key out"),
    Removed("packed", "support", "shared", "leave the key out, or write kind: sketch"),
    Removed("quantized", "bits", 2, "write kind: matrix with bits: 2 for gradients, or bits: 4"),
    Removed(
        "sketch", "symbol", "float32", "write symbol: int32x1, which is as large and sums exactly"
    ),
    Removed("packed", "bits", 16, "write bits: 8, and the residual keeps what its codes leave"),
    Removed("packed", "group", 8, _GROUPS),
    Removed("packed", "group", 16, _GROUPS),
    Removed("packed", "group", 32, _GROUPS),
)


def remedy_for(key: str, mapping: Mapping[str, object]) -> str | None:
    """What to write instead of this key's value in a codec or feedback; None if the value was
    never allowed."""
    for one in REMOVED:
        same = type(one.value) is type(mapping[key]) and one.value == mapping[key]  # true is no 1
        if same and one.key == key and one.kind in ("", mapping.get("kind")):
            return one.remedy
    return None

"""Removed values and built-in policies, and what to write instead."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["POLICIES", "REMOVED", "Removed", "remedy_for"]


@dataclass(frozen=True)
class Removed:
    """A value that a key no longer takes.

    `kind` is the kind of the codec or feedback that has the key; None for any. `remedy` follows
    "was removed: " in the error.
    """

    kind: str | None
    key: str
    value: object
    remedy: str


REMOVED: tuple[Removed, ...] = (
    Removed(None, "dtype", "int8", "write dtype: bfloat16, which holds twice as many bytes"),
    Removed("delta", "bits", 1, "write bits: 2, which sends 1 bit per element more"),
    Removed(
        "momentum",
        "kind",
        "momentum",
        "write kind: residual, and give the optimizer its first momentum back",
    ),
    Removed(
        "packed",
        "kind",
        "packed",
        "write kind: matrix with bits: 1, which is better in bits, loss, time and memory; with "
        "FSDP1 write kind: quantized with bits: 4",
    ),
    Removed("quantized", "bits", 2, "write kind: matrix with bits: 2 for gradients, or bits: 4"),
    Removed(
        "sketch", "symbol", "float32", "write symbol: int32x1, which is as large and sums exactly"
    ),
    Removed("matrix", "bits", 4, "write bits: 2, or codec quantized with bits: 4"),
    Removed("matrix", "group", 16, "write group: 8, which sends 0.5 bits per element, not 0.33"),
    Removed("matrix", "group", 32, "write group: 8, which sends 0.5 bits per element, not 0.2"),
)

_FILE = """\
a file with these lines is the same policy:
schema: 1
tuning: {{rate_factor: 1.3, norm_factor: {norm_factor}}}
gradients:
  - when: {{role: {roles}}}
    codec: {{kind: sketch, density: 0.2, symbol: auto, warmup_steps: 40}}
    feedback: {{kind: residual, dtype: float32, lead: 0.65}}"""

POLICIES = {
    "all": _FILE.format(norm_factor=1.5, roles="[attention, mlp, embedding, head, other]"),
    "mlp-only": _FILE.format(norm_factor=1.1, roles="mlp"),
    "non-attn": """\
its loss is 2.6% above dense's: take 'one-bit'; or a file with these lines is the same policy:
schema: 1
tuning: {rate_factor: 1.3, norm_factor: 1.3}
gradients:
  - when: {role: [mlp, embedding, head]}
    codec: {kind: sketch, density: 0.2, symbol: auto, warmup_steps: 40}
    feedback: {kind: residual, dtype: float32, lead: 0.65}
  - when: {}
    codec: {kind: dense, wire: bfloat16}
parameters:
  - when: {role: [mlp, embedding, head]}
    codec: {kind: quantized, bits: 8, block: 256}""",
    "fifth-bit": "take 'half-bit'",
    "packed-20": "take 'one-bit', which is better in bits, loss, time and memory; with FSDP1 take "
    "'loco-4bit'",
}
"""What to write instead of a removed built-in policy, by its name."""


def remedy_for(key: object, mapping: Mapping[Any, object]) -> str | None:
    """What to write instead of this key's value in a codec or feedback; None if the value was
    never allowed."""
    for one in REMOVED:
        same = type(one.value) is type(mapping[key]) and one.value == mapping[key]  # true is not 1
        if same and one.key == key and one.kind in (None, mapping.get("kind")):
            return one.remedy
    return None

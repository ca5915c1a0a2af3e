"""Policies, of one rule each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MATRICES = ("*embed.weight", "*up.weight", "*down.weight", "*extra.weight", "*head.weight")


CHANGES = {"when": {"name": ["*"]}, "codec": {"kind": "delta", "bits": 4, "block": 32}}


def rule(codec: dict[str, Any], names: Sequence[str] = ("*",)) -> dict[str, Any]:
    return {"when": {"name": list(names)}, "codec": codec, "feedback": {"kind": "residual"}}


POLICIES: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "int32x1": rule({"kind": "sketch", "density": 1.0, "symbol": "int32x1"}),
    "sketch": rule({"kind": "sketch", "density": 0.3, "symbol": "int8x4"}),
    "quantized": rule({"kind": "quantized", "bits": 4, "block": 32}),
    "matrix": rule({"kind": "matrix", "group": 8}, names=MATRICES),
    # Nothing changes here, so that all ranks have the exact parameters.
    "changes": rule({"kind": "quantized", "bits": 4, "block": 32}) | {"parameters": CHANGES},
}

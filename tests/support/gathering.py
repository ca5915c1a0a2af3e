"""Policies for parameters in FSDP2's all-gather, and a look at every gather."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import tagc
from tagc.collect import Phase, UnitGatherer

INT8 = {"kind": "quantized", "bits": 8, "block": 32}
KEPT = INT8 | {"keep_for_backward": True}


def gathering(codec: dict[str, Any], name: str | list[str] = "*.weight") -> dict[str, Any]:
    """Gradients unchanged, and parameters with a codec."""
    return {
        "schema": 1,
        "gradients": [{"when": {}, "codec": {"kind": "dense"}}],
        "parameters": [{"when": {"name": name}, "codec": codec}],
    }


@contextmanager
def recorded(calls: list[tuple[UnitGatherer, bool, Tensor, Tensor]]) -> Iterator[None]:
    """Record every gather: unit, whether in backward, input, output. Enter it before
    `tagc.wrap`."""
    original = UnitGatherer.gather

    def gather(self: UnitGatherer, out: Tensor, inp: Tensor, group: Any, phase: Phase) -> None:
        before = inp.clone()
        original(self, out, inp, group, phase)
        calls.append((self, phase is Phase.BACKWARD, before, out.clone()))

    with patch.object(UnitGatherer, "gather", gather):
        yield


def gathered_in(policy: str) -> dict[str, Any]:
    """Options of ``fully_shard`` for a shipped policy: 16 bits if it sends such parameters as exact
    changes."""
    if all(rule.codec.kind != "exact" for rule in tagc.Policy.load(policy).parameters):
        return {}
    return {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}

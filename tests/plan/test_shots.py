"""Averages over replicas in two shots, as plans have them: which, why, and how many bytes."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from tagc.plan import (
    Plan,
    UnitInfo,
    UnitParam,
    build_plan,
    in_two_shots,
    slices_of,
)
from tagc.policy import Policy

SHAPES = {"attn.wq": (512, 512), "attn.wo": (512, 512), "mlp.up": (2048, 512), "norm": (512,)}
QUANTIZED = {"kind": "quantized", "bits": 4, "block": 256}
MATRIX = {"kind": "matrix", "bits": 1}


def planned(copies: int, codec: dict[str, Any], *, dim: int = 0, **more: Any) -> Plan:
    """A block's shard of 2, averaged over copies by a codec for all but the norm."""
    params = tuple(
        UnitParam(
            name=f"{name}.weight",
            shape=shape,
            columns=math.prod(shape) // 2,
            local=(shape[0] // 2, *shape[1:]),
            dim=dim,
        )
        for name, shape in SHAPES.items()
    )
    options = {"world_size": copies, "dtype": torch.float32} | more
    info = UnitInfo(name="layers.0", params=params, **options)
    rule = {"when": {"name": ["attn.*", "mlp.*"]}, "codec": codec}
    dense = {"when": {}, "codec": {"kind": "dense"}}
    policy = Policy.load({"schema": 1, "gradients": [dense], "replicas": [rule]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of units that cost more compressed
        return build_plan([info], policy, replicas=[info])


def test_what_a_plan_says() -> None:
    plan = planned(8, QUANTIZED)
    assert "replicas of 1 units in two shots: each of the 8 replicas" in str(plan)
    (unit,) = plan.replicas
    assert plan.fingerprint != replace(plan, replicas=(replace(unit, shots=None),)).fingerprint
    # An eighth of a residual as an owner, on top of that of the whole shard.
    numel = sum(segment.columns for segment in unit.compressed)
    assert sum(map(unit.stored_bytes, unit.segments)) == 4 * numel + 4 * numel // 8
    assert "in two shots" not in str(planned(2, QUANTIZED))


@pytest.mark.parametrize(
    ("codec", "more", "why"),
    [
        ({"kind": "sketch", "density": 0.01}, {}, "codec 'sketch int8x4' needs all messages"),
        (QUANTIZED, {"dtype": torch.float16}, "sums may leave the range of float16"),
        (QUANTIZED, {"dim": 1}, "another dimension than the first"),
    ],
)
def test_what_goes_in_one_shot(codec: dict[str, Any], more: dict[str, Any], why: str) -> None:
    plan = planned(4, codec, **more)
    (unit,) = plan.replicas
    assert unit.shots is None
    (text,) = [note for note in plan.notes if "in one shot" in note]
    assert why in text


@pytest.mark.parametrize(("copies", "codec"), [(3, QUANTIZED), (3, MATRIX), (64, MATRIX)])
def test_slices_are_every_element_once(copies: int, codec: dict[str, Any]) -> None:
    unit = in_two_shots(planned(copies, codec).replicas[0])
    assert unit.shots is not None
    seen = torch.zeros(unit.columns, dtype=torch.int64)
    for segment, part in zip(unit.segments, unit.shots.reduce.segments, strict=True):
        places = torch.zeros(copies, part.columns, dtype=torch.int64)
        first = dict.fromkeys((p.name for p in segment.params), 0)
        for piece in slices_of(unit, segment):
            seen[piece.start : piece.start + piece.length] += 1
            places[piece.row, piece.column : piece.column + piece.length] += 1
            assert piece.offset == first[piece.param] or codec is QUANTIZED
            first[piece.param] += piece.length
        assert int(places.max()) == 1
        assert first == {p.name: p.columns for p in segment.params}
    assert bool((seen == 1).all())

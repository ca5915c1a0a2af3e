"""Models of which nothing but shapes is known: synthetic ones, and blocks by name."""

from __future__ import annotations

import pytest
import torch

from tagc.costs import ModelShapes
from tagc.costs.models import load_model
from tagc.costs.shapes import synthetic


@pytest.mark.parametrize("numel", [100_000, 1_300_000, 10_000_000, 7_000_000_000, 70 * 10**9])
def test_a_synthetic_model_has_as_many_parameters_as_asked(numel: int) -> None:
    shapes = synthetic(numel)
    assert abs(shapes.numel / numel - 1) < 0.04
    assert len(shapes.blocks) >= 2


def test_blocks_of_names() -> None:
    names = {
        f"{stack}.{i}.mlp.experts.{e}.w1.weight": [8, 8]
        for stack in ("encoder.layers", "decoder.layers")
        for i in range(2)
        for e in range(3)
    } | {"head.0.weight": [8, 8]}
    assert ModelShapes.of(names).blocks == (
        "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"
    )  # fmt: skip


def test_layer_1_is_no_prefix_of_layer_10() -> None:
    shapes = ModelShapes.of({f"layers.{i}.w.weight": [4, i + 1] for i in range(12)})
    reduces, gathers = shapes.units(2, torch.float32, torch.bfloat16)
    assert [[p.name for p in u.params] for u in reduces] == [
        [f"layers.{i}.w.weight"] for i in range(12)
    ]
    assert {u.per_step for u in gathers} == {2}
    assert load_model("1e6").blocks

"""Predicted traffic of activations, and ``tagc explain --mesh``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tagc.commands.cli import main
from tagc.costs.dimensions import activation_traffic, parse_mesh
from tagc.costs.shapes import ModelError, ModelShapes, synthetic
from tagc.policy import Policy

MESH = {"pp": 2, "dp": 4, "tp": 8}


def test_traffic_by_hand() -> None:
    shapes = synthetic(7 * 10**9)
    width, blocks = 4096, len(shapes.blocks)
    policy = Policy.load("hybrid-3d")
    pp, tp = activation_traffic(shapes, policy, MESH, tokens=1000, itemsize=2)
    assert (pp.dimension, tp.dimension) == ("pp", "tp")
    assert pp.elements == 1000 * width
    assert pp.dense_bytes == 2 * pp.elements
    assert pp.wire_bytes == 8.25 / 8 * pp.elements
    assert tp.elements == 4 * -(-blocks // 2) * 2 * 7 / 8 * 1000 * width
    (dense,) = activation_traffic(shapes, Policy.load("hybrid"), {"tp": 8}, tokens=1, itemsize=2)
    assert dense.wire_bytes == dense.dense_bytes
    (cp,) = activation_traffic(shapes, policy, {"cp": 4}, tokens=1000, itemsize=2)
    assert cp.elements == 3 * blocks * 3 / 4 * 1000 * 2 * width


def test_experts() -> None:
    block = {
        "attn.weight": (8, 8),
        "mlp.experts.0.up.weight": (32, 8),
        "mlp.experts.1.up.weight": (32, 8),
    }
    shapes = ModelShapes.of(
        {f"layers.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
        | {"layers.0.dense.up.weight": (8, 8)}
    )
    policy = Policy.load("hybrid-3d")
    (ep,) = activation_traffic(
        shapes, policy, {"ep": 2}, tokens=10, itemsize=4, experts_per_token=2
    )
    assert ep.elements == 4 * 2 * 1 / 2 * 10 * 2 * 8
    with pytest.raises(ModelError, match="no experts"):
        activation_traffic(synthetic(10**7), policy, {"ep": 2}, tokens=1, itemsize=2)


@pytest.mark.parametrize("text", ["tp", "tp=0", "tp=x", "xy=2", "tp=2,tp=2", ""])
def test_meshes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"no mesh|none of"):
        parse_mesh(text)


def test_the_command(capsys: Any) -> None:
    options = ["--policy", "hybrid-3d", "--tokens", "8192"]
    assert main(["explain", "7B", "--mesh", "pp=2,dp=4,tp=8", *options]) == 0
    said = capsys.readouterr().out
    assert "activations, for 8,192 tokens a step:" in said
    assert "4 ranks" in said
    assert main(["explain", "7B", "--mesh", "tp=8", *options]) == 0
    assert "gradients" not in capsys.readouterr().out
    assert main(["explain", "7B", "--mesh", "dp=4,tp=8", "--json", *options]) == 0
    (tp,) = json.loads(capsys.readouterr().out)["dimensions"]
    assert tp["dimension"] == "tp"

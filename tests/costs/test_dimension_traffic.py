"""Activations in the dimensions of a mesh: their traffic, their seconds, and ``--mesh``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tagc.commands.cli import main
from tagc.costs.dimensions import (
    activation_traffic,
    advise_dimensions,
    data_ranks,
    place,
)
from tagc.costs.link import Link
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


def test_exact_activations_are_those_of_bfloat16() -> None:
    shapes, policy = synthetic(7 * 10**9), Policy.load("mz-hybrid")
    for itemsize, bits in ((2, 12.25), (4, None)):
        for t in activation_traffic(shapes, policy, MESH, tokens=1000, itemsize=itemsize):
            assert t.bits == bits
            assert t.wire_bytes == round(t.elements * (bits or 32) / 8)
            link = Link(bandwidth=1e6, latency=1e-3, inside=1e8, ranks_per_host=1)
            (found,) = advise_dimensions([t], MESH, link, memory_bandwidth=None)
            assert found.pays == (bits is not None)


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


def test_neighbours_differ_in_the_last_dimension() -> None:
    assert place(MESH, 1) == {"pp": 1, "dp": 1, "tp": 1}
    assert place(MESH, 8) == {"pp": 1, "dp": 1, "tp": 8}
    assert place(MESH, 16) == {"pp": 1, "dp": 2, "tp": 8}
    assert place(MESH, 4) == {"pp": 1, "dp": 1, "tp": 4}
    assert data_ranks({"dp": 4, "dp_shard": 2, "tp": 2}, 4) == 2
    with pytest.raises(ModelError, match="64 ranks, which do not divide by --ranks-per-host 3"):
        place(MESH, 3)
    with pytest.raises(ModelError, match="tp=6 does not fill hosts"):
        place({"dp": 2, "tp": 6}, 4)


def test_seconds_by_hand() -> None:
    traffic = activation_traffic(
        synthetic(10**8), Policy.load("hybrid-3d"), MESH, tokens=64, itemsize=2, micro_batches=4
    )
    pp, tp = traffic
    assert pp.collectives == 4
    link = Link(bandwidth=1e6, latency=1e-3, inside=1e8, ranks_per_host=8)
    stages, tensor = advise_dimensions(traffic, MESH, link, memory_bandwidth=1e7)
    assert (stages.inside, tensor.inside) == (False, True)
    # Each of the host's 8 ranks belongs to another group of two stages.
    assert stages.dense_seconds == pytest.approx(4e-3 + 8 * pp.dense_bytes / 1e6)
    assert stages.codec == 2 * (pp.dense_bytes + pp.wire_bytes) / 1e7
    assert stages.seconds == pytest.approx(4e-3 + 8 * pp.wire_bytes / 1e6 + stages.codec)
    assert stages.pays
    assert tensor.dense_seconds == pytest.approx(tp.collectives * 1e-3 + tp.dense_bytes / 1e8)
    # Coded, an all-reduce is two collectives; codecs cost more than this link does.
    coded = 2 * tp.collectives * 1e-3 + tp.wire_bytes / 1e8
    assert tensor.seconds == pytest.approx(coded + tensor.codec)
    assert not tensor.pays


ADVISE = ["advise", "--params", "1e8", "--bandwidth", "10Gbit", "--tokens", "8192"]
ON_HOSTS = ["--ranks-per-host", "8", "--mesh"]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (
            [*ON_HOSTS, "pp=2,dp=4,tp=8"],
            "extends: hybrid, dimensions: {pp: {codec: {kind: quantized, bits: 8, block: 64}}}}",
        ),
        (["--mesh", "pp=2,tp=2"], "Compress all activations, as policy hybrid-3d does: "),
        ([*ON_HOSTS, "dp=4,tp=2"], "Leave the activations to torch"),
    ],
)
def test_advise(options: list[str], advice: str, capsys: Any) -> None:
    assert main([*ADVISE, *options]) == 0
    assert advice in capsys.readouterr().out


def test_the_data_ranks_of_a_host_share_its_card(capsys: Any) -> None:
    seconds = {}
    for mesh, per_host in (("dp=4", "1"), ("dp=4,tp=8", "8"), ("tp=8,dp=4", "1")):
        options = ["--mesh", mesh, "--ranks-per-host", per_host]
        assert main([*ADVISE, *options, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        (found,) = (c for c in data["candidates"] if c["name"] == "dense bf16")
        seconds[mesh] = found["link"]
    # 8 times as many groups on the card, each with an eighth of the matrices.
    assert seconds["dp=4,tp=8"] == pytest.approx(seconds["dp=4"], rel=1e-3)
    assert seconds["tp=8,dp=4"] == pytest.approx(seconds["dp=4"] / 8, rel=1e-3)

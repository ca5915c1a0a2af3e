"""Advice for each dimension of a mesh: its link, its seconds, and ``tagc advise --mesh``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tagc.commands.cli import main
from tagc.costs.dimensions import activation_traffic
from tagc.costs.link import Link
from tagc.costs.placement import advise_dimensions, data_ranks, place
from tagc.costs.shapes import ModelError, synthetic
from tagc.policy import Policy

MESH = {"pp": 2, "dp": 4, "tp": 8}


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


ADVISE = ["advise", "--params", "7B", "--bandwidth", "10Gbit", "--tokens", "8192"]


def test_the_command(capsys: Any) -> None:
    assert main([*ADVISE, "--mesh", "pp=2,dp=4,tp=8", "--ranks-per-host", "8"]) == 0
    said = capsys.readouterr().out
    assert "Compress pp: " in said
    assert (
        "extends: hybrid, dimensions: {pp: {codec: {kind: quantized, bits: 8, block: 64}}}}" in said
    )
    assert "4 ranks; 10 Gbit/s" in said
    assert main([*ADVISE, "--mesh", "pp=2,tp=2"]) == 0
    said = capsys.readouterr().out
    assert "Compress all activations, as policy hybrid-3d does: " in said
    assert "vs best dense" not in said
    assert main([*ADVISE, "--mesh", "dp=4,tp=2", "--ranks-per-host", "8"]) == 0
    said = capsys.readouterr().out
    assert "Leave the activations to torch" in said
    assert "FSDP's 4 ranks share a host" in said


def test_the_data_ranks_of_a_host_share_its_card(capsys: Any) -> None:
    seconds = {}
    for mesh, per_host in (("dp=4", "1"), ("dp=4,tp=8", "8"), ("tp=8,dp=4", "1")):
        options = ["--mesh", mesh, "--ranks-per-host", per_host, "--tflops", "100"]
        assert main([*ADVISE, *options, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["compute"] == 6 * data["model"]["parameters"] * 8192 / 1e14
        (found,) = (c for c in data["candidates"] if c["name"] == "dense bf16")
        seconds[mesh] = found["link"]
    # 8 times as many groups on the card, each with an eighth of the matrices.
    assert seconds["dp=4,tp=8"] == pytest.approx(seconds["dp=4"], rel=1e-3)
    assert seconds["tp=8,dp=4"] == pytest.approx(seconds["dp=4"] / 8, rel=1e-3)

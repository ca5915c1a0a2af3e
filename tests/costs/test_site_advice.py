"""`tagc advise --sites`, and plans of sites: bytes, times and memory, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tagc
from tagc.commands.cli import main
from tagc.costs.advise import site_costs
from tagc.costs.candidates import Question
from tagc.costs.link import Link
from tagc.costs.shapes import ModelShapes
from tagc.policy import Policy

# One unit, of a matrix of 2**20 elements. A message has less than 0.1% of padding.
SHAPES = {"mlp.weight": (1024, 1024)}
NUMEL = 2**20
FOUR_BITS = {"when": {}, "codec": {"kind": "quantized", "bits": 4, "block": 256}}
MESSAGE = NUMEL // 2 + NUMEL // 256 * 2


def about(value: float) -> Any:
    return pytest.approx(value, rel=1e-3)


def policy(**sites: Any) -> Policy:
    return Policy.load({"schema": 1, "gradients": [FOUR_BITS], "sites": sites})


def question(sites: int = 2, shapes: Any = SHAPES) -> Question:
    link = Link(bandwidth=1e6, latency=0.01)
    found = ModelShapes.of(shapes)
    return Question(
        shapes=found, world_size=sites, sites=sites, link=link, compute=0.1, overlap=0.5
    )


@pytest.mark.parametrize("delay", [0, 7])
def test_changes(delay: int) -> None:
    """An exchange takes 0.55 s, a step 0.1 s."""
    dense, cost = site_costs(question(), [policy(every=16, delay=delay)])[0]
    assert dense.wire_bytes == about(2 * NUMEL)  # bfloat16, to the other site, in every step
    assert dense.link == about(0.01 + 2 * NUMEL / 1e6)
    assert dense.waits == pytest.approx(dense.link - 0.1)
    seconds = 2 * 0.01 + MESSAGE / 1e6
    assert cost.wire_bytes == about(MESSAGE / 16)
    assert cost.link == about(seconds / 16)
    assert cost.waits == pytest.approx(max(0.0, cost.link - delay * 0.1 / 16))
    assert cost.seconds == pytest.approx(0.1 + cost.waits)


@pytest.mark.parametrize(("units", "trips"), [(4, 3), (20, 5)])
def test_round_trips_of_units_that_are_exchanged_at_once(units: int, trips: int) -> None:
    """One for the anchors, and the two of all units that are begun together: 16 of these."""
    shapes = {f"layers.{i}.mlp.weight": (1024, 1024) for i in range(units)}
    _, cost = site_costs(question(3, shapes), [policy(every=16)])[0]
    assert cost.link * 16 == about(trips * 0.01 + units * 2 * 2 / 3 * MESSAGE / 1e6)


def test_the_plan() -> None:
    """Three sites send a message to the others' owners, and one about the sums."""
    plan = tagc.explain(SHAPES, policy(every=16, delay=2), world_size=3, sites=3)
    (row,) = plan.rows
    assert row.wire_bytes == about(2 * 2 / 3 * MESSAGE)
    assert f"{row.wire_bytes / 16 / 1024:.2f} KiB per step" in str(plan)
    assert f"{row.wire_bytes / 2 / 1024:.2f} KiB to other sites in the time of a step" in str(plan)
    # Anchor, momentum and the change in flight; the residual of a site, and of an owner.
    assert plan.memory.stored == 3 * 4 * NUMEL + row.stored_bytes
    without = policy(every=16, outer={"momentum": 0})
    small = tagc.explain(SHAPES, without, world_size=3, sites=3)
    assert small.memory.stored == 2 * 4 * NUMEL + row.stored_bytes
    assert "training waits for every exchange" in str(small)


def test_of_the_command(tmp_path: Path, capsys: Any) -> None:
    given = ["advise", "--params", "1e8", "--sites", "4", "--bandwidth", "200Mbit"]
    assert main([*given, "--latency", "50ms", "--step-time", "1s"]) == 0
    text = capsys.readouterr().out
    table = [line.split() for line in text.split("\n\n")[1].splitlines()]
    every = {name: cells[0] for name, *cells in table if cells}
    assert (every["sites"], every["sites-thin"], every["loco-4bit"]) == ("32", "80", "1")
    assert "sites-thin waits least" in text
    mine = tmp_path / "mine.yaml"
    mine.write_text("{schema: 1, extends: hybrid, replicas: [{when: {}, codec: {kind: dense}}]}")
    assert main([*given, "--json", "--policy", str(mine)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"dense bf16", "sites"} <= {cost["name"] for cost in data["candidates"]}
    assert data["refused"] == {str(mine): "it has rules for replicas"}


def test_the_memory_of_units_that_are_exchanged_at_once() -> None:
    """Buffers of 2**24 elements, and as many changes."""
    units, at_once = 20, 16
    one = tagc.explain(SHAPES, policy(every=16), world_size=3, sites=3).memory
    shapes = {f"layers.{i}.mlp.weight": shape for i in range(units) for shape in SHAPES.values()}
    many = tagc.explain(shapes, policy(every=16), world_size=3, sites=3)
    assert len(many.units) == units
    assert many.memory.buffers == at_once * one.buffers
    assert many.memory.stored - units * one.stored == (at_once - units) * 4 * NUMEL

"""Parameters that differ in a number of their names only are one line of a plan."""

from __future__ import annotations

from typing import Any

import pytest

import tagc
from tagc.plan.table import Row, merged


def row(param: str, unit: str = "(root)", **changes: Any) -> Row:
    values: dict[str, Any] = {
        "direction": "gradients", "shape": (4, 4), "role": "mlp", "codec": "dense",
        "density": 1.0, "dense_bytes": 64.0, "wire_bytes": 16.0, "stored_bytes": 8.0,
    }  # fmt: skip
    return Row(unit=unit, param=param, **(values | changes))


def names(rows: list[Row]) -> list[tuple[str, str, int]]:
    return [(r.unit, r.param, r.alike) for r in merged(rows)]


def test_blocks_are_one_line_with_the_bytes_of_all():
    rows = [row("embed.weight")]
    rows += [row(f"layers.{i}.wq.weight", f"layers.{i}") for i in range(33)]
    rows += [row(f"layers.{i}.wo.weight", f"layers.{i}") for i in range(33)]
    assert names(rows) == [
        ("(root)", "embed.weight", 1),
        ("layers.{0–32}", "layers.{0–32}.wq.weight", 33),
        ("layers.{0–32}", "layers.{0–32}.wo.weight", 33),
    ]
    block = merged(rows)[1]
    assert (block.dense_bytes, block.wire_bytes, block.stored_bytes) == (33 * 64, 33 * 16, 33 * 8)


def test_only_combinations_that_are_all_there_are_merged():
    rows = [row(f"layers.{i}.experts.{e}.w1") for i in range(2) for e in range(3 - i)]
    assert names(rows) == [
        ("(root)", "layers.{0–1}.experts.0.w1", 2),
        ("(root)", "layers.{0–1}.experts.1.w1", 2),
        ("(root)", "layers.0.experts.2.w1", 1),
    ]


@pytest.mark.parametrize(
    "change",
    [{"shape": (4, 5)}, {"role": "head"}, {"wire_bytes": 17.0}, {"direction": "parameters"}],
)
def test_a_block_that_is_not_alike_has_a_line_of_its_own(change):
    rows = [row(f"layers.{i}.wq", f"layers.{i}", **(change if i == 3 else {})) for i in range(5)]
    assert names(rows) == [
        ("layers.{0–2,4}", "layers.{0–2,4}.wq", 4),
        ("layers.3", "layers.3.wq", 1),
    ]


def test_a_plan_prints_blocks_once_and_all_of_them_in_full():
    shapes = {f"layers.{i}.mlp.w{k}.weight": (512, 256) for i in range(12) for k in "ab"}
    plan = tagc.explain(shapes | {"norm.weight": (256,)}, "loco-4bit", world_size=4)
    short, full = str(plan).splitlines(), plan.full.splitlines()
    assert len(full) - len(short) == 2 * 11
    (line,) = (line for line in short if "mlp.wa" in line)
    assert "layers.{0–11}.mlp.wa.weight" in line
    assert line.split()[2] == "12"
    assert short[-1].split() == full[-1].split()  # the totals
    assert "×" not in next(line for line in full if line.startswith("unit")).split()

"""Training runs of the quality benchmark on real ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import suites
from benchmarks.gloo import on_ranks as spawned
from benchmarks.one_device import Memory, through_memory
from benchmarks.quality.settings import DENSE, Recipe, Run, Shape, method_of
from benchmarks.quality.training import train
from support.distributed import on_ranks
from support.marks import slow

SMALL = Shape(width=32, heads=1, layers=1, context=16, ranks=2, batch=2)
pytestmark = pytest.mark.timeout(600)
RUN = Run(
    method=method_of("matrix, 1 of 8"),
    shape=SMALL,
    steps=4,
    rate=1e-3,
    recipe=Recipe(windows=8, averaged=2),
)


@on_ranks(2, timeout=300)
def test_a_run_says_what_it_sent(rank: int, world_size: int) -> None:
    said = train(RUN)
    # 4 bits for 8 elements, and the scales of short rows and columns.
    assert 0.5 < said["bits"] < 3
    assert "parameter_bits" not in said
    assert list(said["losses"]) == ["1", "2", "3", "4"]
    assert len(said["norms"]) == 4
    assert said["loss"] == pytest.approx(said["losses"]["4"], abs=1e-5)
    assert train(RUN)["loss"] == said["loss"]
    assert train(replace(RUN, rate=2e-3))["loss"] != said["loss"]
    assert train(replace(RUN, method=DENSE))["bits"] == 32
    changes = train(replace(RUN, method=method_of("changes in 4 bits")))
    assert (changes["bits"], changes["parameter_bits"] < 5) == (32, True)
    sketch = train(replace(RUN, method=method_of("sketch of 20%, residual")))
    assert sketch["loss"] is not None


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("optimizer", ["adamw", slow("muon"), "sgd", "lion"])
def test_every_optimizer_trains(rank: int, world_size: int, optimizer: str) -> None:
    recipe = Recipe(optimizer=optimizer, windows=8, kept=True, clip=None)
    said = train(replace(RUN, method=method_of("1 bit"), recipe=recipe))
    assert said["loss"] is not None


def _beside_gloo(rank: int, memory: Memory) -> None:
    for name in ("dense", "4 bits, changes in 4 bits", "1 bit"):
        half = replace(RUN.recipe, half=name != "dense", kept=name == "1 bit")
        run = replace(RUN, method=method_of(name), recipe=half)
        over_gloo = train(run)
        with through_memory(memory, rank, torch.device("cpu")):
            found = train(run)
        assert found | {"step_ms": 0} == over_gloo | {"step_ms": 0}, name


@pytest.mark.slow
def test_messages_through_memory_are_those_of_gloo(monkeypatch: Any) -> None:
    monkeypatch.setenv("TAGC_OPS", "reference")
    memory = Memory(2, 2**20, torch.device("cpu"))
    spawned(_beside_gloo, 2, memory)


@pytest.mark.slow
def test_lines_on_one_device(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TAGC_OPS", "reference")
    file = tmp_path / "gpu.jsonl"
    command = ["quality", "gpu", "--device", "cpu", "--json", str(file)]
    assert suites.main([*command, "--steps", "20"]) == 0
    assert "| step | dense | hybrid | one-bit | thrifty |" in capsys.readouterr().out
    records = [json.loads(line) for line in file.read_text().splitlines()]
    dense, *others = (r["losses"] for r in records)
    assert dense["20"] < dense["5"] - 0.1
    for losses in others:
        assert losses["20"] == pytest.approx(dense["20"], rel=5e-3)
    curves = file.with_suffix(".curves.jsonl").read_text().splitlines()
    assert len(curves) == sum(len(r["losses"]) for r in records)

"""One rank's steps without the others: they run, and send what training would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import suites
from benchmarks.one_device import alone
from benchmarks.rank import sharded


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_policies_step_on_a_cpu(capsys: Any) -> None:
    assert suites.main(["rank", "--device", "cpu", "--tokens", "32", "--settle", "1"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 9
    assert " | 1.000 | " in rows[2]


def test_gathered_parameters_are_copies_of_the_own_shard() -> None:
    with alone(4):
        model: Any = sharded(torch.device("cpu"))
        weight = model.lm_head.weight
        assert weight.full_tensor().shape == (1000, 128)
        loss = model(torch.randint(256, (1, 16)))
        loss.backward()
    assert loss.isfinite()
    assert weight.grad is not None
    assert weight.grad.to_local().shape == (250, 128)


def test_a_share_of_the_step(tmp_path: Path, capsys: Any) -> None:
    record = tmp_path / "host.jsonl"
    args = ["--policies", "hybrid", "--steps", "2", "--json", str(record)]
    assert suites.main(["host", *args]) == 0
    (found,) = map(json.loads, record.read_text().splitlines())
    assert 0 < found["share"] < 1
    # Two segments in 32 blocks and two in the root: 4 launches in a reduction, 4 in a gather, and 2
    # in a backward that reads its messages again. The root needs one gather.
    assert found["tagc_started"] == 32 * 10 + 8
    assert "| hybrid |" in capsys.readouterr().out

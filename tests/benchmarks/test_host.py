"""The host's time, with kernels that do nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import suites


def test_a_share_of_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "host.jsonl"
    args = ["--policies", "hybrid", "--steps", "2", "--json", str(record)]
    assert suites.main(["host", *args]) == 0
    (found,) = map(json.loads, record.read_text().splitlines())
    assert 0 < found["share"] < 1
    # Two segments in 32 blocks and two in the root: 4 launches in a reduction, 4 in a gather, and 2
    # in a backward that reads its messages again. The root needs one gather.
    assert found["tagc_started"] == 32 * 10 + 8
    assert "| hybrid |" in capsys.readouterr().out

"""SIGKILL in the middle of a step: the run resumes, and ends as if nothing had happened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import kill_train
from support.distributed import run_ranks
from support.kill_train import train
from support.layouts import Layout
from support.paths import ROOT


def killed(
    folder: Path, layout: Layout, policy: str, saver: str, kills: list[tuple[int, int]]
) -> list[dict]:
    """Every rank's weights after a run of `torchrun` in which ranks are killed."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(layout.ranks), "--max-restarts", str(len(kills))),
        *(kill_train.__file__, str(folder), "--api", layout.api, "--policy", policy),
        *("--saver", saver, *(("--per-host", str(layout.per_host)) if layout.per_host else ())),
        *("--kills", *(f"{rank}:{step}" for rank, step in kills)),
    ]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "tests"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Else ranks may find each other's addresses of before the restart (pytorch#135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("killed-*"))) == len(kills), done.stderr
    return [torch.load(folder / f"weights-{rank}.pt") for rank in range(layout.ranks)]


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["dcp", "safetensors"])
@pytest.mark.parametrize(
    ("layout", "policy", "kills"),
    [
        (Layout(2), "sketch shared", [(1, 7), (0, 9)]),
        (Layout(2), "warming up", [(0, 2), (1, 3)]),
        (Layout(4, per_host=2), "changes", [(3, 4), (0, 8)]),
        (Layout(3, "DDP"), "quantized average", [(2, 5), (2, 6)]),
        (Layout(4, "DDP", per_host=2), "sketch", [(1, 0), (2, 6)]),
    ],
    ids=str,
)
def test_kills_in_a_row(
    tmp_path: Path, layout: Layout, policy: str, kills: list[tuple[int, int]], saver: str
) -> None:
    """Killed again after it resumed, the run has the weights of an uninterrupted one, to the
    bit."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = run_ranks(train, layout.ranks, tmp_path / "whole", layout, policy, saver, None)
    resumed = killed(tmp_path / "killed", layout, policy, saver, kills)
    for mine, expected in zip(resumed, whole, strict=True):
        assert mine.pop("incarnation") == len(kills)
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)

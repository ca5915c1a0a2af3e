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
from support.paths import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("kills", [("1:7", "0:9"), ("0:2", "1:3")])
def test_kills_in_a_row(tmp_path: Path, kills: tuple[str, str]) -> None:
    """Killed again after it resumed, the run has the weights of an uninterrupted one, to the
    bit."""
    (tmp_path / "whole").mkdir()
    (folder := tmp_path / "killed").mkdir()
    whole = run_ranks(kill_train.train, 2, tmp_path / "whole")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", str(len(kills)), kill_train.__file__, str(folder), *kills),
    ]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "tests"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Else ranks may find each other's addresses of before the restart (pytorch#135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("killed-*"))) == len(kills), done.stderr
    for rank, expected in enumerate(whole):
        mine = torch.load(folder / f"weights-{rank}.pt")
        assert mine.pop("incarnation") == len(kills)
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)

"""SIGKILL in the middle of a step: the run resumes, and ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import kill_train
from support.distributed import run_ranks
from support.kill_train import CODECS, STEPS, train

SCRIPT = kill_train.__file__


def killed(
    folder: Path,
    codec: str,
    saver: str,
    kills: list[tuple[int, int]],
    hosts: int | None,
    ddp: bool,
) -> list[dict]:
    """Every rank's weights after a run of `torchrun` in which ranks are killed."""
    ranks = ranks_of(hosts, ddp)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), "--max-restarts", str(len(kills))),
        *(SCRIPT, str(folder), "--codec", codec, "--saver", saver),
        *(() if hosts is None else ("--hosts", str(hosts))),
        *(("--ddp",) if ddp else ()),
        *("--kills", *(f"{rank}:{step}" for rank, step in kills)),
    ]
    environment = os.environ | {
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
    return [torch.load(folder / f"weights-{rank}.pt") for rank in range(ranks)]


def ranks_of(hosts: int | None, ddp: bool) -> int:
    """Two hosts, or two ranks that send for themselves; with DDP three, which take two shots."""
    return 2 * hosts if hosts else 2 + ddp


def check(
    folder: Path,
    codec: str,
    saver: str,
    kills: list[tuple[int, int]],
    hosts: int | None = None,
    ddp: bool = False,
) -> None:
    """The weights of a killed run are those of an uninterrupted one, to the bit."""
    (folder / "whole").mkdir()
    (folder / "killed").mkdir()
    ranks = ranks_of(hosts, ddp)
    whole = run_ranks(train, ranks, folder / "whole", codec, saver, None, hosts, ddp)
    resumed = killed(folder / "killed", codec, saver, kills, hosts, ddp)
    for mine, expected in zip(resumed, whole, strict=True):
        assert mine.pop("incarnation") == len(kills)
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_a_killed_rank_resumes(tmp_path: Path) -> None:
    check(tmp_path, "sketch", "dcp", [(1, 7)])


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [None, 2])
@pytest.mark.parametrize("ddp", [False, True], ids=["FSDP2", "DDP"])
@pytest.mark.parametrize("seed", range(20))
def test_kills_in_a_row(tmp_path: Path, seed: int, hosts: int | None, ddp: bool) -> None:
    """Any codec, either saver, any rank and step, and killed again after it resumed; on hosts with
    changes of parameters, too."""
    draw = random.Random(seed)
    codecs = [codec for codec in CODECS if not (ddp and codec == "shared")]
    codec, saver = codecs[seed % len(codecs)], ("dcp", "safetensors")[seed // 4 % 2]
    first = draw.randrange(STEPS - 1)
    second = draw.randrange(first + 1, STEPS)
    ranks = ranks_of(hosts, ddp)
    kills = [(draw.randrange(ranks), first), (draw.randrange(ranks), second)]
    check(tmp_path, codec, saver, kills, hosts, ddp)

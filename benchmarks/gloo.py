"""Ranks of a benchmark on one machine."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def join(rank: int, ranks: int, folder: str | os.PathLike[str], *, minutes: float) -> None:
    """Make this process, with one thread, a rank of a gloo group whose ranks meet in ``folder``.

    Args:
        minutes: after which a collective fails that some rank does not take part in.
    """
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    timeout = timedelta(minutes=minutes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)

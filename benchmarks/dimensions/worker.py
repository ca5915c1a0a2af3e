"""One rank of a timed run, in a network namespace: ``worker.py JOB RECORD``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ..network.namespaces import INTERFACE
from .model import Size
from .training import Job, train


def main() -> None:
    """Train, and write rank 0's record."""
    said = json.loads(sys.argv[1])
    job = Job(**said | {"size": Size(**said["size"])})
    counter = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    record = train(job, lambda: int(counter.read_text()))
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Compile the CPU kernels that tests use, into numba's cache.

Numba takes seconds to compile each combination of dtypes, and later calls find it in the cache. A
run of all tests on several workers compiles in two processes before the workers start
(`compile_all`). Otherwise several workers would compile the same.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.trials import shards, trials
from tagc.ops import get_ops


def compile_all() -> None:
    """Compile in two processes; if one fails, the tests that need its kernels compile them."""
    where: Any = {"cwd": Path(__file__).parents[1]}
    processes = [
        subprocess.Popen([sys.executable, "-m", "support.compiling", part], **where)
        for part in "01"
    ]
    for process in processes:
        process.wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    compiled = [trial for trial in (*trials(1), shards(1000)) if trial.compiled]
    for trial in compiled[int(sys.argv[1]) :: 2]:
        for case in trial.cases():
            case.run(get_ops("cpu", "cpu"), Tensor.clone)

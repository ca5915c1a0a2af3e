"""What all tests share."""

import os
from pathlib import Path

import pytest
import torch

import tagc.ops
from support.distributed import collect_seldom

# Test processes share few cores, where OpenMP threads that spin for work cost more than they do.
torch.set_num_threads(1)
# A woken thread does not displace one that runs. Ranks share the cores, and gloo's thread spins
# while the thread that it displaced holds a connection's lock.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Have compiled CPU kernels where all tests run; none is older than any of its sources.

    numba looks at the file of the compiled function only, not at those it inlines from.
    """
    sources = Path(tagc.ops.__file__).parent / "cpu"
    newest = max(p.stat().st_mtime for p in sources.rglob("*.py"))
    for cached in sources.rglob("*.nb[ic]"):
        if cached.stat().st_mtime < newest:
            cached.unlink(missing_ok=True)
    config = session.config
    starts_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    # No file was named, and tests are not only listed.
    everywhere = config.args_source is not pytest.Config.ArgsSource.ARGS
    if starts_workers and everywhere and not config.getoption("collectonly"):
        from support.compiling import compile_all

        compile_all()


def pytest_collection_finish() -> None:
    """Thousands of tests, with their parameters, stay until the end."""
    collect_seldom()

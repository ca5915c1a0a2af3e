"""What all tests share."""

from pathlib import Path

import pytest
import torch

import tagc.ops

# Test processes share few cores, where OpenMP threads that spin for work cost more than they do.
torch.set_num_threads(1)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Have compiled CPU kernels where all tests run; none is older than any of its sources.

    numba looks at the file of the compiled function only, not at those it inlines from.
    """
    sources = Path(tagc.ops.__file__).parent / "cpu"
    newest = max(p.stat().st_mtime for p in sources.rglob("*.py"))
    for cached in sources.rglob("*.nb[ic]"):
        if cached.stat().st_mtime < newest:
            cached.unlink(missing_ok=True)
    if starts_workers(session.config) and runs_all(session.config):
        from support.compiling import compile_all

        compile_all()


def starts_workers(config: pytest.Config) -> bool:
    """Not one itself."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


def runs_all(config: pytest.Config) -> bool:
    """No file was named, and tests are not only listed."""
    everywhere = config.args_source is not pytest.Config.ArgsSource.ARGS
    return everywhere and not config.getoption("collectonly")

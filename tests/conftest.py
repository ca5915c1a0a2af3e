"""What all tests share."""

from pathlib import Path

import torch

import tagc.ops

# Test processes share few cores, where OpenMP threads that spin for work cost more than they do.
torch.set_num_threads(1)


def pytest_sessionstart() -> None:
    """Drop compiled CPU kernels that are older than any of their sources.

    numba looks at the file of the compiled function only, not at those it inlines from.
    """
    sources = Path(tagc.ops.__file__).parent / "cpu"
    newest = max(p.stat().st_mtime for p in sources.rglob("*.py"))
    for cached in sources.rglob("*.nb[ic]"):
        if cached.stat().st_mtime < newest:
            cached.unlink(missing_ok=True)

"""Before the first step: kernels are compiled, once a host, and compared with the reference.

A rehearsal of the plan's steps says which operators they will call, and with what. These are
compiled as they will be called, and then run on small inputs, of which the reference on the CPU
says what has to come out.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tagc.basics.locked import locked
from tagc.basics.progress import Progress
from tagc.collect import rehearse
from tagc.ops import Ops, compiles_ahead
from tagc.plan import Plan
from tagc.selfcheck import Recorder, check


def make_ready(plan: Plan, ops: Ops, device: torch.device, *, shown: bool) -> str | None:
    """Compile and check what the plan's units will call of ``ops``.

    Args:
        device: where they will run.
        shown: whether this rank says how far it is.

    Returns:
        What was checked, for people; None for an implementation whose operators are compiled
        otherwise.

    Raises:
        tagc.selfcheck.KernelError: if an operator does not give the reference's results.
    """
    if not compiles_ahead(ops):
        return None
    progress = Progress("operators compiled, which are then cached", shown=shown)
    recorder = Recorder(ops, progress.step)
    with _with_a_compiler(), locked(_folder(), "kernels"), _current(device):
        with ops.compiling_only():
            rehearse(plan, recorder.ops)
        progress.end()
        progress = Progress("operators checked", len(recorder.calls), shown=shown)
        checked = check(ops, device, recorder.calls, progress=lambda _: progress.step())
        progress.end()
    return f"kernels: {checked}"


@contextmanager
def _with_a_compiler() -> Iterator[None]:
    """Triton builds the launcher of each kernel with the host's C compiler."""
    try:
        yield
    except (RuntimeError, subprocess.CalledProcessError) as error:
        if isinstance(error, RuntimeError) and "C compiler" not in str(error):
            raise
        raise RuntimeError(
            "tagc: Triton could not build its kernel launcher on this host. It needs a C "
            "compiler and Python's headers: install gcc and python3-dev (or what your system calls "
            "them) on every host, or name a compiler by the environment variable CC. "
            f"TAGC_OPS=reference runs without, slowly. Triton's own words: {error}"
        ) from error


def _folder() -> Path:
    """A place of this user's: containers may have a number for one, and no name."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"tagc-{user}"


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Kernels are compiled for the current device."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield

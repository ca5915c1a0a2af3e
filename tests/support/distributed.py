"""Run a function on several ranks: one process per rank, gloo on loopback, and never a hang.

The processes live for the whole session, and every call gets its own process group, so a test costs
milliseconds, not an import of torch. After any failure they are killed, and the next call starts
new ones.

Ranks run the eager operators, unless a test asks for others. All operators give the same bits, as
`tests/ops` shows, but every combination of dtypes takes seconds to compile.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

# A rank left alone in a collective waits for this share of the time limit. Then it can report where
# it waited.
_GROUP_SHARE = 1 / 3
# Time for the other ranks to fail on their own once one has failed.
_GRACE = 5
# Imported once, for all forked ranks: each import takes a second or more.
_PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "tagc.ops.cpu",
    "tagc.handle.wrapper",
    "pytest",
    "hypothesis",
]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
}


class RanksError(AssertionError):
    """A function failed, or did not end, on some rank; the message has every rank's traceback."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list:
    """Return the results of ``fn(rank, *args)`` on every rank of a gloo group, in rank order.

    Args:
        fn: a function at the top level of a module. In it, warnings are errors, there is one
            thread, and the random seed is 0.
        args: picklable, as the results must be.
        timeout: seconds after which all ranks are killed, and their stacks shown.

    Raises:
        RanksError: if ``fn`` raised on any rank, or did not return in time.
    """
    return _pool(world_size).run(fn, world_size, args, timeout)


def on_ranks(*world_sizes: Any, timeout: float = 60) -> Callable[[Callable[..., None]], Any]:
    """Make a test of ``body(rank, world_size, ...)``, run on all ranks of each world size. If no
    size is given here, ``parametrize`` gives them.

    Further parameters of the body are parameters of the test. Its asserts are plain: pytest does
    not rewrite modules that the ranks import.
    """

    def decorate(body: Callable[..., None]) -> Any:
        names = list(inspect.signature(body).parameters.values())[1:]

        def test(**kwargs: Any) -> None:
            run_ranks(test, kwargs["world_size"], kwargs, timeout=timeout)

        # pytest reads the arguments from this signature; a rank finds the body by its name.
        test.__dict__.update(__signature__=inspect.Signature(names), body=body)
        for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(test, attribute, getattr(body, attribute))
        test.__dict__.update(pytestmark=getattr(body, "pytestmark", []))
        return pytest.mark.parametrize("world_size", world_sizes)(test) if world_sizes else test

    return decorate


def fails(call: Callable[[], Any]) -> tuple[str, str]:
    """The type and message of what `call` raises, as text that ranks can compare."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


@contextmanager
def as_on_nccl() -> Iterator[None]:
    """On this rank, gloo is taken for a backend that has collectives only, and adds up itself."""
    with patch("tagc.collect.transport._is_gloo", return_value=False):
        yield


class _Pool:
    def __init__(self, size: int) -> None:
        # Forked from a server that has imported torch, and started no thread.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        self._jobs = 0
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._log(rank)), daemon=True)
            with patch.dict(os.environ, _ENVIRONMENT):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def size(self) -> int:
        return len(self._processes)

    def run(self, fn: Callable[..., Any], world_size: int, args: tuple, timeout: float) -> list:
        self._jobs += 1
        store = str(Path(self._folder.name) / f"store{self._jobs}")
        for rank, pipe in enumerate(self._pipes[:world_size]):
            pipe.send_bytes(pickle.dumps((fn, args, rank, world_size, store, timeout)))
        answers = self._collect(world_size, timeout)
        if all(ok for ok, _ in answers):
            return [result for _, result in answers]
        self.kill()
        raise RanksError(
            "\n".join(
                f"rank {rank}: {'returned' if ok else text}"
                for rank, (ok, text) in enumerate(answers)
            )
        )

    def kill(self) -> None:
        """End all ranks, now."""
        if _pools and _pools[0] is self:
            _pools.clear()
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def _collect(self, world_size: int, timeout: float) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < world_size:
            waiting = [rank for rank in range(world_size) if rank not in answers]
            left = max(0.0, deadline - time.monotonic())
            ready = connection.wait([self._pipes[rank] for rank in waiting], left)
            if not ready:
                answers.update({rank: (False, self._stack(rank)) for rank in waiting})
            for rank in waiting:
                if self._pipes[rank] in ready:
                    answers[rank] = self._answer(rank)
                    if not answers[rank][0]:
                        deadline = min(deadline, time.monotonic() + _GRACE)
        return [answers[rank] for rank in range(world_size)]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionError):
            self._processes[rank].join(_GRACE)
            code = self._processes[rank].exitcode
            return False, f"died with exit code {code}\n{self._log(rank).read_text()}"

    def _stack(self, rank: int) -> str:
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)
        stack = self._log(rank).read_text()
        return f"did not end in time; its stack, innermost call first:\n{stack}"

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"log{rank}"


_pools: list[_Pool] = []


def _pool(world_size: int) -> _Pool:
    if _pools and _pools[0].size < world_size:
        _pools[0].kill()
    if not _pools:
        _pools.append(_Pool(max(4, world_size)))
    return _pools[0]


@atexit.register
def _kill_all() -> None:
    for pool in list(_pools):
        pool.kill()


def _serve(pipe: connection.Connection, log: Path) -> None:
    """A rank's process: take a job, answer, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    with log.open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file)
        torch.set_num_threads(1)
        collect_seldom()
        while True:
            try:
                job = pipe.recv_bytes()
            except EOFError:
                return
            try:
                answer = pickle.dumps((True, _run(*pickle.loads(job))))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(answer)


def _run(
    fn: Callable[..., Any],
    args: tuple,
    rank: int,
    world_size: int,
    store: str,
    timeout: float,
) -> Any:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout * _GROUP_SHARE),
    )
    try:
        torch.manual_seed(0)
        os.environ["TAGC_OPS"] = "reference"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            body = getattr(fn, "body", None)
            result = fn(rank, *args) if body is None else body(rank, **args[0])
        # If a rank left first, it would close connections that others still use.
        dist.barrier()
        return result
    finally:
        # After an error this closes the connections, so the others soon fail, too.
        dist.destroy_process_group()
        # DTensor's caches take a mesh for an earlier one of the same ranks, whose group is gone.
        _clear_sharding_prop_cache()
        _collect()


_modules = 0


def _collect() -> None:
    """Free groups of gloo that cycles keep, each with a thread that wakes up a hundred times a
    second. Modules that a job imported stay, and no later collection need look at them."""
    global _modules
    gc.collect()
    if len(sys.modules) > _modules:
        _modules = len(sys.modules)
        gc.freeze()


def collect_seldom() -> None:
    """Exclude imported objects from garbage collections, and make them rarer: they took about a
    fifth of the time of tests on ranks."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    # Otherwise libraries that count leftover objects at the end report a leak.
    atexit.register(gc.unfreeze)

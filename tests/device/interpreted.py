"""Triton's interpreter with the programs of a grid in other orders, and every access watched.

By itself the interpreter runs programs one after the other, first to last, which hides that one
needs what another writes. Here they run reversed, in random order, or interleaved: several at a
time, and at every access of memory another one may go on. Accesses are recorded and a launch fails
on one outside of its tensors and on races, see :mod:`.ptx.races`. The interpreter knows no threads:
element ``i`` of a tensor is taken to belong to the thread of element ``i`` of every other.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any
from unittest import mock

import numpy as np
import torch

from .ptx.faults import KernelError, OutOfBoundsError, RaceError
from .ptx.races import Access, Watch

ORDERS = ("reversed", "random", "interleaved")
# Elements of a program at most.
_LANES = 1 << 16
# Programs at a time.
_ALIVE = 6
Array = np.ndarray


class Launch:
    """Who accessed what in a launch."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._begins = np.array(sorted(begin for begin in storages if begin), np.int64)
        self._bytes = [_bytes(storages[int(begin)]) for begin in self._begins]
        self._watches = [Watch(len(data), shared=False) for data in self._bytes]
        self._now = 0
        self._since: Counter[Any] = Counter()
        self._programs: dict[Any, int] = {}
        self._lines: list[str] = []

    def barrier(self, program: Any) -> None:
        """What comes later in the program is ordered after what came before."""
        self._now += 1
        self._since[program] = self._now

    def access(
        self, kind: str, program: Any, pointer: Array, mask: Array, size: int,
        value: Array | None = None,
    ) -> None:  # fmt: skip
        """Check an access of elements of ``size`` bytes, and remember it."""
        at, lanes = pointer.reshape(-1), np.arange(pointer.size)
        active = np.broadcast_to(mask, pointer.shape).reshape(-1).astype(bool)
        at, lanes = at[active].astype(np.int64), lanes[active]
        if not len(at):
            return
        where = _where()
        region, place = self._region(at, size, where)
        watch, data = self._watches[region], self._bytes[region]
        number = self._programs.setdefault(program, len(self._programs))
        if where not in self._lines:
            self._lines.append(where)
        new = np.full(len(at), True)
        if value is not None:
            raw = np.broadcast_to(value, pointer.shape).reshape(-1)[active]
            raw = np.ascontiguousarray(raw).view(np.uint8).reshape(len(at), -1)
            new = (data[place[:, None] + np.arange(size)] != raw).any(1)
            self._check_duplicates(place, raw, where)
        for byte in range(size):
            cell = place + byte
            self._check(
                watch, kind, cell[new], self._who(number, program, lanes[new], where), where
            )
            watch.record(kind, cell, self._who(number, program, lanes, where))

    def _region(self, at: Array, size: int, where: str) -> tuple[int, Array]:
        region = np.searchsorted(self._begins, at, "right") - 1
        first = int(region[0])
        inside = (region == first) & (first >= 0)
        place = at - self._begins[first]
        inside &= place + size <= len(self._bytes[first])
        if not inside.all():
            raise OutOfBoundsError(f"{where}: {size} bytes outside of the tensors")
        return first, place

    def _who(self, number: int, program: Any, lanes: Array, where: str) -> Access:
        since = np.full(len(lanes), self._since[program])
        return Access(
            lanes + number * _LANES, np.full(len(lanes), number), since, since, self._now,
            self._lines.index(where), _LANES,
        )  # fmt: skip

    def _check_duplicates(self, place: Array, raw: Array, where: str) -> None:
        """Of one store, elements for the same place are the same."""
        _, first, inverse = np.unique(place, return_index=True, return_inverse=True)
        if (raw != raw[first][inverse.reshape(-1)]).any():
            raise RaceError(f"{where}: a store has several values for one place")

    def _check(self, watch: Watch, kind: str, cell: Array, who: Access, where: str) -> None:
        if not len(cell):
            return
        found, line, same = watch.find(kind, cell, who)
        if len(found):
            how = "without a barrier in between" if same[0] else "by another program"
            raise RaceError(
                f"{where}: {kind} races with an access at {self._lines[int(line[0])]} {how}"
            )


def _bytes(storage: Any) -> Array:
    raw: Any = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return np.frombuffer(raw, np.uint8)


def _where() -> str:
    """The kernel's line: the first caller that is neither Triton nor this file."""
    frame = sys._getframe(1)
    while frame is not None:
        path = PurePath(frame.f_code.co_filename)
        if path.name != PurePath(__file__).name and "triton" not in path.parts:
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class Watched:
    """The interpreter, watched.

    Attributes:
        order: of the programs of the launches to come, one of ``ORDERS``.
        launches: so far; ``several``: those of more than one program.
    """

    def __init__(self, order: str = "reversed", seed: int = 0) -> None:
        self.order, self.launches, self.several = order, 0, 0
        self._rng = random.Random(seed)
        self._launch: Launch | None = None
        self._turn: Callable[[], None] | None = None
        self._interpreter: Any = importlib.import_module("triton.runtime.interpreter")

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In place of the interpreter's own way to run a grid."""
        i = self._interpreter
        builder = i.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store
        rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas
        watched = self

        def size(pointer: Any) -> int:
            return np.dtype(i._get_np_dtype(pointer.get_element_ty())).itemsize

        def note(self, kind: str, pointer: Any, mask: Any, value: Any = None) -> None:
            if watched._turn:
                watched._turn()
            if watched._launch is not None:
                watched._launch.access(
                    kind, self.grid_idx, np.atleast_1d(pointer.data), mask, size(pointer), value
                )

        # Versions of Triton have other options between the first operands and the last.
        def masked_load(self, pointer, mask, other, *options):
            note(self, "watch" if options[-1] else "read", pointer, mask.data)
            return load(self, pointer, mask, other, *options)

        def masked_store(self, pointer, value, mask, *options):
            note(self, "write", pointer, mask.data, value.data)
            return store(self, pointer, value, mask, *options)

        def atomic(self, op, pointer, value, mask, *options):
            note(self, "update", pointer, mask.data)
            return rmw(self, op, pointer, value, mask, *options)

        def exchange(self, pointer, expected, value, *options):
            note(self, "update", pointer, np.bool_(True))
            return cas(self, pointer, expected, value, *options)

        def barrier(self) -> None:
            if watched._launch is not None:
                watched._launch.barrier(self.grid_idx)

        with (
            mock.patch.multiple(
                builder, create_masked_load=masked_load, create_masked_store=masked_store,
                create_atomic_rmw=atomic, create_atomic_cas=exchange, create_barrier=barrier,
            ),
            mock.patch.object(i.GridExecutor, "__call__", self._call()),
        ):  # fmt: skip
            yield

    def _call(self) -> Callable[..., None]:
        """As ``GridExecutor.__call__``, but for the order."""
        i, watched = self._interpreter, self

        def call(self, *args_dev: Any, **kwargs: Any) -> None:
            spec = inspect.getfullargspec(self.fn)
            kwargs = {k: v for k, v in kwargs.items() if k in (*spec.args, *spec.kwonlyargs)}
            args_hst, kwargs_hst = self._init_args_hst(args_dev, kwargs)
            scope = i._patch_lang(self.fn)
            try:
                named = inspect.getcallargs(self.fn, *args_hst, **kwargs_hst)
                tensors = [v for v in named.values() if isinstance(v, torch.Tensor)]
                args = {
                    n: v if n in self.constexprs else i._implicit_cvt(v) for n, v in named.items()
                }
                grid: Any = self.grid(args) if callable(self.grid) else self.grid
                grid = (*grid, 1, 1)[:3]
                i.interpreter_builder.set_grid_dim(*grid)
                watched._launch = Launch(tensors)
                watched._run(lambda: self.fn(**args), grid)
            finally:
                watched._launch = None
                scope.restore()
            self._restore_args_dev(args_dev, args_hst, kwargs, kwargs_hst)

        return call

    def _run(self, program: Callable[[], None], grid: tuple[int, ...]) -> None:
        ids = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
        self.launches += 1
        self.several += len(ids) > 1
        ids.reverse()
        if self.order != "reversed":
            self._rng.shuffle(ids)
        builder = self._interpreter.interpreter_builder
        if self.order == "interleaved" and len(ids) > 1:
            self._interleave(program, ids, builder)
            return
        for place in ids:
            builder.set_grid_idx(*place)
            program()

    def _interleave(self, program: Callable[[], None], ids: list[Any], builder: Any) -> None:
        """One thread for each program; which one goes on is drawn at every access."""
        back = threading.Semaphore(0)
        failures: list[BaseException] = []
        waiting, alive = list(ids), []

        def turn() -> None:
            me = threading.current_thread()
            if isinstance(me, _Program):
                back.release()
                me.go.acquire()
                builder.set_grid_idx(*me.place)

        self._turn = turn
        try:
            while waiting or alive:
                while waiting and len(alive) < _ALIVE and not failures:
                    alive.append(_Program(waiting.pop(), program, back, failures))
                    alive[-1].start()
                thread = self._rng.choice(alive)
                builder.set_grid_idx(*thread.place)
                thread.go.release()
                back.acquire()
                if thread.done:
                    thread.join()
                    alive.remove(thread)
                if failures:
                    break
        finally:
            self._turn = None
        if failures:
            raise failures[0]


class _Program(threading.Thread):
    """A program that waits for its turns; one that never gets another ends with the process."""

    def __init__(
        self, place: Any, program: Callable[[], None], back: threading.Semaphore,
        failures: list[BaseException],
    ) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self.place, self.go, self.done = place, threading.Semaphore(0), False
        self._program, self._back, self._failures = program, back, failures

    def run(self) -> None:
        self.go.acquire()
        try:
            self._program()
        except (Exception, KernelError) as failure:
            self._failures.append(failure)
        self.done = True
        self._back.release()

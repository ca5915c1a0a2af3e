"""Ranks that save meet over the store: no collective waits while files are written."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.states import POLICIES, run, shared_folder, wrapped
from tagc.checkpoint import files
from tagc.collect import Meeting, meeting

COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(("all_", "barrier", "broadcast", "gather", "reduce", "scatter", "monitored"))
    and callable(getattr(dist, name))
]


@contextmanager
def no_collectives() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective")

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(patch.object(dist, name, refuse))
        yield


@on_ranks(3)
def test_no_collective_from_the_first_file_on(rank: int, world_size: int) -> None:
    assert {"all_gather_object", "barrier", "all_reduce"} <= {*COLLECTIVES}
    model = wrapped(POLICIES["quantized residual"])
    compressor = tagc.compressor(model)
    run(model, rank, range(2))
    with shared_folder() as folder, ExitStack() as stack:

        def write(*args: Any) -> str:
            stack.enter_context(no_collectives())
            return write_rank(*args)

        write_rank = files.write_rank
        with stack, patch.object(files, "write_rank", write):
            compressor.save(folder)
            with pytest.raises(AssertionError, match="a collective"):
                dist.barrier()
        saved = compressor.state_dict()
        run(model, rank, range(2, 3))
        compressor.load(folder)
        equal(compressor.state_dict(), saved)


@on_ranks(3)
@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_does_not_come_is_named(rank: int, world_size: int, gone: int) -> None:
    """It is stopped while it writes; others raise, and the former save stays."""

    class Stopped(BaseException):
        pass

    def stop(*_: Any) -> None:
        raise Stopped

    model = wrapped(POLICIES["quantized residual"])
    compressor = tagc.compressor(model)
    run(model, rank, range(2))
    with shared_folder() as folder:
        compressor.save(folder)
        saved = compressor.state_dict()
        run(model, rank, range(2, 3))
        with patch.object(meeting, "PATIENCE", timedelta(seconds=0.5)):
            if rank == gone:
                with patch.object(files, "write_rank", stop), pytest.raises(Stopped):
                    compressor.save(folder)
            else:
                with pytest.raises(RuntimeError, match=f"rank {gone} did not come within") as error:
                    compressor.save(folder)
                assert "are left in" in error.value.__notes__[0]
        dist.barrier()
        compressor.load(folder)
        equal(compressor.state_dict(), saved)


def meet(ranks: list[int], name: str = "test") -> Meeting:
    return Meeting(name, ranks, doing="testing", remedy="Do alike")


@on_ranks(2)
def test_nothing_in_the_store_is_unpickled(rank: int, world_size: int) -> None:
    """A pickle may run any code."""
    tested = meet([0, 1])
    if rank == 0:
        with pytest.raises(ValueError, match="can't decode byte 0x80"):
            tested.together("first", lambda: None)
    else:
        message: Any = pickle.dumps({"progress": "first", "error": None, "result": None})
        tested._store.set("1/1", message)


def fail() -> None:
    raise ValueError("no luck")


@on_ranks(3)
@pytest.mark.parametrize(
    ("progress", "complaint"),
    [
        ("same", "testing failed on rank 1: ValueError: no luck"),
        ("other", "progress differs .* rank 1 has other.* Do alike"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(
    rank: int, world_size: int, progress: str, complaint: str
) -> None:
    tested = meet([0, 1, 2])
    if rank == 1:
        fails = progress == "same"
        with pytest.raises(ValueError if fails else RuntimeError):
            tested.together(progress, fail if fails else lambda: None)
    else:
        with pytest.raises(RuntimeError, match=complaint):
            tested.together("same", lambda: None)
    # They are still together.
    assert tested.together("next", lambda: rank)[rank] == rank


@on_ranks(2)
def test_a_store_that_is_gone(rank: int, world_size: int) -> None:
    tested = meet([0, 1], f"alone {rank}")

    def broken(*_: Any) -> bool:
        raise dist.DistNetworkError("connection reset")

    with (
        patch.object(type(tested._store), "check", broken),
        pytest.raises(RuntimeError, match=r"store of the process group does not answer .*reset"),
    ):
        tested.together("first", lambda: None)
    with pytest.raises(RuntimeError, match="does not answer"):
        tested.together("second", lambda: None)

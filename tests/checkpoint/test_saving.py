"""A save that fails leaves the one before, and nothing of its own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.marks import slow
from support.states import POLICIES, run, shared_folder, wrapped
from tagc.checkpoint import StateError, files
from tagc.checkpoint.files import check_save, write_rank
from tagc.checkpoint.format import StateHeader
from tagc.collect import Meeting, meeting

# What saving raises where it fails, and on the other ranks.
ERRORS = (OSError, StateError, RuntimeError)


def names_in(folder: Path) -> list[str]:
    dist.barrier()
    names = sorted(file.name for file in folder.iterdir())
    dist.barrier()
    return names


class Run:
    """A model that was saved once, and has trained since."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder, self.steps = rank, folder, 4
        self.model = wrapped(POLICIES["quantized residual"])
        self.compressor = tagc.compressor(self.model)
        run(self.model, rank, range(2))
        self.compressor.save(folder)
        self.saved, self.names = self.compressor.state_dict(), names_in(folder)
        run(self.model, rank, range(2, 4))

    def check_former(self) -> None:
        """The folder has the former save, and nothing else."""
        assert names_in(self.folder) == self.names
        now = self.compressor.state_dict()
        self.compressor.load(self.folder)
        equal(self.compressor.state_dict(), self.saved)
        self.compressor.load_state_dict(now)

    def check_next(self) -> None:
        """The next save works."""
        now = self.compressor.state_dict()
        self.compressor.save(self.folder)
        names = names_in(self.folder)
        assert len(names) == len(self.names)
        assert names != self.names
        run(self.model, self.rank, range(4, 5))
        self.compressor.load(self.folder)
        equal(self.compressor.state_dict(), now)


STEPS = {"write_rank": 1, "check_save": 0, "commit": 0}


@on_ranks(2)
@pytest.mark.parametrize(
    ("step", "done"),
    [
        ("check_save", False),
        slow("write_rank", True),
        slow("commit", False),
    ],
)
def test_every_step_can_fail(rank: int, world_size: int, step: str, done: bool) -> None:
    """Before it did anything, or after; with a former save, or without one."""
    real: Callable[..., Any] = getattr(files, step)

    def fail(*args: Any) -> None:
        if done:
            real(*args)
        raise OSError("no space left on device")

    with shared_folder() as folder:
        tested = Run(rank, folder / "second")
        (folder / "first").mkdir(exist_ok=True)
        for name in ("second", "first"):
            with pytest.MonkeyPatch.context() as patch:
                if rank == STEPS[step]:
                    patch.setattr(files, step, fail)
                with pytest.raises(ERRORS, match="no space left on device"):
                    tested.compressor.save(folder / name)
        tested.check_former()
        assert names_in(folder / "first") == []
        tested.check_next()


@on_ranks(2)
def test_files_that_the_marker_may_name_stay(rank: int, world_size: int) -> None:
    """If the system fails after the marker was replaced, the new save is whole."""
    commit = files.commit

    def fails(*args: Any) -> None:
        commit(*args)
        raise OSError("the disk is gone")

    with shared_folder() as folder, pytest.MonkeyPatch.context() as patch:
        tested = Run(rank, folder)
        now = tested.compressor.state_dict()
        patch.setattr(files, "commit", fails)
        with pytest.raises(ERRORS, match="the disk is gone") as caught:
            tested.compressor.save(folder)
        assert "files of this save are left" in "".join(caught.value.__notes__)
        run(tested.model, rank, range(4, 5))
        tested.compressor.load(folder)
        equal(tested.compressor.state_dict(), now)


# What the committing rank looks at

SAVE = "0123456789abcdef"


def written(folder: Path) -> dict[int, str]:
    """Files of two ranks, by `write_rank`."""
    return {rank: write_rank(folder, SAVE, header(rank), tensors(rank)) for rank in range(2)}


def header(rank: int, step: int = 3) -> StateHeader:
    return StateHeader(
        policy="p", policy_hash="a" * 64, layout="b" * 64, world_size=2, rank=rank, step=step
    )


def tensors(rank: int) -> dict[str, torch.Tensor]:
    return {"residual.gradients.p": torch.full((100,), float(rank))}


def test_the_files_of_all_ranks_are_looked_at(tmp_path: Path) -> None:
    digests = written(tmp_path)
    check_save(tmp_path, SAVE, digests, 2)
    # Those of different steps are not of one save, whatever their digests.
    other_step = write_rank(tmp_path, SAVE, header(1, step=4), tensors(1))
    with pytest.raises(StateError, match="of different saves"):
        check_save(tmp_path, SAVE, digests | {1: other_step}, 2)
    write_rank(tmp_path, SAVE, header(1), tensors(2))
    with pytest.raises(StateError, match="not the file that rank 1 wrote"):
        check_save(tmp_path, SAVE, digests, 2)
    (file,) = tmp_path.glob("rank-00001-*")
    file.unlink()
    with pytest.raises(StateError, match="do not share this folder"):
        check_save(tmp_path, SAVE, digests, 2)


def test_a_file_is_read_after_it_was_written(tmp_path: Path) -> None:
    def flips(content: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        save_file(content, file, metadata)
        damaged = bytearray(file.read_bytes())
        damaged[-1] ^= 1
        file.write_bytes(damaged)

    save_file = files.save_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "save_file", flips)
        with pytest.raises(StateError, match="damaged"):
            write_rank(tmp_path, SAVE, header(0), tensors(0))
    assert not list(tmp_path.iterdir())


# Ranks that save meet over the store: no collective waits while files are written


@on_ranks(3)
def test_a_rank_that_does_not_come_is_named(rank: int, world_size: int) -> None:
    """It is stopped while it writes; others raise, and the former save stays. (No collective waits
    for it.)"""
    gone = 2

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


@on_ranks(3)
def test_a_rank_that_is_somewhere_else_is_named(rank: int, world_size: int) -> None:
    tested = Meeting("test", [0, 1, 2], doing="testing", remedy="Do alike")
    with pytest.raises(RuntimeError, match=r"progress differs .* rank 1 has other.* Do alike"):
        tested.together("other" if rank == 1 else "same", lambda: None)
    # They are still together.
    assert tested.together("next", lambda: rank)[rank] == rank

"""Files of a state that are not what they should be are refused, on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support.distributed import run_ranks
from support.states import (
    POLICIES,
    loads_badly,
    train_and_save,
)
from tagc.checkpoint.files import MARKER


def damaged(rank: int, folder: Path, policy: dict) -> tuple[str, str]:
    return loads_badly(rank, "safetensors", policy, folder)


def of_rank(folder: Path, rank: int) -> Path:
    (file,) = folder.glob(f"rank-{rank:05d}-*.safetensors")
    return file


def drop(folder: Path) -> None:
    of_rank(folder, 1).unlink()


def flip(folder: Path) -> None:
    file = of_rank(folder, 1)
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def uncommitted(folder: Path) -> None:
    (folder / MARKER).unlink()


DAMAGES: dict[Callable[[Path], None], str] = {
    drop: r"rank-00001-of-00002-\w+\.safetensors: there is no such file",
    flip: r"rank-00001-of-00002-\w+\.safetensors: damaged",
    uncommitted: r"holds no complete save",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_files_are_refused_on_all_ranks(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run_ranks(train_and_save, 2, "safetensors", POLICIES["quantized residual"], tmp_path)
    damage(tmp_path)
    said = run_ranks(damaged, 2, tmp_path, POLICIES["quantized residual"])
    assert re.search(DAMAGES[damage], said[1][1], re.DOTALL), said
    assert said[1][0] == "StateError"
    # Rank 0 fails too: by what it sees itself, or by what it hears of rank 1.
    assert said[0][0] in ("StateError", "RuntimeError")
    assert re.search(DAMAGES[damage], said[0][1], re.DOTALL), said

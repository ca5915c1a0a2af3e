"""Files of a state that are not what they should be are refused, on all ranks."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

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


def cut(folder: Path) -> None:
    file = of_rank(folder, 1)
    file.write_bytes(file.read_bytes()[:-10])


def flip(folder: Path) -> None:
    file = of_rank(folder, 1)
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def older(folder: Path) -> None:
    """The file of another save under this one's name."""
    file = of_rank(folder, 1)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file), file, metadata | {"save": "0" * 16})


def newer(folder: Path) -> None:
    file = of_rank(folder, 1)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file), file, metadata | {"format": "2"})


def uncommitted(folder: Path) -> None:
    (folder / MARKER).unlink()


def elsewhere(folder: Path) -> None:
    said = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps(said | {"save": "../../etc"}))


DAMAGES: dict[Callable[[Path], None], str] = {
    drop: r"rank-00001-of-00002-\w+\.safetensors: there is no such file",
    cut: r"rank-00001-of-00002-\w+\.safetensors: not a safetensors file",
    flip: r"rank-00001-of-00002-\w+\.safetensors: damaged",
    older: r"rank-00001-of-00002-\w+\.safetensors: not a file of save",
    newer: r"rank-00001-of-00002-\w+\.safetensors: not a state of tagc .* format is '2'",
    uncommitted: r"holds no complete save",
    elsewhere: r"tagc.json: save is '../../etc'",
}


@pytest.mark.some(3)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_files_are_refused_on_all_ranks(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run_ranks(train_and_save, 2, "safetensors", POLICIES["sketch"], tmp_path)
    damage(tmp_path)
    said = run_ranks(damaged, 2, tmp_path, POLICIES["sketch"])
    assert re.search(DAMAGES[damage], said[1][1], re.DOTALL), said
    assert said[1][0] == "StateError"
    # Rank 0 fails too: by what it sees itself, or by what it hears of rank 1.
    assert said[0][0] in ("StateError", "RuntimeError")
    assert re.search(DAMAGES[damage], said[0][1], re.DOTALL), said


class Evil:
    def __reduce__(self) -> tuple:
        return (print, ("code from a checkpoint",))


def test_an_index_runs_no_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(train_and_save, 2, "dcp", POLICIES["sketch"], tmp_path)
    index = tmp_path / ".metadata"
    content = pickle.loads(index.read_bytes())
    content.planner_data = Evil()
    index.write_bytes(pickle.dumps(content))
    for kind, message in run_ranks(damaged, 2, tmp_path, POLICIES["sketch"]):
        assert kind == "StateError"
        assert "builtins.print" in message
    assert "code from a checkpoint" not in capfd.readouterr().out

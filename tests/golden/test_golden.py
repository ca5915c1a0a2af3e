"""What was sent and saved when the golden files were made is what is sent and resumed to now."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from golden.messages import DTYPES, RANKS, hashes
from golden.resumed import FORMATS, resumed
from support.marks import slow


def read(name: str) -> dict[str, str]:
    """What is in a file, by case."""
    lines = (Path(__file__).parent / name).read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        slow(ranks, dtype) if ranks > 2 and dtype != torch.float32 else (ranks, dtype)
        for ranks, dtype in product(RANKS, DTYPES)
    ],
)
def test_codecs_send_and_add_up_the_same(ranks: int, dtype: torch.dtype) -> None:
    end = f" | {str(dtype).removeprefix('torch.')} | {ranks} ranks"
    golden = {case: sent for case, sent in read("messages.txt").items() if case.endswith(end)}
    assert hashes(ranks, dtype) == golden


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoints are, once they are made."""
    return tmp_path_factory.mktemp("golden") / "checkpoints"


@pytest.mark.parametrize("form", FORMATS)
def test_checkpoints_resume_to_the_bit(folder: Path, form: str) -> None:
    assert resumed(folder, form) == read("resumed.txt")

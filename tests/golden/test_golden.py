"""What was sent and saved when the golden files were made is what is sent and loaded now."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from golden.checkpoints import CASES, FORMATS
from golden.identities import identities
from golden.make import read, resumed, unpack
from golden.messages import DTYPES, RANKS, hashes
from support.marks import slow


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        slow(ranks, dtype) if ranks > 2 and dtype != torch.float32 else (ranks, dtype)
        for ranks, dtype in product(RANKS, DTYPES)
    ],
)
def test_codecs_send_and_add_up_the_same(ranks: int, dtype: torch.dtype) -> None:
    end = f" | {str(dtype).removeprefix('torch.')} | {ranks} ranks"
    golden = {case: said for case, said in read("messages.txt").items() if case.endswith(end)}
    assert hashes(ranks, dtype) == golden


def test_policies_and_plans_have_the_same_hashes() -> None:
    assert identities() == read("identities.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("golden")
    unpack(found)
    return found


@pytest.mark.parametrize("form", FORMATS)
def test_checkpoints_resume_to_the_bit(folder: Path, form: str) -> None:
    golden = read("resumed.txt")
    policies = sorted({case.partition(" | ")[0] for case in golden})
    assert policies == list(CASES)
    assert resumed(folder, policies, form) == golden

"""The Triton operators give the bits of the reference, for generated inputs of many sizes.

Every case runs interpreted on the CPU, compiled and emulated, and, where there is a GPU, natively
(``-m gpu``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from support.kernel_cases import Cases, kernels
from support.trials import SHARDS, SIZES, Trial, shards, trials
from tagc.selfcheck.inputs import PLACEMENTS

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

CASES = Cases()
PLACED = ("not aligned", "aligned", "messages in wider rows, not aligned")


def case(trial: Trial) -> None:
    # The placement of tensors alternates between calls, and between cases.
    turn = len(CASES) % len(PLACED)

    @CASES(trial.name)
    def _(device: str) -> None:
        trial.check(kernels("ops"), torch.device(device), *PLACED[turn:], *PLACED[:turn])


for of_format in trials(SIZES):
    for one in of_format.parts(SIZES):
        case(one)

# --- interpreted in a process of its own, compiled and emulated, natively ----------------------

FEW = (
    "blocks 4 float16 bfloat16, 3",
    "matrix 1 8 float32 float32, 1",
    "matrix 2 1 float16 bfloat16, 1",
    "lag bfloat16, 3",
    "steer 0, 1",
)
# Each compiles for ten seconds.
LARGE = ("sketch int8x4 bfloat16 bfloat16, 2",)
outcome, test_interpreted, test_compiled, test_on_a_gpu = CASES.tests(__file__, *FEW, more=LARGE)


@pytest.mark.gpu
@pytest.mark.parametrize("trial", trials(), ids=lambda trial: trial.name)
def test_all_sizes(trial: Trial):
    trial.check(kernels("ops"), torch.device("cuda"), *PLACEMENTS)


@pytest.mark.gpu
@pytest.mark.parametrize("numel", SHARDS)
def test_shards_of_several_tiles(numel: int):
    shards(numel).check(kernels("ops"), torch.device("cuda"), *PLACEMENTS)


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))

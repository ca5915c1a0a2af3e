"""The scripts of `examples/recipes`, run as a user would, by `make test-recipes`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.paths import EXAMPLES

RECIPES = EXAMPLES / "recipes"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = pytest.mark.recipes


def run(*command: str) -> str:
    """Output of a Python command, which must succeed."""
    done = attempt(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def attempt(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def recipe(name: str) -> str:
    return str(RECIPES / f"{name}.py")


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss ([0-9.]+)", output)]


def test_plain_torch_learns_and_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = run(*TORCHRUN, recipe("plain"), "--steps", "30")
    assert losses(whole)[-1] < losses(whole)[0]
    folder = ["--checkpoint", str(tmp_path / "checkpoint")]
    run(*TORCHRUN, recipe("plain"), "--steps", "20", *folder)
    rest = run(*TORCHRUN, recipe("plain"), "--steps", "30", *folder)
    assert losses(rest) == losses(whole)[-1:]


def test_lightning_fabric() -> None:
    pytest.importorskip("lightning", reason="pip install tagc[recipes]")
    check_learnt(run(recipe("fabric"), "--steps", "60"))


def test_transformers_model_from_a_config() -> None:
    pytest.importorskip("transformers", reason="pip install tagc[recipes]")
    output = run(*TORCHRUN, recipe("transformers_model"), "--steps", "60")
    assert "model.layers.1.mlp.down_proj.weight" in output
    check_learnt(output)


def test_accelerate() -> None:
    pytest.importorskip("accelerate", reason="pip install tagc[recipes]")
    if torch.cuda.device_count() > 1:
        launch = ["-m", "accelerate.commands.launch", "--num_processes", "2"]
        check_learnt(run(*launch, recipe("accelerate_fsdp2"), "--steps", "60"))
        return
    # Without GPUs Accelerate replicates the model, and tagc says what to do.
    done = attempt(*TORCHRUN, recipe("accelerate_fsdp2"), "--steps", "2", ACCELERATE_USE_CPU="true")
    assert done.returncode != 0
    assert "DistributedDataParallel" in done.stderr
    assert "fully_shard" in done.stderr


def check_learnt(output: str) -> None:
    """Less than the loss of a guess, and fewer bytes."""
    assert losses(output)[-1] < 0.95 * float(torch.tensor(64.0).log())
    ratio = re.search(r"([0-9.]+) times fewer", output)
    assert ratio is not None
    assert float(ratio[1]) > 4

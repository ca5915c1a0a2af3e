"""The scripts of `examples/recipes`, run as a user would, by `make test-recipes`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from support.paths import EXAMPLES

RECIPES = EXAMPLES / "recipes"
SUPPORT = Path(__file__).parent / "support"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# Up to five runs of 20 seconds in a test, or of a minute on a busy machine.
pytestmark = [pytest.mark.recipes, pytest.mark.timeout(2400)]


def run(*command: str) -> str:
    """Output of a Python command, which must succeed."""
    done = attempt(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def attempt(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # In a session of its own: Lightning starts ranks that outlive a killed rank 0.
    process = subprocess.Popen(
        [sys.executable, *command], env=environment, start_new_session=True, **pipes
    )
    try:
        out, err = process.communicate(timeout=600)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def recipe(name: str) -> str:
    return str(RECIPES / f"{name}.py")


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"\bloss ([0-9.]+)", output)]


@pytest.mark.parametrize("how", [[], ["--ddp"]], ids=["FSDP2", "DDP"])
def test_plain_torch_learns_and_resumes_as_if_it_had_not_stopped(
    tmp_path: Path, how: list[str]
) -> None:
    command = [*TORCHRUN, recipe("plain"), *how]
    whole = run(*command, "--steps", "30")
    assert losses(whole)[-1] < losses(whole)[0]
    folder = ["--checkpoint", str(tmp_path / "checkpoint")]
    run(*command, "--steps", "20", *folder)
    rest = run(*command, "--steps", "30", *folder)
    assert losses(rest) == losses(whole)[-1:]


def test_sites_learn_and_resume_as_if_they_had_not_stopped(tmp_path: Path) -> None:
    command = [*TORCHRUN, recipe("sites")]
    whole = run(*command, "--steps", "80")
    assert losses(whole)[-1] < losses(whole)[0]
    assert "exchanges 2" in whole
    folder = ["--checkpoint", str(tmp_path / "checkpoint")]
    run(*command, "--steps", "48", *folder)
    assert losses(run(*command, "--steps", "80", *folder)) == losses(whole)[-2:]


def test_sites_go_on_without_one_that_was_killed() -> None:
    """It is started again, continues from the others, and ends with them."""
    command = [sys.executable, "-u", recipe("elastic_sites"), "--sites", "3", "--steps", "256"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    lines = []
    try:
        assert process.stdout is not None
        with process.stdout as stdout:
            for line in stdout:
                lines.append(line)
                found = re.match(r"process (\d+), step (\d+)", line)
                if found and int(found[2]) == 48 and "killed" not in lines:
                    lines.append("killed")
                    os.kill(int(found[1]), signal.SIGKILL)
        assert process.wait() == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    whole = "".join(lines)
    assert "a site died: start it again" in whole
    assert ", 2 sites" in whole
    assert whole.count("steps 256, exchanges") == 3
    assert "continued from another site" in whole
    assert losses(whole)[-1] < losses(whole)[0] / 10


def resumes(tmp_path: Path, *command: str) -> str:
    """Check that 8 steps and then 4 print the losses of 12; the output of the 12."""
    whole = run(*command, "--steps", "12")
    assert len(losses(whole)) == 12
    assert losses(whole)[-1] < losses(whole)[0]
    folder = tmp_path / "checkpoint"
    first = run(*command, "--steps", "8", "--checkpoint", str(folder))
    assert losses(first) == losses(whole)[:8]
    if folder.is_dir():
        shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("tagc"))
    else:  # residuals lie beside it
        shutil.copy(folder, tmp_path / "copy")
    rest = run(*command, "--steps", "12", "--checkpoint", str(folder), *starting_at(command, 8))
    assert losses(rest) == losses(whole)[8:]
    # What the residuals owe is seen in the losses: without them training goes on otherwise.
    copy = ["--checkpoint", str(tmp_path / "copy"), *starting_at(command, 8)]
    done = attempt(*command, "--steps", "12", *copy)
    assert done.returncode == 0, done.stderr
    assert "as in a checkpoint of training without tagc" in done.stderr
    assert losses(done.stdout)[0] == losses(whole)[8]
    assert losses(done.stdout)[1:] != losses(whole)[9:]
    return whole


def starting_at(command: Sequence[str], step: int) -> list[str]:
    """Accelerate's checkpoints do not say which step they are of."""
    return ["--from-step", str(step)] if recipe("accelerate_fsdp2") in command else []


def test_lightning_fabric_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="pip install tagc[recipes]")
    check_fewer_bytes(resumes(tmp_path, recipe("fabric")))


@pytest.mark.parametrize("how", [[], ["--ddp"]], ids=["FSDP2", "DDP"])
def test_lightnings_trainer_resumes_as_if_it_had_not_stopped(
    tmp_path: Path, how: list[str]
) -> None:
    pytest.importorskip("lightning", reason="pip install tagc[recipes]")
    check_fewer_bytes(resumes(tmp_path, recipe("lightning_trainer"), *how))


def test_transformers_model_from_a_config() -> None:
    pytest.importorskip("transformers", reason="pip install tagc[recipes]")
    output = run(*TORCHRUN, recipe("transformers_model"), "--steps", "60")
    assert "model.layers.{0–1}.mlp.down_proj.weight" in output
    assert losses(output)[-1] < 0.95 * float(torch.tensor(64.0).log())  # the loss of a guess
    check_fewer_bytes(output)


@pytest.mark.parametrize(
    "how", [[], ["--ddp", "--policy", "one-bit", "--keep-rates"]], ids=["FSDP2", "DDP"]
)
def test_transformers_trainer_resumes_as_if_it_had_not_stopped(
    tmp_path: Path, how: list[str]
) -> None:
    pytest.importorskip("transformers", reason="pip install tagc[recipes]")
    pytest.importorskip("accelerate", reason="pip install tagc[recipes]")
    stand_in = [] if how else on_cpu()
    command = [*TORCHRUN, *stand_in, recipe("transformers_trainer"), *how, "--steps", "12"]
    whole = run(*command, "--output", str(tmp_path / "whole"))
    assert len(losses(whole)) == 12
    check_fewer_bytes(whole)
    run(*command, "--stop-after", "8", "--output", str(tmp_path / "parts"))
    saved = tmp_path / "parts" / "checkpoint-8"
    assert (saved / "tagc" / "tagc.json").exists()
    rest = run(*command, "--resume", "--output", str(tmp_path / "parts"))
    assert losses(rest) == losses(whole)[8:]


@pytest.mark.parametrize("how", ["FSDP2", "DDP"])
def test_accelerate_resumes_as_if_it_had_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    pytest.importorskip("accelerate", reason="pip install tagc[recipes]")
    if how == "DDP":  # what Accelerate takes without GPUs
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    stand_in = on_cpu() if how == "FSDP2" else []
    check_fewer_bytes(resumes(tmp_path, *TORCHRUN, *stand_in, recipe("accelerate_fsdp2")))


TITAN = [
    *("--module", "torchtitan_trainer"),
    *("--training.seq-len", "32", "--training.local-batch-size", "2"),
    *("--parallelism.spmd-backend", "partial_dtensor"),  # torch 2.13 cannot do more
]


def titan(folder: Path, *options: str) -> list[float]:
    """The losses of a run of torchtitan in a folder."""
    script = [*TORCHRUN, str(SUPPORT / "torchtitan_on_cpu.py"), str(folder), *TITAN, *options]
    done = attempt(*script, PYTHONPATH=str(RECIPES), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    # Every rank prints the same line.
    by_step = dict(re.findall(r"step: +([0-9]+) +loss: +([0-9.]+)", plain))
    return [float(loss) for loss in by_step.values()]


def test_torchtitans_debug_model_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="pip install tagc[recipes]")
    options = ["--config", "llama3", "--training.steps", "4"]
    options += ["--checkpoint.enable", "--checkpoint.interval", "2"]
    whole = titan(tmp_path, *options)
    assert len(whole) == 4
    assert whole[-1] < whole[0]
    shutil.rmtree(tmp_path / "outputs" / "checkpoint" / "step-4")
    assert titan(tmp_path, *options) == whole[2:]


@pytest.mark.parametrize(("config", "dimension"), [("llama3", "tensor"), ("deepseek_v3", "expert")])
def test_torchtitans_other_dimensions(tmp_path: Path, config: str, dimension: str) -> None:
    """Close to what torchtitan alone gives: the first losses differ by the codes only."""
    pytest.importorskip("torchtitan", reason="pip install tagc[recipes]")
    options = ["--config", config, f"--parallelism.{dimension}-parallel-degree", "2"]
    options += ["--training.steps", "3", "--debug.seed", "1"]
    options += ["--training.disable-cuda-graphs"] * (dimension == "expert")
    dense, coded = (
        titan(tmp_path, *options, "--tagc-policy", policy) for policy in ("dense", "hybrid-3d")
    )
    assert coded != dense
    assert coded[0] == pytest.approx(dense[0], rel=0.002)
    assert coded[-1] == pytest.approx(dense[-1], rel=0.03)


def on_cpu() -> list[str]:
    """What runs a script with an Accelerate that takes FSDP on CPUs; nothing with GPUs."""
    return [] if torch.cuda.device_count() > 1 else [str(SUPPORT / "accelerate_on_cpu.py")]


def check_fewer_bytes(output: str) -> None:
    ratio = re.search(r"([0-9.]+) times fewer", output)
    assert ratio is not None
    assert float(ratio[1]) > 4

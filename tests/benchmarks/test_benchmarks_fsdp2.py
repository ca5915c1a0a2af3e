"""Training steps on one device, and what they say of runs that go wrong."""

from __future__ import annotations

import pytest
import torch

from benchmarks import fsdp2, suites


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_both_runs_train_on_a_cpu(capsys):
    assert suites.main(["fsdp2", "--device", "cpu"]) == 0
    dense, ours = capsys.readouterr().out.splitlines()[-2:]
    assert dense.startswith("| dense |")
    assert ours.startswith("| tagc |")
    assert ours.endswith("| None |")


def test_training_says_what_is_wrong():
    good = {"losses": [2.0, 1.0]}
    assert fsdp2.problem_with(good) is None
    assert "not finite" in str(fsdp2.problem_with({"losses": [2.0, float("nan")]}))
    assert "did not fall" in str(fsdp2.problem_with({"losses": [1.0, 1.0]}))
    assert "unresolved" in str(fsdp2.problem_with(good | {"unresolved": 2}))


def test_training_says_why_a_run_failed(monkeypatch, capsys):
    """As where gloo does not take CUDA tensors: the error is the result."""

    def start(function, args, **options):
        raise RuntimeError("process 0 terminated\n\nno backend for cuda")

    monkeypatch.setattr(fsdp2.mp, "spawn", start)
    found = fsdp2.attempt("dense", "cpu")
    assert found == {"run": "dense", "wrong": "no backend for cuda"}
    capsys.readouterr()


def test_no_gpu_is_an_error(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert suites.main(["fsdp2"]) == 2
    assert "no CUDA device" in capsys.readouterr().err

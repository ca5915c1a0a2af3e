"""One rank's steps without the others: they run, and send what training would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import rank, suites


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_policies_step_on_a_cpu(capsys):
    assert suites.main(["rank", "--device", "cpu", "--tokens", "32", "--settle", "1"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 10
    assert " | 1.000 | " in rows[2]


def test_gathered_parameters_are_copies_of_the_own_shard():
    with rank.alone(4):
        model: Any = rank.sharded(torch.device("cpu"))
        weight = model.lm_head.weight
        assert weight.full_tensor().shape == (1000, 128)
        loss = model(torch.randint(256, (1, 16)))
        loss.backward()
    assert loss.isfinite()
    assert weight.grad is not None
    assert weight.grad.to_local().shape == (250, 128)


def test_a_policy_that_fails_takes_nothing_from_the_others(capsys):
    args = ["rank", "--device", "cpu", "--tokens", "8", "--settle", "0", "--policies", "nobody's"]
    assert suites.main(args) == 1
    assert "- nobody's failed: " in capsys.readouterr().out


def test_no_gpu_is_an_error(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert suites.main(["rank"]) == 2
    assert "no CUDA device" in capsys.readouterr().err

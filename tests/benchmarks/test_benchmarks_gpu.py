"""The programme for GPUs, rehearsed on the CPU, and what it does with parts that go wrong."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from benchmarks import gpu, suites
from benchmarks.gpu import Part, parts, training


def python(name: str, code: str, limit: float = 30.0) -> Part:
    return Part(name=name, command=[sys.executable, "-S", "-c", code], limit=limit)


@pytest.mark.slow
@pytest.mark.timeout(400)  # ten processes that each import torch, on as few cores as there are
def test_rehearsal(tmp_path, capsys):
    pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
    out = tmp_path / "out"
    code = suites.main(["gpu", "--device", "cpu", "--out", str(out)])
    report = (out / "report.md").read_text()
    assert code == 0, report
    assert report.count(": passed") == 3
    for said in ("[100%]", "encode/2^12", "quantize/2^12/float32/float32/int4", "| tagc |"):
        assert said in report
    files = {p.name for p in out.iterdir()}
    assert files >= {"report.md", "kernels.jsonl", "kernels-time.png", "kernels-fraction.png"}
    assert suites.main(["gpu", "--device", "cpu", "--out", str(out)]) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_part_that_fails_or_hangs_takes_nothing_from_the_others(tmp_path):
    hang = "import time; print('so far', flush=True); time.sleep(60)"
    fail = "import sys; print('half'); print('why', file=sys.stderr); raise SystemExit(3)"
    todo = [
        python("tests", fail),
        python("kernels", hang, limit=1.0),
        python("fsdp2", "print('well')"),
    ]
    began = time.monotonic()
    assert gpu.run_parts(todo, "cpu", tmp_path) == 1
    assert time.monotonic() - began < 30
    report = (tmp_path / "report.md").read_text()
    outcomes = [line for line in report.splitlines() if line.startswith("## ")]
    assert outcomes[0] == "## tests: failed with exit status 3"
    assert outcomes[1].startswith("## kernels: stopped after")
    assert outcomes[2] == "## fsdp2: passed"
    assert report.count("so far") == 1
    assert "half\n\nThe end of its log:\n\n```text\nwhy\n```" in report
    assert "## fsdp2: passed\n\nwell\n" in report


def test_only_files_with_tests_for_gpus_are_collected(tmp_path):
    tests = next(part for part in parts("cuda", tmp_path) if part.name == "tests")
    files = {word for word in tests.command if word.endswith(".py")}
    assert {"tests/triton/test_triton_lag.py", "tests/test_no_sync.py"} <= files
    assert {"tests/triton/test_triton_sketch.py", "tests/triton/test_triton_matrix_gpu.py"} <= files
    assert "tests/policy/test_policy.py" not in files
    assert tests.command[-2:] == ["-m", "gpu"]


def test_limits_add_up_to_less_than_eight_minutes(tmp_path):
    assert sum(part.limit for part in parts("cuda", tmp_path)) < 8 * 60


def test_training_says_what_is_wrong():
    good = {"losses": [2.0, 1.0]}
    assert training.problem_with(good) is None
    assert "not finite" in str(training.problem_with({"losses": [2.0, float("nan")]}))
    assert "did not fall" in str(training.problem_with({"losses": [1.0, 1.0]}))
    assert "unresolved" in str(training.problem_with(good | {"unresolved": 2}))


def test_training_says_why_a_run_failed(monkeypatch, capsys):
    """As where gloo does not take CUDA tensors: the error is the result."""

    def start(function, args, **options):
        raise RuntimeError("process 0 terminated\n\nno backend for cuda")

    monkeypatch.setattr(training.mp, "start_processes", start)
    found = training.attempt("dense", "cpu")
    assert found == {"run": "dense", "wrong": "no backend for cuda"}
    capsys.readouterr()


def test_no_gpu_is_an_error_not_an_empty_report(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert suites.main(["gpu", "--out", str(tmp_path / "out")]) == 2
    assert "no CUDA device" in capsys.readouterr().err

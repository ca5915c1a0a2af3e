"""The programme for GPUs, rehearsed on the CPU, and what it does with parts that go wrong."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest
import torch

from benchmarks import gpu, suites
from benchmarks.gpu import training
from benchmarks.gpu.parts import Part, parts
from benchmarks.gpu.parts import outcomes_of_pytest as outcomes_of


def python(name: str, code: str, limit: float = 30.0, **options: Any) -> Part:
    command = [sys.executable, "-S", "-c", code]
    return Part(name=name, about="a test", command=command, limit=limit, **options)


@pytest.mark.slow
@pytest.mark.timeout(400)  # ten processes that each import torch, on as few cores as there are
def test_rehearsal(tmp_path, capsys):
    pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
    out = tmp_path / "out"
    code = suites.main(["gpu", "--device", "cpu", "--out", str(out)])
    report = (out / "report.md").read_text()
    assert code == 0, report
    assert report.count("| passed |") == 4
    for said in (
        "48 passed",
        "| 90 | emit |",
        "encode/2^12",
        "/2^12/float32/int4",
        "![kernels-time]",
        "| tagc |",
    ):
        assert said in report
    files = {p.name for p in out.iterdir()}
    assert files == {
        "report.md", "log.txt", "parts.jsonl", "compile.jsonl", "kernels.jsonl", "fsdp2.jsonl",
        "kernels-time.png", "kernels-fraction.png",
    }  # fmt: skip
    assert suites.main(["gpu", "--device", "cpu", "--out", str(out)]) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_part_that_fails_or_hangs_takes_nothing_from_the_others(tmp_path, capsys):
    hang = "import time, sys; print('so far', flush=True); time.sleep(60)"
    todo = [
        python("tests", "print('tests/a.py::b PASSED [ 50%]'); raise SystemExit(3)",
               read=outcomes_of),
        python("compile", hang, limit=1.0, background=True),
        python("kernels", hang, limit=1.0),
        python("fsdp2", "print('well')"),
    ]  # fmt: skip
    began = time.monotonic()
    assert gpu._run(todo, "cpu", tmp_path) == 1
    assert time.monotonic() - began < 30
    outcomes = [json.loads(line) for line in (tmp_path / "parts.jsonl").read_text().splitlines()]
    status = {o["part"]: o["status"] for o in outcomes}
    assert status["fsdp2"] == "passed"
    assert status["tests"] == "failed with exit status 3"
    assert status["kernels"].startswith("stopped after")
    assert status["compile"].startswith("stopped after")
    report = (tmp_path / "report.md").read_text()
    assert "1 passed, 0 failed" in report
    assert "so far" in report
    log = (tmp_path / "log.txt").read_text()
    assert log.count("so far") >= 2
    assert "well" in log


def test_a_benchmark_that_is_stopped_is_drawn_all_the_same(tmp_path):
    file = tmp_path / "kernels.jsonl"
    small = ["kernels", "--quick", "--device", "cpu", "--sizes", "12", "--json", str(file)]
    assert suites.main(small) == 0
    assert gpu._run([python("kernels", "raise SystemExit(1)")], "cpu", tmp_path) == 1
    report = (tmp_path / "report.md").read_text()
    assert "| encode/2^12/" in report
    assert "![kernels-time](kernels-time.png)" in report


def test_only_files_with_tests_for_gpus_are_collected(tmp_path):
    tests = next(part for part in parts("cuda", tmp_path) if part.name == "tests")
    files = {word for word in tests.command if word.endswith(".py")}
    assert {"tests/triton/test_triton_lag.py", "tests/test_no_sync.py"} <= files
    assert {"tests/triton/test_triton_sketch.py", "tests/triton/test_triton_matrix_gpu.py"} <= files
    assert "tests/policy/test_policy.py" not in files
    assert tests.command[-2:] == ["-m", "gpu"]


def test_success_needs_a_test_that_passed(tmp_path):
    tests = next(part for part in parts("cuda", tmp_path) if part.name == "tests")
    assert tests.wrong({"passed": 0}) == "no test passed"
    assert tests.wrong({"passed": 1}) is None


def test_limits_add_up_to_less_than_eight_minutes(tmp_path):
    todo = parts("cuda", tmp_path)
    assert sum(part.limit for part in todo if not part.background) < 8 * 60
    assert all(part.limit < gpu._LIMIT < 8 * 60 for part in todo)


@pytest.mark.parametrize("xdist", [False, True])
def test_outcomes_of_pytest(xdist):
    lines = [("PASSED", "tests/t.py::a[x, y z]"), ("FAILED", "tests/t.py::b"),
             ("SKIPPED", "tests/t.py::c"), ("PASSED", "tests/t.py::d")]  # fmt: skip
    if xdist:
        output = "\n".join(f"[gw1] [ 10%] {said} {test} " for said, test in lines)
    else:
        output = "\n".join(f"{test} {said} (why)   [ 10%]" for said, test in lines)
    output += "\nFAILED tests/t.py::b - assert 1 == 2\n"
    assert outcomes_of(output) == {
        "passed": 2, "failed": ["tests/t.py::b"], "skipped": ["tests/t.py::c"],
    }  # fmt: skip


def test_training_says_what_is_wrong():
    good = {"losses": [2.0, 1.0]}
    assert training.problem_with(good) is None
    assert "not finite" in str(training.problem_with({"losses": [2.0, float("nan")]}))
    assert "did not fall" in str(training.problem_with({"losses": [1.0, 1.0]}))
    assert "unresolved" in str(training.problem_with(good | {"unresolved": 2}))


def test_training_goes_on_after_a_run_that_fails(monkeypatch, capsys):
    """As where gloo does not take CUDA tensors: the error is the result, the next run is tried."""
    calls = []

    def start(function, args, **options):
        kinds, folder = args[0], args[-1]
        calls.append(kinds)
        if "a" in kinds:
            raise RuntimeError("process 0 terminated\n\nno backend for cuda")
        for kind in kinds:
            training.append(
                training.Path(folder) / "results.jsonl", {"run": kind, "losses": [2, 1]}
            )

    monkeypatch.setattr(training.mp, "start_processes", start)
    results = list(training.attempts(["a", "b"], "cpu", small=True))
    assert calls == [["a", "b"], ["b"]]
    assert results[0] == {"run": "a", "wrong": "no backend for cuda"}
    assert results[1]["wrong"] is None
    capsys.readouterr()


def test_no_gpu_is_an_error_not_an_empty_report(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert suites.main(["gpu", "--out", str(tmp_path / "out")]) == 2
    assert "no CUDA device" in capsys.readouterr().err

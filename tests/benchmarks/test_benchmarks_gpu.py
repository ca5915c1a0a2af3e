"""The programme for GPUs, rehearsed on the CPU, and what it does with parts that go wrong."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch

from benchmarks import gpu, suites
from benchmarks.gpu import LIMIT, Part, parts, training


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
        "quantize/2^12/float32/float32/int4",
        "![kernels-time]",
        "| tagc |",
    ):
        assert said in report
    files = {p.name for p in out.iterdir()}
    assert files >= {
        "report.md", "compile.jsonl", "kernels.jsonl", "fsdp2.jsonl", "kernels-time.png",
        "kernels-fraction.png",
    }  # fmt: skip
    assert suites.main(["gpu", "--device", "cpu", "--out", str(out)]) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_part_that_fails_or_hangs_takes_nothing_from_the_others(tmp_path):
    hang = "import time; print('so far', flush=True); time.sleep(60)"
    fail = "import sys; print('half'); print('why', file=sys.stderr); raise SystemExit(3)"
    todo = [
        python("tests", fail),
        python("compile", hang, limit=1.0, background=True),
        python("kernels", hang, limit=1.0),
        python("fsdp2", "print('well')"),
    ]
    began = time.monotonic()
    assert gpu.run_parts(todo, "cpu", tmp_path) == 1
    assert time.monotonic() - began < 30
    report = (tmp_path / "report.md").read_text()
    rows = [line for line in report.splitlines() if line.startswith("| ")][2:]
    outcomes = [row.split("|")[3].strip() for row in rows]
    assert outcomes[0] == "failed with exit status 3"
    assert outcomes[1].startswith("stopped after")
    assert outcomes[2].startswith("stopped after")
    assert outcomes[3] == "passed"
    assert report.count("so far") == 2
    assert "half\n\nThe end of its log:\n\n```text\nwhy\n```" in report
    assert "## fsdp2\n\nwell\n" in report


def test_only_files_with_tests_for_gpus_are_collected(tmp_path):
    tests = next(part for part in parts("cuda", tmp_path) if part.name == "tests")
    files = {word for word in tests.command if word.endswith(".py")}
    assert {"tests/triton/test_triton_lag.py", "tests/test_no_sync.py"} <= files
    assert {"tests/triton/test_triton_sketch.py", "tests/triton/test_triton_matrix_gpu.py"} <= files
    assert "tests/policy/test_policy.py" not in files
    assert tests.command[-2:] == ["-m", "gpu"]


def test_limits_add_up_to_less_than_eight_minutes(tmp_path):
    todo = parts("cuda", tmp_path)
    assert sum(part.limit for part in todo if not part.background) < 8 * 60
    assert all(part.limit < LIMIT < 8 * 60 for part in todo)


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

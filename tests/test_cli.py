"""The `tagc` command."""

import json
import runpy
import subprocess
import sys

import pytest
import torch

import tagc
from support.policy_files import BASE
from tagc.commands.cli import _parser, main
from tagc.costs.shapes import synthetic
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS
from tagc.policy import policies
from tagc.selfcheck import sketch_calls

*_, PEEL = sketch_calls(plan_layout(1000, SYMBOLS["int8x4"], 20))


def test_validate_good(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(BASE)
    assert main(["validate", str(file)]) == 0
    assert capsys.readouterr() == (f"ok {file}: 2 rules (2 for gradients)\n", "")


def test_exit_status_reaches_the_shell(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tagc", "validate", "atn-only"])
    monkeypatch.delitem(sys.modules, "tagc.commands.cli")
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("tagc.commands.cli", run_name="__main__")
    assert "did you mean 'attn-only'?" in capsys.readouterr().err


def test_doctor_checks_one_of_every_operator_on_a_cpu(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("TAGC_OPS", "reference")
    assert main(["doctor", "--no-timing"]) == 0
    out = capsys.readouterr().out
    assert "21 of 21 kinds of calls give the reference's bits" in out
    for line in ("device      cpu", f"torch       {torch.__version__}", "python      3."):
        assert line in out


def test_doctor_says_what_is_wrong(capsys, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("tagc.ops.cpu.peel", fails)
    monkeypatch.setattr("tagc.commands.commands._calls", lambda device: [PEEL])
    monkeypatch.setenv("TAGC_OPS", "cpu")
    assert main(["doctor", "--no-timing"]) == 1
    out = capsys.readouterr().out
    assert "WRONG       peel(" in out
    assert "RuntimeError: no such instruction" in out
    assert "0 of 1 kinds of calls" in out


def test_help_needs_no_torch():
    """It is what people try first: 0.1 s instead of 3."""
    code = """
import sys
import tagc
from tagc.commands.cli import _parser, main
for argv in ([], ["explain"], ["advise"]):
    try:
        main([*argv, "--help"])
    except SystemExit as ended:
        assert ended.code == 0
heavy = {"torch", "numpy", "numba", "pydantic", "yaml"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for message in ("examples:", "(default: hybrid)", "--bandwidth"):
        assert message in done.stdout


def test_every_command_has_examples_that_parse(capsys):
    commands = ("policies", "validate", "show", "schema", "explain", "advise", "bench", "doctor")
    for name in commands:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        _, _, examples = capsys.readouterr().out.partition("examples:\n")
        lines = examples.strip().splitlines()
        assert lines
        for line in lines:
            assert _parser().parse_args(line.split()[1:]).command == name


def test_json_is_what_programs_read(capsys):
    assert main(["policies", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {entry["name"]: entry["about"] for entry in listed} == policies()
    command = ["explain", "1e7", "--world", "8", "--policy", "hosts", "--json"]
    assert main(command) == 0
    answer = json.loads(capsys.readouterr().out)
    shapes = synthetic(10_000_000)
    assert answer["model"]["parameters"] == shapes.numel
    plan = tagc.explain(
        {p.name: p.shape for p in shapes.params}, "hosts", world_size=8,
        parameter_dtype=torch.bfloat16,
    )  # fmt: skip
    assert answer["memory"]["peak"] == plan.memory.peak
    assert sum(row["alike"] for row in answer["rows"]) == len(plan.rows)


ADVISE = ["advise", "--params", "1e7", "--world", "8", "--bandwidth", "1Gbit"]


def test_plot_of_advice(tmp_path, capsys, monkeypatch):
    file = tmp_path / "step.png"
    # Three dense forms, each by gloo, too.
    forms = ["--device", "cpu", "--memory-bandwidth", "10GB", "--dtype", "fp32"]
    assert main([*ADVISE, *forms, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert main([*ADVISE, "--plot", str(tmp_path / "step.nothing")]) == 2
    assert "step.nothing: Format 'nothing' is not supported" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*ADVISE, "--plot", str(file)]) == 2
    assert "pip install 'tagc[demo]'" in capsys.readouterr().err

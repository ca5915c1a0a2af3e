"""The `tagc` command."""

import argparse
import importlib.resources
import subprocess
import sys

import pytest
import torch

import tagc
from tagc.cli import _parser, main
from tagc.policy import policies
from tagc.selfcheck import every_call

PEEL = next(call for call in every_call() if call.operator == "peel")
GOOD = """
schema: 1
gradients:
  - when: {role: attention}
    codec: {kind: sketch, density: 0.1}
  - when: {}
    codec: {kind: dense}
"""


def test_policies_lists_every_name_with_its_about(capsys):
    assert main(["policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [tuple(line.split(maxsplit=1)) for line in lines] == list(policies().items())


def test_validate_good(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)
    assert main(["validate", str(file)]) == 0
    out, err = capsys.readouterr()
    assert out == f"ok {file}: 2 rules (2 for gradients)\n"
    assert err == ""


def test_validate_builtin_name(capsys):
    assert main(["validate", "dense"]) == 0
    assert capsys.readouterr().out == "ok dense: 1 rule (1 for gradients)\n"


def test_validate_counts_the_rules_of_all_directions(capsys):
    assert main(["validate", "hosts"]) == 0
    assert capsys.readouterr().out == "ok hosts: 2 rules (1 for gradients, 1 for parameters)\n"


def test_schema_prints_what_is_shipped(capsys):
    assert main(["schema"]) == 0
    shipped = importlib.resources.files("tagc.policies") / "policy.schema.json"
    assert capsys.readouterr().out == shipped.read_text()


def test_validate_bad(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD.replace("density", "densty"))
    assert main(["validate", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{file}:5:27: gradients[0].codec.densty: unknown key; did you mean 'density'?" in err


def test_validate_missing_file(tmp_path, capsys):
    assert main(["validate", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["validate"], ["polices"]])
def test_usage_errors(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert "usage: tagc" in capsys.readouterr().err


def test_bench_runs_the_quick_form(tmp_path, monkeypatch):
    ran = []
    suites = importlib.import_module("tagc.benchmarks.suites")
    monkeypatch.setattr(suites, "main", lambda argv: ran.append(argv) or 3)
    assert main(["bench", "--device", "cpu", "--json", "x.jsonl"]) == 3
    assert ran == [["kernels", "--quick", "--device", "cpu", "--json", "x.jsonl"]]
    monkeypatch.undo()
    parse = argparse.ArgumentParser()
    suites.load("kernels").add_arguments(parse)
    assert parse.parse_args(ran[0][1:]).quick


def test_exit_status_reaches_the_shell():
    command = [sys.executable, "-m", "tagc.cli", "validate", "atn-only"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "did you mean 'attn-only'?" in done.stderr


def test_doctor_checks_one_of_every_operator_on_a_cpu(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["doctor", "--ops", "reference", "--no-timing"]) == 0
    out = capsys.readouterr().out
    assert "13 of 13 kinds of calls give the reference's bits" in out
    for line in ("device      cpu", f"torch       {torch.__version__}", "python      3."):
        assert line in out


def test_doctor_says_what_is_wrong(capsys, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("tagc.selfcheck.checking._PASSED", set())
    monkeypatch.setattr("tagc.ops.cpu.peel", fails)
    monkeypatch.setattr("tagc.selfcheck.doctor.every_call", lambda: [PEEL])
    assert main(["doctor", "--ops", "cpu", "--no-timing"]) == 1
    out = capsys.readouterr().out
    assert "WRONG       peel(" in out
    assert "RuntimeError: no such instruction" in out
    assert "0 of 1 kinds of calls" in out


def test_doctor_on_a_device_that_there_is_not(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["doctor", "--device", "cuda"]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


def test_help_needs_no_torch():
    """It is what people try first: 0.1 s instead of 3."""
    code = """
import sys
import tagc
from tagc.cli import _parser, main
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
    for said in ("examples:", "(default: hybrid)", "--bandwidth"):
        assert said in done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"tagc {tagc.__version__}\n"


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


def test_a_policy_where_a_model_belongs_is_answered_with_the_right_form(capsys):
    assert main(["explain", "hybrid", "--world", "8"]) == 2
    assert "tagc explain 7B --policy hybrid --world 8" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["125m", "125M", "125e6"])
def test_numbers_of_parameters_in_any_case(model, capsys):
    assert main(["explain", model, "--world", "8"]) == 0
    assert 100e6 < int(capsys.readouterr().out.split()[0].replace(",", "")) < 150e6


def test_names_of_the_package_are_all_there():
    assert set(tagc.__all__) <= set(dir(tagc))
    assert all(getattr(tagc, name) is not None for name in tagc.__all__)
    with pytest.raises(AttributeError, match="module 'tagc' has no attribute 'wrapp'"):
        tagc.wrapp  # type: ignore[attr-defined]  # noqa: B018

"""What `tagc explain` and `tagc advise` refuse, and the remedy that they name.

An option without an effect is an error, too: `tests/test_options.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tagc.commands.cli import main

ADVISE = ["advise", "--bandwidth", "1Gbit"]
OF_7B = [*ADVISE, "--params", "7e9", "--world", "64"]
MESH = ["advise", "--params", "7B", "--bandwidth", "1Gbit", "--tokens", "8192"]
SITES = [*ADVISE, "--params", "1B", "--sites", "4"]


def refused(capsys: Any, argv: list[str]) -> str:
    """What the command says of its input, with the exit status 2."""
    try:
        status = main(argv)
    except SystemExit as stopped:  # argparse
        status = stopped.code
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    return err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["hybrid", "--world", "8"], "tagc explain 7B --policy hybrid --world 8"),
        (["hybrid", "--params", "7e9"], "tagc explain 7e9 --policy hybrid --world 64"),
        (["7e9"], "give --world"),
        (["1e6", "--world", "4", "--policy", "auto"], "chooses by the link: give --bandwidth"),
        (["1e6", "--world", "1", "--ddp"], "--world 1 with --ddp sends nothing"),
        (["1e6", "--world", "4", "--ddp", "--policy", "half-bit"], "feedback.lead 'measured'"),
        (["1B", "--world", "8", "--policy", "sites"], "give their number, at least 2 (--sites)"),
        (["7B", "--mesh", "tp=8"], "give --tokens"),
        (["7B", "--mesh", "tp:8", "--tokens", "1"], "is no mesh"),
    ],
)
def test_explain(argv: list[str], message: str, capsys: Any) -> None:
    assert message in refused(capsys, ["explain", *argv])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*OF_7B, "--bandwidth", "10Gbits"], "'10Gbits' is not a bandwidth: write a number and"),
        ([*OF_7B, "--bandwidth", "0Gbit"], "'0Gbit' is not a bandwidth above zero"),
        ([*OF_7B, "--latency", "5"], "'5' is not a time: write a number"),
        ([*OF_7B, "--world", "many"], "'many' is not a number"),
        ([*OF_7B, "--overlap", "2"], "'2' is not a share"),
        ([*OF_7B, "--params", "seven"], "no model 'seven': give a number of parameters (7e9), a"),
        ([*OF_7B, "--params", "1000"], "1000 parameters are too few for a transformer: give 100,"),
        ([*OF_7B, "--replicas", "3"], "--world 64 does not divide by --replicas 3"),
        ([*OF_7B, "--replicas", "64"], "--world 64 with as many replicas shards"),
        ([*OF_7B, "--ranks-per-host", "5"], "--world 64 does not divide by --ranks-per"),
        ([*OF_7B, "--tflops", "5"], "--tokens-per-rank and --tflops belong together"),
        ([*OF_7B, "--policy", "hybird"], "did you mean 'hybrid'?"),
        ([*MESH, "--mesh", "dp=4", "--ranks-per-host", "3"], "do not divide by --ranks-per-host 3"),
        ([*SITES, "--world", "6"], "--world 6 does not divide by --sites 4"),
    ],
)
def test_advise(argv: list[str], message: str, capsys: Any) -> None:
    assert message in refused(capsys, argv)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no_such:make", "cannot import module 'no_such' of 'no_such:make'"),
        ("json:make", "module 'json' has no function 'make'"),
        ("json:dumps", "json:dumps failed on the meta device: TypeError"),
        ("os:getcwd", "os:getcwd returned str, neither an nn.Module"),
        ("no.json", "cannot read a model from no.json: No such file"),
    ],
)
def test_models(model: str, message: str, capsys: Any) -> None:
    assert message in refused(capsys, [*ADVISE, "--world", "64", "--model", model])

"""What `tagc explain` and `tagc advise` refuse, also of input that is wrong on purpose: one clear
error that names it and the remedy, in seconds, and no traceback.

An option without an effect is an error, too: `tests/test_options.py`.
"""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from tagc.commands.cli import main
from tagc.plan.table import _numbers
from tagc.policy.roles import layer_of

pytestmark = pytest.mark.timeout(60)

ADVISE = ["advise", "--bandwidth", "1Gbit"]
OF_7B = [*ADVISE, "--params", "7e9", "--world", "64"]
OF_1M = ["explain", "1e6", "--world"]
SITES = [*ADVISE, "--params", "1B", "--sites", "4"]
OF_WORLD = [*ADVISE, "--world", "64"]
LINK = ("--world", "64", "--bandwidth", "10Gbit")
LLAMA = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2}
TENSOR = {"dtype": "F32", "shape": [512, 512], "data_offsets": [0, 512 * 512 * 4]}
DIGITS = "9" * 5_000


def refused(capsys: Any, *argv: str) -> str:
    """What the command says of its input: a line or a few, and the exit status 2."""
    try:
        status = main([*argv])
    except SystemExit as stopped:  # argparse
        status = stopped.code
    printed = capsys.readouterr()
    assert status == 2, printed
    assert printed.out == ""
    assert "Traceback" not in printed.err
    printed.err.encode()
    assert 0 < len(printed.err.strip().splitlines()[-1]) < 1_000
    return printed.err


def headed(path: Path, header: object) -> Path:
    """A safetensors file of a header alone, or of these bytes."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(content if content is header else struct.pack("<Q", len(content)) + content)
    return path


def written(path: Path, data: object) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["explain", "hybrid", "--world", "8"], "tagc explain 7B --policy hybrid --world 8"),
        ([*OF_1M, "1", "--ddp"], "a single rank sends nothing: give 2 or more"),
        ([*OF_1M, "8", "--policy", "sites"], "give their number, at least 2 (--sites)"),
        (["explain", "7B", "--mesh", "tp=8"], "give --tokens"),
        (["explain", "7B", "--mesh", "tp=0"], "no mesh"),
        (["explain", "7B", "--mesh", "xy=2"], "none of"),
        ([*OF_7B, "--bandwidth", "10Gbits"], "'10Gbits' is not a bandwidth: write a number and"),
        ([*OF_7B, "--latency", "5"], "'5' is not a time: write a number"),
        ([*OF_7B, "--params", "seven"], "no model 'seven': give a number of parameters (7e9), a"),
        ([*OF_7B, "--params", "1000"], "1000 parameters are too few for a transformer: give 100,"),
        ([*OF_7B, "--replicas", "64"], "--world 64 with as many replicas shards"),
        ([*OF_7B, "--ranks-per-host", "5"], "--world 64 does not divide by --ranks-per"),
        ([*OF_7B, "--policy", "hybird"], "did you mean 'hybrid'?"),
        ([*SITES, "--world", "6"], "--world 6 does not divide by --sites 4"),
        ([*OF_WORLD, "--model", "no_such:make"], "cannot import 'no_such:make': No module"),
        ([*OF_WORLD, "--model", "json:dumps"], "json:dumps failed on the meta device: TypeError"),
        ([*OF_WORLD, "--model", "no.json"], "cannot read a model from no.json: No such file"),
    ],
)
def test_command_lines(argv: list[str], message: str, capsys: Any) -> None:
    assert message in refused(capsys, *argv)


def test_a_policy_for_replicas_with_ddp(tmp_path: Path, capsys: Any) -> None:
    rules = [{"when": {}, "codec": {"kind": "quantized"}}]
    mine = written(tmp_path / "mine.yaml", {"schema": 1, "gradients": rules, "replicas": rules})
    error = refused(capsys, *OF_1M, "4", "--ddp", "--policy", str(mine))
    assert "with DDP and replicate() all ranks are replicas" in error


NAMES = (f"layers.{DIGITS}.w", "a\0b", "\ud800", "")
SIZES: tuple[list[int], ...] = ([10**400], [10**9, 10**9], [1] * 17)
CHANGES: tuple[dict[str, Any], ...] = (
    {"num_hidden_layers": 10**400},
    {"vocab_size": 10**30},
    {"model_type": "mamba9", "text_config": {"num_hidden_layers": 10**9}},
    {"model_type": "gpt2", "n_layer": 10**9, "n_embd": 8, "n_positions": 8},
)
NO_MODEL = "it is not a model|'w' has no valid dtype, shape"
FILES: list[tuple[str, Any, str]] = [
    *(("m.json", {name: [512, 512]}, "is not a parameter name") for name in NAMES),
    *(("m.json", {"w": sizes}, NO_MODEL) for sizes in SIZES),
    *(("m.json", LLAMA | change, "|".join([*change, "num_hidden_layers"])) for change in CHANGES),
    ("m.safetensors", {"a\0b": TENSOR}, "is not a parameter name"),
    ("m.safetensors", {"w": TENSOR | {"shape": [-1]}}, "'w' has no valid dtype, shape"),
    ("m.safetensors", {"w": 3}, "'w' has no valid dtype, shape"),
    ("m.safetensors", {"w": TENSOR | {"dtype": "U8"}}, "most of it is U8, as in.*config.json"),
    ("m.safetensors", {}, "names no tensors"),
    ("m.safetensors", b"version https://git-lfs.github.com/spec/v1", "a git-lfs pointer.*lfs pull"),
    ("m.safetensors", struct.pack("<Q", 1 << 60) + b"{}", "not a safetensors file, or truncated"),
    ("m.safetensors", struct.pack("<Q", 2) + b"{]", "not a safetensors file or index"),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES, ids=lambda x: f"{x!r:.40}")
def test_files_of_models(
    tmp_path: Path, capsys: Any, name: str, content: object, message: str
) -> None:
    path = (written if name == "m.json" else headed)(tmp_path / name, content)
    assert re.search(message, refused(capsys, "explain", str(path), "--world", "4"))


@pytest.mark.parametrize("file", ["a\0.safetensors", "\ud800.safetensors", "/etc/passwd", "a/b"])
def test_names_of_files_in_an_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    headed(tmp_path / "a.safetensors", {"w": TENSOR})
    written(tmp_path / "model.safetensors.index.json", {"weight_map": {"w": file}})
    error = refused(capsys, "explain", str(tmp_path), "--world", "4")
    assert "is not the name of a safetensors file beside it" in error


@pytest.mark.parametrize("what", ["/dev/zero", "pipe"])
def test_files_without_an_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if what == "pipe":
        os.mkfifo(tmp_path / "pipe")
    for name in ("model.json", "model.safetensors", "policy.yaml"):
        os.symlink(what, tmp_path / name)
    written(tmp_path / "i.json", {"weight_map": {"w": "model.safetensors"}})
    written(tmp_path / "mine.yaml", "schema: 1\nextends: policy.yaml\n")
    for argv in (
        ("explain", "model.json", "--world", "4"),
        ("explain", "i.json", "--world", "4"),
        ("validate", "policy.yaml"),
        ("show", "mine.yaml"),
    ):
        assert "not a regular file" in refused(capsys, *argv)


def test_files_beyond_their_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, limit, command in (
        ("p.yaml", 1_000_000, ["validate"]),
        ("m.json", 100_000_000, ["explain", "--world", "4"]),
    ):
        with (tmp_path / name).open("wb") as file:
            file.truncate(limit + 1)  # takes no room on the disk
        assert f"larger than {limit:,}" in refused(capsys, *command, str(tmp_path / name))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--params", v) for v in (DIGITS, "1e15", "5e-324")),
        *(("--latency", v) for v in ("1e400s", "nans")),
        *(("--bandwidth", v) for v in ("1e-320bit", "0bit")),
        *(("--micro-batches", v) for v in ("1e400", "0")),
        *(("--world", v) for v in ("many", "1e12", "-1")),
        *(("--replicas", "3"), ("--overlap", "1.1"), ("--learning-rate", "nan")),
        *(("--model", v) for v in ("a" * 5_000, "\ud800.json", ":")),
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_numbers_of_the_command_line(
    capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    model = [] if option in ("--params", "--model") else ["--params", "125M"]
    error = refused(capsys, "advise", *model, *LINK, "--step-time", "1s", f"{option}={value}")
    assert option in error or repr(value)[1:9] in error or "e+" in error


def test_numbers_in_the_names_of_modules() -> None:
    """`tagc.wrap` reads them, too, and Python makes no number of more than 4,300 digits."""
    assert layer_of("layers.12.w") == 12
    assert layer_of(f"layers.{DIGITS}.w") is None
    assert _numbers(f"layers.3.{DIGITS}.w") == (3,)

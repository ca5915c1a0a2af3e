"""Input that is wrong on purpose: one clear error that names it, in seconds, and no traceback."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tagc.basics.files import read_regular
from tagc.commands.cli import main
from tagc.plan.table import _numbers
from tagc.policy import Policy, PolicyError
from tagc.policy.roles import layer_of

pytestmark = pytest.mark.timeout(60)

LINK = ("--world", "64", "--bandwidth", "10Gbit")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
TENSOR = {"dtype": "F32", "shape": [512, 512], "data_offsets": [0, 512 * 512 * 4]}
DIGITS = "9" * 5_000


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What the command says of its input: a line or a few, and the exit status 2."""
    try:
        status = main(argv)
    except SystemExit as stopped:  # argparse
        status = stopped.code
    printed = capsys.readouterr()
    assert status == 2, printed
    assert "Traceback" not in printed.err
    printed.err.encode()
    error = printed.err.strip().splitlines()[-1]
    assert 0 < len(error) < 1_000
    return error


def headed(path: Path, header: object) -> Path:
    """A safetensors file of a header alone."""
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content)
    return path


def written(path: Path, data: object) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


@pytest.mark.parametrize("name", [f"layers.{DIGITS}.w", "a\0b", "\ud800", ""])
@pytest.mark.parametrize("form", ["header", "shapes"])
def test_names_of_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, form: str
) -> None:
    if form == "header":
        path = headed(tmp_path / "model.safetensors", {name: TENSOR})
    else:
        path = written(tmp_path / "shapes.json", {name: [512, 512]})
    assert "is not a parameter name" in fails(capsys, "explain", str(path), "--world", "4")


@pytest.mark.parametrize(
    "file",
    ["a\0.safetensors", "\ud800.safetensors", "/etc/passwd", "..", "a/b"],
)
def test_names_of_files_in_an_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    headed(tmp_path / "a.safetensors", {"w": TENSOR})
    index = written(tmp_path / "model.safetensors.index.json", {"weight_map": {"w": file}})
    for model in (index, tmp_path):
        error = fails(capsys, "explain", str(model), "--world", "4")
        assert "is not the name of a safetensors file beside it" in error


@pytest.mark.parametrize("sizes", [[10**400], [10**9, 10**9], [1] * 17])
@pytest.mark.parametrize("form", ["header", "shapes"])
def test_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: list[int], form: str
) -> None:
    if form == "header":
        path = headed(tmp_path / "model.safetensors", {"w": TENSOR | {"shape": sizes}})
    else:
        path = written(tmp_path / "shapes.json", {"w": sizes})
    error = fails(capsys, "explain", str(path), "--world", "4")
    assert "it is not a model" in error or "'w' has no valid dtype, shape" in error


@pytest.mark.parametrize(
    "change",
    [
        *({"num_hidden_layers": layers} for layers in (1_001, 10**400)),
        {"vocab_size": 10**30},
        {"hidden_size": 10**16},
        {"model_type": "mamba9", "text_config": {"num_hidden_layers": 10**9}},
        {"model_type": "mamba9", "parts": [{"n_routed_experts": 10**9}]},
        {"model_type": "gpt2", "n_layer": 10**9, "n_embd": 8, "n_positions": 8},
    ],
)
def test_sizes_in_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    path = written(tmp_path / "config.json", LLAMA | change)
    error = fails(capsys, "explain", str(path), "--world", "4")
    assert any(key in error for key in (*change, "num_hidden_layers", "n_routed_experts")), error


def test_too_many_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "shapes.json", {f"w{i}": [1] for i in range(200_001)})
    assert "more than 200,000 tensors" in fails(capsys, "explain", str(path), "--world", "4")


ENDLESS = ("/dev/zero", "/dev/full", "pipe")


@pytest.mark.parametrize("what", ENDLESS)
def test_files_without_an_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if what == "pipe":
        os.mkfifo(tmp_path / "pipe")
    for name in ("model.json", "model.safetensors", "policy.yaml"):
        os.symlink(what, tmp_path / name)
    index = {"weight_map": {"w": "model.safetensors"}}
    written(tmp_path / "i.json", index)
    written(tmp_path / "mine.yaml", "schema: 1\nextends: policy.yaml\n")
    for argv in (
        ("explain", "model.json", "--world", "4"),
        ("explain", "model.safetensors", "--world", "4"),
        ("explain", "i.json", "--world", "4"),
        ("advise", "--model", "model.json", *LINK),
        ("validate", "policy.yaml"),
        ("show", "mine.yaml"),
        ("advise", "--params", "7B", *LINK, "--policy", "mine.yaml"),
    ):
        assert "not a regular file" in fails(capsys, *argv)


def test_files_beyond_their_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "large").write_bytes(bytes(9))
    assert read_regular(tmp_path / "large", 9) == bytes(9)
    with pytest.raises(OSError, match="larger than 8 bytes"):
        read_regular(tmp_path / "large", 8)
    for name, size in (("p.yaml", 1_000_001), ("m.json", 100_000_001)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)  # takes no room on the disk
    assert "larger than 1,000,000" in fails(capsys, "validate", str(tmp_path / "p.yaml"))
    error = fails(capsys, "explain", str(tmp_path / "m.json"), "--world", "4")
    assert "larger than 100,000,000" in error


@pytest.mark.parametrize("extends", ["/etc/passwd", "../base.yaml", "a/../../base.yaml", ".."])
def test_a_policy_stays_in_its_folder(tmp_path: Path, extends: str) -> None:
    (tmp_path / "own").mkdir()
    written(tmp_path / "base.yaml", "the secret: of another file\n")
    path = written(tmp_path / "own" / "mine.yaml", f"schema: 1\nextends: {extends}\n")
    with pytest.raises(PolicyError, match=r"no built-in policy|is not in the folder") as caught:
        Policy.load(path)
    assert "secret" not in str(caught.value)
    assert "root:" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--params", v) for v in ("1e400", DIGITS, "1e15", "0", "5e-324")),
        *(("--latency", v) for v in ("1e400s", "1e10s", "nans")),
        *(("--bandwidth", v) for v in ("1e400bit", "1e-320bit", "0bit")),
        *(("--inside-bandwidth", v) for v in ("1e400bit", "infGB")),
        *(("--memory-bandwidth", v) for v in ("1e400bit",)),
        *(("--device-memory", v) for v in ("1e400GB", "0GB")),
        *(("--step-time", v) for v in ("1e400s",)),
        *(("--tflops", v) for v in ("inf", "nan", "1e-320")),
        *(("--tokens-per-rank", v) for v in ("1e400",)),
        *(("--micro-batches", v) for v in ("1e400", "0")),
        *(("--world", v) for v in ("1e12", "0", "-1")),
        *(("--ranks-per-host", v) for v in ("1e400",)),
        *(("--replicas", v) for v in ("1e400",)),
        *(("--overlap", v) for v in ("nan", "1.1")),
        *(("--model", v) for v in ("a" * 5_000, "\ud800.json", "a\0:f", ":")),
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_numbers_of_the_command_line(
    capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    common = [*LINK, "--tflops", "100", "--tokens-per-rank", "1000"]
    model = [] if option in ("--params", "--model") else ["--params", "125M"]
    if option == "--step-time":
        common = [*LINK]
    error = fails(capsys, "advise", *model, *common, f"{option}={value}")
    assert option in error or repr(value)[1:9] in error or "e+" in error


def test_a_symbol_too_narrow_for_the_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = "{when: {}, codec: {kind: sketch, density: 0.01, symbol: int8x4}}"
    path = written(tmp_path / "mine.yaml", f"schema: 1\ngradients: [{rule}]\n")
    error = fails(capsys, "explain", "125M", "--world", "1000", "--policy", str(path))
    assert "codec 'sketch' of model" in error
    assert "symbol int8x4 cannot hold a sum over 1000 ranks" in error


def test_the_bounds_themselves_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    for bandwidth, latency in (("1e18B", "0s"), ("0.01bit", "1e9s")):
        options = ("--world=64", f"--bandwidth={bandwidth}", f"--latency={latency}", "--json")
        assert main(["advise", "--params=1M", *options, "--step-time=1e9s"]) == 0
        json.loads(capsys.readouterr().out)


def test_numbers_in_the_names_of_modules() -> None:
    """`tagc.wrap` reads them, too, and Python makes no number of more than 4,300 digits."""
    assert layer_of("layers.12.w") == 12
    assert layer_of(f"layers.{DIGITS}.w") is None
    assert _numbers(f"layers.3.{DIGITS}.w") == (3,)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.sampled_from([10**30, 2**63, "\ud800", "a\0", "F32", "llama", "../x"])
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    key=st.sampled_from(["config", "index", "header", "shapes"]),
    name=st.sampled_from([*LLAMA, "architectures", "shape", "dtype", "data_offsets", "w"]),
    value=JSON,
)
def test_any_value_anywhere(
    tmp_path_factory: pytest.TempPathFactory, key: str, name: str, value: object
) -> None:
    folder = tmp_path_factory.mktemp("any")
    if key == "header":
        path = headed(folder / "m.safetensors", {"w": TENSOR | {name: value}, "v": TENSOR})
    else:
        data = {"config": LLAMA | {name: value}, "index": {"weight_map": {name: value}}}
        path = written(folder / "m.json", data.get(key, {name: value, "v": [64, 64]}))
    assert main(["explain", str(path), "--world", "4", "--policy", "stateless"]) in (0, 2)

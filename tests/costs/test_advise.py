"""`tagc advise`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import tagc
from support.paths import ROOT
from tagc.commands.cli import main
from tagc.costs.advise import UNTUNED, WITH_DDP
from tagc.policy import data_parallel_policies

# One block matrix on 2 ranks: 2 ** 20 elements, of which a rank sends half in a reduce-scatter.
SHAPES = {f"layers.{i}.mlp.up_proj.weight": [1024, 512] for i in range(2)}


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    file = tmp_path / "shapes.json"
    file.write_text(json.dumps(SHAPES))
    return str(file)


def rows(text: str) -> dict[str, list[str]]:
    """Cells of the table of `advise` by its first column."""
    lines = text.split("\n\n")[1].splitlines()
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines[1:]]
    return {row[0]: row[1:] for row in cells if len(row) in (7, 9)}


def run(capsys: Any, *argv: str) -> str:
    assert main([*argv]) == 0
    return capsys.readouterr().out


def test_the_table_is_the_formula(shapes: str, tmp_path: Path, capsys: Any) -> None:
    attention = tmp_path / "attention.yaml"
    rule = {"when": {"role": "attention"}, "codec": {"kind": "quantized", "bits": 4}}
    attention.write_text(json.dumps({"schema": 1, "gradients": [rule]}))
    out = run(
        capsys, "advise", "--model", shapes, "--world", "2", "--bandwidth", "8Mbit",
        "--latency", "0.1s", "--step-time", "1s", "--overlap", "0", "--param-dtype", "fp32",
        "--policy", str(attention),
    )  # fmt: skip
    table = rows(out)
    # A megabyte per second. Per block: a reduce-scatter of 1 MiB, two gathers of 1 MiB.
    link = 2 * (3 * 0.1 + 3 * 1.048576)
    half = 2 * (3 * 0.1 + 1.5 * 1.048576)
    lost = f"{(1 + link) / (1 + half) - 1:+.1%}"
    assert table["dense fp32"][:5] == ["6.00 MiB", f"{link:.3g} s", "-", f"{1 + link:.3g} s", lost]
    # 16 bytes for half of 2 ** 20 parameters; two blocks gathered, and one's gradients twice.
    assert table["dense fp32"][5] == f"{8 + 4 + 2 * 2:.2f} MiB"
    assert table["dense bf16"][1:4] == [f"{half:.3g} s", "-", f"{1 + half:.3g} s"]
    # 4-bit gradients, and scales of 2 bytes per 256.
    four = 2 * (3 * 0.1 + 1.048576 * (2 + (0.5 + 2 / 256) / 4))
    assert table["loco-4bit"][2] == "-"
    assert table["loco-4bit"][3] == f"{1 + four:.3g} s"
    # There is no attention.
    policies = set(data_parallel_policies()) - {"dense", "attn-only", "exact"}
    assert set(table) == {"dense fp32", "dense bf16"} | policies
    assert f"policy {str(attention)!r} compresses nothing in this model" in out
    assert "Compression pays: thrifty takes" in out


def test_the_loss_is_that_of_the_documentation(shapes: str, capsys: Any) -> None:
    """Beside the time that a policy takes: what it did to the loss, and what it asks for."""
    page = (ROOT / "docs" / "quality.md").read_text()
    cells = re.findall(r"^\| `([\w-]+)` \| [0-9.]+ \| ([-+][0-9.]+%) \|", page, re.MULTILINE)
    assert {name: f"{loss:+.1%}" for name, loss in UNTUNED.items()} == {
        name: text.replace("-0.0%", "+0.0%") for name, text in cells
    }
    out = run(capsys, "advise", "--model", shapes, "--world", "2", "--bandwidth", "1Gbit")
    assert rows(out)["one-bit"][6:] == ["+0.4%", "2× yours, or keep_rates"]
    ddp = run(capsys, "advise", "--model", shapes, "--world=2", "--bandwidth=1Gbit", "--ddp")
    found = re.findall(r"^\| `([\w-]+)` \| [0-9.]+ \| (?:= )?([-+][0-9.]+)% ±", page, re.MULTILINE)
    assert {name: f"{100 * loss:+.2f}" for name, loss in WITH_DDP.items()} == dict(found)
    assert rows(ddp)["one-bit"][6] == "-0.3%"


def test_says_when_it_does_not_pay_and_where_it_stops(shapes: str, capsys: Any) -> None:
    common = ("advise", "--model", shapes, "--world", "2", "--step-time", "1s", "--overlap", "0")
    fast = run(capsys, *common, "--bandwidth", "100Gbit")
    assert "Compression does not pay" in fast
    found = re.search(r"stops paying at ([0-9.]+) ([MG])bit/s", fast)
    assert found
    limit = float(found[1]) * {"M": 1, "G": 1e3}[found[2]]
    below = run(capsys, *common, "--bandwidth", f"{0.98 * limit}Mbit")
    above = run(capsys, *common, "--bandwidth", f"{1.02 * limit}Mbit")
    assert "Compression pays" in below
    assert "Compression does not pay" in above
    # The limit is a fact of the model, wherever one asks from.
    assert re.search(r"stops paying at [^:]*", below)[0] in above  # type: ignore[index]


def test_what_ranks_on_a_host_send(shapes: str, capsys: Any) -> None:
    """A ring crosses a host's link once; with a policy 8 ranks add up first, and send for 8."""
    common = ("advise", "--model", shapes, "--world", "64", "--bandwidth", "10Gbit")
    alone, shared = (rows(run(capsys, *common, *more)) for more in ((), ("--ranks-per-host", "8")))
    assert alone["dense fp32"] == shared["dense fp32"]
    assert bytes_of(alone["loco-4bit"][0]) > bytes_of(shared["loco-4bit"][0])
    # Gradients in fp32 then take longest inside: 8 bits there make the fastest faster still.
    text = run(capsys, *common, "--ranks-per-host", "8", "--inside-bandwidth", "20Gbit")
    slow = rows(text)
    inside = [name for name in slow if name.endswith(", inside int8")]
    assert len(inside) == 1
    written = f"{{schema: 1, extends: {inside[0].partition(',')[0]}, inside: int8}}"
    assert f"Write {inside[0]} as {written}." in text
    assert all(", inside" not in name for name in shared)


def test_ddp(shapes: str, tmp_path: Path, capsys: Any) -> None:
    """Against DDP's own all-reduce; no policies for parameters, which DDP does not send."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("{schema: 1, extends: hosts}")
    common = ("advise", "--model", shapes, "--world", "4", "--ddp", "--bandwidth", "8Mbit")
    out = run(capsys, *common, "--micro-batches", "3", "--policy", str(mine))
    table = rows(out)
    # A megabyte per second; 2 ** 20 elements in one unit, of which a rank sends 2 · 3/4.
    dense = 1.5 * 4 * 1.048576
    assert table["dense fp32"][:2] == ["6.00 MiB", f"{dense:.3g} s"]
    assert table["dense bf16"][:2] == ["3.00 MiB", f"{dense / 2:.3g} s"]
    assert table["dense fp32"][5] == "20.00 MiB"  # 16 bytes each, and DDP's buckets
    # 4 bits, and 16 for 256; two messages to each of three, with 32 words for their padding.
    coded = 1.5 * 2**20 * (0.5 + 2 / 256) + 2 * 3 * 4 * 32
    assert table["loco-4bit"][:2] == [f"{coded / 1024:.2f} KiB", f"{coded / 1e3:.3g} ms"]
    plan = tagc.explain(SHAPES, "loco-4bit", world_size=4, ddp=True)
    assert bytes_of(table["loco-4bit"][5]) == pytest.approx(20 * 2**20 + plan.memory.peak, rel=1e-3)
    left_out = {name for name in data_parallel_policies() if tagc.Policy.load(name).parameters}
    assert set(table) == {"dense fp32", "dense bf16"} | (
        set(data_parallel_policies()) - {"dense"} - left_out
    )
    assert f"{', '.join([*sorted(left_out), str(mine)])}: not compared: rules for parameters" in out
    # On two hosts of two ranks a host sends two halves of what one rank of two would.
    shared = rows(run(capsys, *common, "--ranks-per-host", "2"))
    assert shared["dense fp32"][0] == "6.00 MiB"
    assert shared["loco-4bit"][0] == f"{(2**20 * (0.5 + 2 / 256) + 2 * 4 * 32) / 1024:.2f} KiB"
    small = run(capsys, *common, "--device-memory", "1MB")
    assert "not even dense bf16: shard the model (fully_shard)" in small


def bytes_of(text: str) -> float:
    number, unit = text.split(",")[0].split()
    return float(number) * {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}[unit]


def test_what_does_not_fit_is_not_advised(tmp_path: Path, capsys: Any) -> None:
    """2**26 parameters on 8 hosts of 8: a residual and a copy of 2 + 2 bytes, divided by 8, and
    buffers of a block."""
    file = tmp_path / "large.json"
    file.write_text(json.dumps({f"layers.{i}.mlp.up_proj.weight": [2048, 1024] for i in range(32)}))
    large = ("advise", "--model", str(file), "--world", "64", "--bandwidth", "100Gbit")
    large += ("--ranks-per-host", "8")
    out = run(capsys, *large, "--device-memory", "100MB")
    table = rows(out)
    assert table["hybrid"][5].endswith(", too much")
    assert bytes_of(table["hybrid"][5]) > 1e8
    stored = bytes_of(table["hosts"][5]) - bytes_of(table["dense fp32, bf16 parameters"][5])
    assert 4 * 2**26 / 8 < stored < 4.8 * 2**26 / 8
    assert "Compression pays: thrifty takes" in out
    out = run(capsys, *large, "--device-memory", "50MB")
    assert re.search(r"thrifty would take .*, but needs .* a rank: it does not fit", out)
    assert "Compression pays: stateless takes" in out

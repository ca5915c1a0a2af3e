"""The benchmarks run, and refuse what they must; what they measure is for them to print."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import aggregate, suites
from benchmarks.kernels import operators
from benchmarks.kernels.measure import HostClock, measure
from benchmarks.kernels.operators import OPS, Case
from support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
SMALL = ["kernels", "--quick", "--device", "cpu", "--sizes", "12", "13"]


def measured(op: str) -> dict[str, Any]:
    """Of a case with dtypes whose kernels are compiled before the tests run."""
    first: dict[str, Any] = {"residual": "float32", "density": 0.05, "symbol": "int8x4"}
    first |= {"bits": 4, "code": "int1", "rate": 3e-4}
    gradient = "bfloat16" if op.startswith("decode") else "float32"
    given = {axis: first[axis] for axis in OPS[op]}
    case = Case(op=op, numel=1 << 13, gradient=gradient, **given)
    return measure(case, torch.device("cpu"), HostClock(), budget=0.01)


@pytest.mark.parametrize("op", OPS)
def test_every_operator_is_right(op: str) -> None:
    record = measured(op)
    assert {"tagc", "reference"} == set(record["contenders"])
    assert set(record["speedup"]) == {"reference"}
    json.dumps(record)


class Damages:
    """Ours, but every operator then flips a bit of one of its tensors."""

    def __init__(self, ops: Any, position: int) -> None:
        self._ops, self._position = ops, position

    def __getattr__(self, name: str) -> Any:
        def run(*tensors: Any, **sizes: Any) -> None:
            getattr(self._ops, name)(*tensors, **sizes)
            if self._position < len(tensors):
                tensors[self._position].flatten()[4:6].view(torch.int32).bitwise_xor_(1)

        return run


@pytest.mark.parametrize(
    ("op", "position"),
    [("encode", 1), ("encode", 6), ("quantize", 1), ("quantize_matrix", 2), ("dequantize", 1),
     ("decode", 4), ("encode_exact", 3), ("decode_exact", 1)],
)  # fmt: skip
def test_a_wrong_bit_is_noticed(op: str, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    get_ops = operators.get_ops
    monkeypatch.setattr(operators, "get_ops", lambda *which: Damages(get_ops(*which), position))
    with pytest.raises(RuntimeError, match="differ from the reference's"):
        measured(op)


def test_a_case_that_fails_takes_nothing_from_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError("too large")

    file = tmp_path / "sub" / "k.jsonl"
    monkeypatch.setitem(operators._MAKERS, "encode", fails)
    assert suites.main([*SMALL, "--filter", "code/*5%", "--json", str(file)]) == 1
    table = capsys.readouterr().out
    assert "encode/2^12/float32/float32/5%/int8x4 failed: OutOfMemoryError: too large" in table
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert ["failed" in record for record in records] == [True, False, True, False]

    assert suites.main(["report", str(file)]) == 0
    assert table.strip() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ("kernel", 2, "unknown suite 'kernel'"),
        ("kernels --filter nothing --device cpu", 1, "no case matches"),
        ("report nowhere.jsonl", 2, "No such file"),
        ("host --steps 1", 2, "quartiles need at least 2"),
        ("quality paired --settings Moon", 2, "unknown: Moon"),
        ("quality paired --lines 1bit", 2, "unknown: 1bit"),
        ("quality pretrained --rehearse --lines Moon", 2, "Moon"),
        ("quality exact --steps 0", 2, "argument --steps: '0' is not a number"),
        ("quality paired --pairs 4 3", 2, "--pairs 4 3: at least"),
        ("quality gpu --device cpu --text nowhere.npz", 2, "no such file: nowhere.npz"),
    ],
)
def test_the_command_line_refuses(command: str, status: int, text: str, capsys: Any) -> None:
    try:
        found = suites.main(command.split())
    except SystemExit as exited:  # argparse's own
        found = exited.code
    assert found == status
    printed = capsys.readouterr()
    assert text in printed.out + printed.err


def test_help_and_plots_with_and_without_matplotlib(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert suites.main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in suites.SUITES)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"suite": "kernels"}\nnot json\n')
    assert suites.main(["report", str(bad)]) == 2
    assert f"{bad}:2: not JSON" in capsys.readouterr().err
    command = ["report", str(RESULTS / "network-ddp.jsonl"), "--plots", str(tmp_path)]
    assert suites.main(command) == 0
    assert (tmp_path / "network-step-time.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert suites.main(command) == 2
    assert "tagc[demo]" in capsys.readouterr().err


def test_an_aggregator_adds_sketches_without_decoding(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command itself checks the sums of sketches, to the bit."""
    monkeypatch.setattr(aggregate, "NUMEL", 65536)
    assert suites.main(["aggregate", "--json", str(tmp_path / "r.jsonl")]) == 0
    rows = [row.strip("| ").split(" | ") for row in capsys.readouterr().out.splitlines()[2:4]]
    dense, sketched = (float(row[1]) for row in rows)
    assert dense == 32
    assert sketched < 1


@pytest.mark.parametrize(
    ("file", "row"),
    [
        ("network", "0.313 s (1.07×) | 0.359 s (2.21×) | 0.568 s (4.90×) | 0.873 s (5.98×) |"),
        ("network", "| `tagc-paper` | 54.39 | +0.2% | 39.77 | 14.50 | 14.50 | 63 |"),
        ("network-hosts", "1.085 s (3.00×) | 1.006 s (5.64×) | 1.222 s (8.70×) |"),
        ("network-hosts-quiet", "0.878 s | 0.813 s | 0.817 s | 1.044 s |"),
        ("convergence", "| matrix, 1 bit | 1.12 |  | 0.006 | 1.2309 | 0.0021 | 3 | -0.25% |"),
        ("convergence-small", "| 4 bits, momentum | 4.06 |  | 0.002 | 1.7851 |  | 1 | +0.67% |"),
        ("paired", "| 1 bit | -0.58% ± 0.56 (5) |"),
        ("untuned", "| one-bit | 0.001 | 1 | 2.4520 | 0.0000 | 1 | +0.4% | 1.72 | 100% |"),
        ("aggregate", "| sketch of a shared 5%, int8x4 | 0.78 | 51157 | 16.99× |"),
        ("exact", "| 0.0003 | 200 | 1.82 | 2.91 | 16.9× | 8.8× |"),
        ("sites-network", "| 0.281 s | 89.3% (89.2% to 89.3%) | 82.0 | 246 | +1.4% | 10.7% |"),
    ],
)
def test_committed_records_print_what_the_docs_say(file: str, row: str, capsys: Any) -> None:
    assert suites.main(["report", str(RESULTS / f"{file}.jsonl")]) == 0
    assert row in capsys.readouterr().out


# One rank's steps without the others


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_policies_step_on_a_cpu(capsys: Any) -> None:
    assert suites.main(["rank", "--device", "cpu", "--tokens", "32", "--settle", "1"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 9
    assert " | 1.000 | " in rows[2]


def test_a_share_of_the_step(tmp_path: Path, capsys: Any) -> None:
    record = tmp_path / "host.jsonl"
    args = ["--policies", "hybrid", "loco-4bit", "--steps", "2", "--json", str(record)]
    assert suites.main(["host", *args]) == 0
    found, other = map(json.loads, record.read_text().splitlines())  # FSDP2 gathers in the other
    assert 0 < found["share"] < 1
    assert other["tagc_started"] == 68
    assert [a <= b for a, b in zip(found["calls, files"], (40, 8), strict=True)] == [True, True]
    # 32 blocks and the root: a launch to encode, and one to decode, in a reduction and in a gather;
    # one in a backward that reads its messages again, and one that compares fingerprints. The root
    # gathers once and has two compressed segments.
    assert found["tagc_started"] == 32 * 6 + 8
    assert "| hybrid |" in capsys.readouterr().out

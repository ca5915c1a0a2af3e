"""The benchmarks run, and refuse what they must; what they measure is for them to print."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

import tagc
from benchmarks import kernels, suites
from benchmarks.kernels.case import Case
from benchmarks.kernels.measure import measure
from benchmarks.kernels.ops import decode, encode, inputs, messages
from benchmarks.kernels.ops.codecs import CODES
from benchmarks.kernels.ops.row_hash import RowHash
from benchmarks.kernels.plots import over_size
from benchmarks.kernels.registry import Contender, Problem
from benchmarks.kernels.selection import select
from benchmarks.timing import HostClock, Timed, interleaved
from support.marks import covering, slow
from tagc.ops import reference

CPU = torch.device("cpu")
CONTENDERS = {"tagc", "reference", "topk", "row-hash", "clone"}
SENDERS = ["quantize", "quantize_matrix"]
RECEIVERS = ["dequantize", "dequantize_matrix"]


def case(op: str, **values) -> Case:
    given = {"residual": "float32", "density": 0.05, "symbol": "int8x4"} | values
    return Case(op=op, numel=1 << 13, **given)


def measured(chosen: Case) -> dict:
    return measure(chosen, CPU, HostClock(cold=False), budget=0.01)


@pytest.mark.parametrize(
    "chosen",
    [
        case("encode"),
        case("decode"),
        slow(case("encode", gradient="bfloat16", residual="bfloat16")),
        slow(case("decode", gradient="bfloat16", residual="bfloat16")),
    ],
    ids=lambda chosen: chosen.name,
)
def test_every_contender_is_right_but_the_lossy_one(chosen):
    record = measured(chosen)
    assert set(record["contenders"]) == CONTENDERS
    wrong = {name: said["wrong"] for name, said in record["contenders"].items() if said["wrong"]}
    assert wrong.keys() == {"row-hash"}
    assert record["contenders"]["row-hash"]["unrecovered"] > 0
    assert record["refused"] == {"row-hash": f"row-hash: {wrong['row-hash']}"}
    assert set(record["speedup"]) == CONTENDERS - {"tagc", "row-hash"}
    json.dumps(record)


@pytest.mark.parametrize(("gradient", "op"), covering(["float32", "bfloat16"], SENDERS + RECEIVERS))
def test_messages_are_right(op, gradient):
    chosen = next(
        c for c in select("full", "cpu", sizes=[13]) if c.op == op and c.gradient == gradient
    )
    check_messages(measured(chosen))


@pytest.mark.parametrize("code", [c if c in ("int1", "group8") else slow(c) for c in CODES])
def test_every_code_of_a_matrix_is_right(code):
    n = 1 << 13
    record = measured(Case(op="quantize_matrix", numel=n, residual="float32", code=code))
    check_messages(record)
    assert (record["rows"], record["columns"]) == (64, 128)
    check_messages(measured(Case(op="dequantize_matrix", numel=n, code=code)))


def check_messages(record: dict) -> None:
    assert {"tagc", "reference", "clone"} <= set(record["contenders"])
    assert {name for name, said in record["contenders"].items() if said["wrong"]} == set()
    assert "compared" not in record["contenders"]["tagc"]
    assert set(record["speedup"]) == set(record["contenders"]) - {"tagc"}
    json.dumps(record)


def smallest(op: str) -> Case:
    return next(c for c in select("quick", "cpu", sizes=[13]) if c.op == op)


class Damages:
    """Ours, but every operator then flips a bit of one of its tensors."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __getattr__(self, name):
        def run(*tensors, **sizes):
            getattr(inputs.ours(CPU)[0], name)(*tensors, **sizes)
            tensors[self.position].flatten()[5:6].view(torch.int32).bitwise_xor_(1)

        return run


@pytest.mark.parametrize("op", SENDERS)
def test_a_sender_must_have_the_bits_of_the_reference(op, monkeypatch):
    for position, what in ((1, "residual"), (2, "message")):
        monkeypatch.setattr(messages, "ours", lambda device, at=position: (Damages(at), ""))
        wrong = measured(smallest(op))["contenders"]["tagc"]["wrong"]
        assert f"the {what} differs" in wrong or "sent plus residual" in wrong


@pytest.mark.parametrize("op", RECEIVERS)
def test_a_receiver_must_have_the_bits_of_the_reference(op, monkeypatch):
    monkeypatch.setattr(messages, "ours", lambda device: (Damages(1), ""))
    record = measured(smallest(op))
    assert record["contenders"]["tagc"]["wrong"] == "the shard differs from the reference's"
    assert record["speedup"] == {}


@pytest.mark.parametrize("op", SENDERS + RECEIVERS)
def test_messages_without_a_reference(op, monkeypatch):
    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("too large")

    # What the check of a sender or the input of a receiver needs still works.
    real = {name: getattr(reference, name) for name in SENDERS + RECEIVERS}
    monkeypatch.setattr(messages, "reference", types.SimpleNamespace(**real | {op: fails}))
    record = measured(smallest(op))
    assert record["contenders"]["tagc"]["wrong"] is None
    assert record["contenders"]["tagc"]["compared"].startswith("with nothing")
    assert set(record["refused"]) == {"reference"}


def test_bytes_of_the_floor_of_messages():
    n = 1 << 13
    words = n * 4 // 32 + n // 256 // 2
    quantize = Case(op="quantize", numel=n, residual="bfloat16", bits=4)
    assert measured(quantize)["floor_bytes"] == 8 * n + 4 * words
    assert measured(Case(op="dequantize", numel=n, bits=4))["floor_bytes"] == 4 * n + 8 * words


def test_bytes_of_the_floor_of_a_matrix():
    # 64 rows of 128 columns: the base, 4 bits a column, 8 a row.
    n, head = 1 << 13, 1 + 128 // 8 + 64 // 4
    sent = Case(op="quantize_matrix", numel=n, residual="float32", code="int1")
    assert measured(sent)["floor_bytes"] == 12 * n + 4 * (head + n // 32)
    # 16 codes of 4 bits.
    added = Case(op="dequantize_matrix", numel=n, code="group8")
    assert measured(added)["floor_bytes"] == 4 * n + 8 * (head + 64 * 2)


def test_bytes_of_the_floor():
    n, bits = 1 << 13, (1 << 13) // 4 // 8
    assert measured(case("encode"))["floor_bytes"] == 12 * n + bits
    mixed = case("encode", gradient="bfloat16", residual="bfloat16")
    assert measured(mixed)["floor_bytes"] == 6 * n + bits
    assert measured(case("decode"))["floor_bytes"] == 4 * n + bits


def test_row_hash_recovers_everything_where_its_lanes_are_long_enough():
    # 1024 rows with half the elements above the threshold: 512 keys in every lane.
    chosen = Case(
        op="decode", numel=1 << 20, residual="float32", density=0.5, symbol="int32x1"
    )  # fmt: skip
    data = inputs.make_inputs(chosen, CPU)
    codec, residual = RowHash(data), data.residual[0].clone()
    codec.encode(data.grad[0], residual)
    out = torch.empty_like(data.x)
    lost = codec.decode(out)
    assert codec.check(out, lost) is None or codec.details["unrecovered"] < 1e-3
    kept = data.x.abs() >= data.element_threshold
    assert (out - torch.where(kept, data.x, 0.0)).abs().gt(1e-3).sum() <= lost
    assert torch.equal(residual, torch.where(kept, 0.0, data.x))


def test_no_speedup_by_a_wrong_result(monkeypatch):
    ops, note = inputs.ours(CPU)

    class Wrong:
        def encode(self, grad, residual, *rest, **sizes):
            ops.encode(grad, residual, *rest, **sizes)
            residual[0, 5] += 1.0

    monkeypatch.setattr(encode, "ours", lambda device: (Wrong(), note))
    record = measured(case("encode"))
    assert "sent plus residual" in record["contenders"]["tagc"]["wrong"]
    assert record["speedup"] == {}
    assert set(record["refused"]) == CONTENDERS - {"tagc"}
    assert "**wrong**" in kernels.table([{"device": "cpu"} | record])


def test_bits_that_differ_from_the_reference_are_wrong(monkeypatch):
    ops, note = inputs.ours(CPU)

    class Wrong:
        def encode(self, *tensors, **sizes):
            ops.encode(*tensors, **sizes)
            tensors[7][0, 3] += 1  # the count of saturated groups

        def decode(self, index, cells, step, seed, out, residual, stats, **sizes):
            ops.decode(index, cells, step, seed, out, residual, stats, **sizes)
            out[out.nonzero()[0]] *= 2

    for module, said in ((encode, "counts differs"), (decode, "shard plus residual")):
        monkeypatch.setattr(module, "ours", lambda device: (Wrong(), note))
        record = measured(case(module.__name__.rpartition(".")[2]))
        assert said in record["contenders"]["tagc"]["wrong"]


def test_a_contender_that_raises_is_reported_and_the_others_go_on(monkeypatch):
    def broken() -> Contender:
        raise torch.OutOfMemoryError("too large\nand more")

    def problem(chosen, device):
        fine = {"tagc": lambda: Contender(run=lambda: None)}
        return Problem(floor_bytes=800, contenders=fine | {"huge": broken})

    monkeypatch.setattr(encode, "problem", problem)
    record = measured(case("encode"))
    assert record["contenders"]["huge"] == {"wrong": "OutOfMemoryError: too large"}
    assert record["refused"] == {"huge": "huge: OutOfMemoryError: too large"}
    assert record["contenders"]["tagc"]["ms"] >= 0


def test_without_the_reference_ours_is_still_checked(monkeypatch):
    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("too large")

    for op in ("encode", "decode"):
        with monkeypatch.context() as patch:
            module = {"encode": encode, "decode": decode}[op]
            # encode's check decodes by the reference, which still works.
            real = {name: getattr(reference, name) for name in ("encode", "decode")}
            patch.setattr(module, "reference", types.SimpleNamespace(**real | {op: fails}))
            record = measured(case(op))
        assert record["contenders"]["tagc"]["compared"].startswith("with nothing")
        assert record["contenders"]["tagc"]["wrong"] is None
        assert set(record["refused"]) == {"reference", "row-hash"}


def test_a_case_that_fails_takes_nothing_from_the_others(monkeypatch, tmp_path, capsys):
    file = tmp_path / "k.jsonl"

    def problem(chosen, device):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(encode, "problem", problem)
    small = [
        "kernels",
        "--quick",
        "--device",
        "cpu",
        "--sizes",
        "12",
        "13",
        "--plots",
        str(tmp_path),
    ]
    assert suites.main([*small, "--filter", "code/*5%", "--json", str(file)]) == 1
    table = capsys.readouterr().out
    assert "encode/2^12/float32/float32/5%/int8x4 failed: OutOfMemoryError: too large" in table
    assert "| decode/2^12" in table
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert ["failed" in record for record in records] == [True, False, True, False]


def test_slow_contenders_take_fewer_turns():
    order = []
    runs = {name: Timed(lambda name=name: order.append(name)) for name in ("a", "b")}

    def clock(timed: Timed) -> tuple[float, float]:
        timed.run()
        return (2.0, 1.0) if order[-1] == "a" else (4.0, 3.0)

    timings = interleaved(runs, clock, budget=100, repeats=5, warm_up=1)
    assert order == ["a", "b"] * 6
    assert (timings["a"].seconds, timings["b"].host_seconds) == (2.0, 3.0)
    assert {t.repeats for t in interleaved(runs, clock, budget=0).values()} == {1}


@pytest.mark.parametrize("cold", [True, False])
def test_caches_are_flushed_between_restoring_the_inputs_and_the_run(cold, monkeypatch):
    order: list[str] = []
    clock = HostClock(cold=cold)
    if cold:
        assert clock._flush is not None
        assert clock._flush.nbytes == 128 << 20
        flush = types.SimpleNamespace(add_=lambda one: order.append("flush"))
        monkeypatch.setattr(clock, "_flush", flush)
    clock(Timed(lambda: order.append("run"), lambda: order.append("before")))
    assert order == ["before", "flush", "run"] if cold else ["before", "run"]
    assert ("flushed" in clock.about) == cold


def test_selection():
    names = [c.name for c in select("default", "cpu")]
    assert len(set(names)) == len(names)
    for part in ("2^20/", "2^24/", "1%", "5%", "float32/bfloat16", "bfloat16/float32", "int16x2",
                 "int32x1"):  # fmt: skip
        assert any(part in name for name in names), part
    # encode and decode, quantize, dequantize, quantize_matrix, dequantize_matrix: five sizes, and
    # the axes of each.
    codes = len(CODES)
    assert len(select("full", "cuda")) == 5 * (
        2 * 2 * 3 * 4 + 2 * 4 + 2 * 2 + codes * 4 + codes * 2
    )
    for device in ("cpu", "cuda"):
        matrices = [c for c in select("default", device) if c.op == "quantize_matrix"]
        assert {c.code for c in matrices} == set(CODES)
    assert any("2^28" in c.name for c in select("default", "cuda"))
    filtered = select("default", "cpu", ["decode/2^20", "encode*int16x2"])
    assert {c.op + c.symbol for c in filtered if c.symbol} == {"decodeint8x4", "encodeint16x2"}
    assert {c.numel for c in select("quick", "cpu", sizes=[12])} == {1 << 12}


def test_command_line_writes_what_the_report_draws(tmp_path, capsys):
    file, plots = tmp_path / "sub" / "k.jsonl", tmp_path / "plots"
    small = ["kernels", "--quick", "--device", "cpu", "--sizes", "12", "13", "--json", str(file)]
    assert suites.main([*small, "--filter", "encode"]) == 0
    table = capsys.readouterr().out.strip()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["numel"] for r in records] == [1 << 12, 1 << 12, 1 << 13, 1 << 13]
    said = "python -m benchmarks kernels --device cpu --quick --sizes 12 13 --filter encode"
    assert {r["command"] for r in records} == {said}
    assert all(r["suite"] == "kernels" and r["tagc"] == tagc.__version__ for r in records)

    assert suites.main(["report", str(file), "--plots", str(plots)]) == 0
    said = capsys.readouterr().out
    assert table.splitlines()[-1] in said
    images = sorted(plots.glob("*.png"))
    assert [p.name for p in images] == ["kernels-fraction.png", "kernels-time.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in images)


def test_a_line_over_size_has_cases_of_one_kind():
    values = {"quantize": ("bits", (4, 8)), "quantize_matrix": ("code", ("int2", "int1"))}
    records = [
        measured(Case(op=op, numel=1 << size, residual="float32", **{axis: value}))
        for op, (axis, choices) in values.items()
        for size, value in ((12, choices[0]), (13, choices[0]), (12, choices[1]))
    ]
    panels = over_size(records)
    assert [panel.title for panel in panels] == list(values)
    curves = [curve for panel in panels for curve in panel.curves]
    assert {tuple(curve.x) for curve in curves} == {(1 << 12, 1 << 13)}


def test_command_line_errors(tmp_path, capsys, monkeypatch):
    assert suites.main(["kernel"]) == 2
    assert "unknown suite 'kernel'" in capsys.readouterr().err
    assert suites.main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in suites.SUITES)
    assert suites.main(["kernels", "--filter", "nothing", "--device", "cpu"]) == 1
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"suite": "kernels"}\nnot json\n')
    assert suites.main(["report", str(bad)]) == 2
    assert f"{bad}:2: not JSON" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert suites.main(["kernels", "--device", "cpu", "--plots", str(tmp_path)]) == 2
    assert "tagc[demo]" in capsys.readouterr().err

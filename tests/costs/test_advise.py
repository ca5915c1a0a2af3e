"""`tagc advise` and `tagc explain`: what they print, and what they refuse."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import tagc
from support.distributed import on_ranks
from tagc.cli import main
from tagc.costs import Link, ModelShapes, Speed, advise, auto, measure_speeds, speed_key
from tagc.costs.quantities import bandwidth, count, seconds
from tagc.costs.shapes import load_model, synthetic
from tagc.ops import get_ops

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
    return {row[0]: row[1:] for row in cells if len(row) == 6}


def run(capsys: Any, *argv: str) -> str:
    assert main([*argv]) == 0
    return capsys.readouterr().out


def test_the_table_is_the_formula(shapes: str, capsys: Any) -> None:
    out = run(
        capsys, "advise", "--model", shapes, "--world", "2", "--bandwidth", "8Mbit",
        "--latency", "0.1s", "--step-time", "1s", "--overlap", "0", "--param-dtype", "fp32",
    )  # fmt: skip
    table = rows(out)
    # A megabyte per second. Per block: a reduce-scatter of 1 MiB, two gathers of 1 MiB.
    link = 2 * (3 * 0.1 + 3 * 1.048576)
    half = 2 * (3 * 0.1 + 1.5 * 1.048576)
    lost = f"{(1 + link) / (1 + half) - 1:+.1%}"
    assert table["dense fp32"] == ["6.00 MiB", f"{link:.3g} s", "-", f"{1 + link:.3g} s", lost]
    assert table["dense bf16"][1:4] == [f"{half:.3g} s", "-", f"{1 + half:.3g} s"]
    # 4-bit gradients, and scales of 2 bytes per 256.
    four = 2 * (3 * 0.1 + 1.048576 * (2 + (0.5 + 2 / 256) / 4))
    assert table["loco-4bit"][2] == "-"
    assert table["loco-4bit"][3] == f"{1 + four:.3g} s"
    assert set(table) == {"dense fp32", "dense bf16"} | set(tagc.policies()) - {
        "dense",
        "attn-only",
    }
    assert "attn-only: policy 'attn-only' compresses nothing in this model" in out
    assert "codec time: not included, as no GPU has been measured" in out
    assert "Compression pays: hybrid takes" in out


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


def test_compute_from_tokens(shapes: str, capsys: Any) -> None:
    out = run(
        capsys, "advise", "--model", shapes, "--world", "2", "--bandwidth", "1Gbit",
        "--tokens-per-rank", "1e6", "--tflops", "2",
    )  # fmt: skip
    assert f"compute {6 * 2**20 * 1e6 / 2e12:.3g} s a step" in out


def test_on_a_cpu_codecs_are_measured_and_gloo_wastes(shapes: str, capsys: Any) -> None:
    def speeds(codecs: Any, *args: Any) -> dict[str, Speed]:
        return {speed_key(codec): Speed(encode=1e-6, decode=1e-6) for codec in codecs}

    with patch.object(advise, "measure_speeds", speeds):
        out = run(
            capsys, "advise", "--model", shapes, "--world", "2", "--bandwidth", "1Gbit",
            "--device", "cpu", "--ops", "reference", "--param-dtype", "fp32",
        )  # fmt: skip
    table = rows(out)
    assert table["dense fp32"][0] == "6.00 MiB"
    assert table["dense fp32 by gloo"][0] == "8.00 MiB"
    # Every element of the unit is encoded, and every message of a shard decoded.
    assert table["loco-4bit"][2] == f"{2 * 2 * 2**19 * 1e-6:.3g} s"
    assert "codec time: measured here" in out


def test_memory_bandwidth_is_a_lower_bound_and_says_so(capsys: Any) -> None:
    common = ("advise", "--params", "7e9", "--world", "64", "--bandwidth", "10Gbit")
    out = run(capsys, *common, "--memory-bandwidth", "3TB")
    assert "a lower bound" in out
    assert "not measured" in out
    assert rows(out)["loco-4bit"][2] != "-"
    assert rows(out)["dense bf16"][2] == "-"


def test_dense_rows_say_what_they_are(shapes: str, capsys: Any) -> None:
    common = ("advise", "--model", shapes, "--world", "2", "--bandwidth", "8Mbit")
    table = rows(run(capsys, *common))  # fp32 gradients, bf16 parameters
    megabytes = {name: row[0] for name, row in table.items() if name.startswith("dense")}
    assert megabytes == {
        "dense fp32": "6.00 MiB",
        "dense bf16": "3.00 MiB",
        "dense fp32, bf16 parameters": "4.00 MiB",
    }
    other = rows(run(capsys, *common, "--dtype", "bf16", "--param-dtype", "fp32"))
    assert other["dense bf16, fp32 parameters"][0] == "5.00 MiB"


def test_what_ranks_on_a_host_send(capsys: Any) -> None:
    """A ring crosses a host's link once; with a policy 8 ranks add up first, and send for 8."""
    common = ("advise", "--params", "1e9", "--world", "64", "--bandwidth", "10Gbit")
    alone, shared = (rows(run(capsys, *common, *more)) for more in ((), ("--ranks-per-host", "8")))
    assert alone["dense fp32"] == shared["dense fp32"]
    assert alone["loco-4bit"][0] > shared["loco-4bit"][0]
    shapes = {"layers.0.up_proj.weight": (1024, 64), "layers.1.up_proj.weight": (1024, 64)}
    sent = [
        sum(row.wire_bytes for row in plan.rows if row.direction == "gradients")
        for plan in (
            tagc.explain(shapes, "loco-4bit", world_size=64, ranks_per_host=ranks)
            for ranks in (1, 8)
        )
    ]
    assert sent[1] * 63 == sent[0] * 7
    table = run(capsys, *common, "--ranks-per-host", "8", "--inside-bandwidth", "100GB")
    assert "the 8 ranks of a host add up their gradients first; inside a host: 800 Gbit/s" in table
    assert rows(table)["loco-4bit"][1] != shared["loco-4bit"][1]


def test_replicas_and_a_policy_of_ones_own(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "schema: 1\n"
        "gradients:\n  - {when: {}, codec: {kind: dense}}\n"
        "replicas:\n  - {when: {role: mlp}, codec: {kind: quantized, bits: 8}}\n"
    )
    out = run(
        capsys, "advise", "--params", "1e8", "--world", "8", "--replicas", "2", "--bandwidth",
        "1Gbit", "--shard-bandwidth", "800Gbit", "--policy", str(file),
    )  # fmt: skip
    assert str(file) in rows(out)
    assert "2 replicas of 4" in out
    assert main(["advise", "--params", "1e8", "--world", "8", "--bandwidth", "1Gbit",
                 "--policy", str(file)]) == 0  # fmt: skip
    assert "has rules for replicas" in capsys.readouterr().out


COMMON = ["--params", "7e9", "--world", "64"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*COMMON, "--bandwidth", "10Gbits"], "'10Gbits' is not a bandwidth: write a number and"),
        ([*COMMON, "--bandwidth", "10"], "'10' is not a bandwidth: write a number and a unit"),
        ([*COMMON, "--bandwidth", "0Gbit"], "'0Gbit' is not a bandwidth above zero"),
        ([*COMMON, "--bandwidth", "1Gbit", "--latency", "5"], "'5' is not a time: write a number"),
        (["--params", "7e9", "--world", "many", "--bandwidth", "1Gbit"], "'many' is not a number"),
        ([*COMMON, "--bandwidth", "1Gbit", "--overlap", "2"], "'2' is not a share"),
    ],
)
def test_bad_arguments(argv: list[str], said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["advise", *argv])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--params", "seven"], "no model 'seven': give a number of parameters (7e9), module:fun"),
        (["--params", "1000"], "1000 parameters are too few for a transformer: give 100,000"),
        (["--model", "no_such:make"], "cannot import module 'no_such' of 'no_such:make'"),
        (["--model", "json:make"], "module 'json' has no function 'make'"),
        (["--model", "json:dumps"], "json:dumps failed on the meta device: TypeError"),
        (["--model", "os:getcwd"], "os:getcwd returned str, not an nn.Module"),
        (["--model", "no.json"], "cannot read shapes from no.json: [Errno 2]"),
        (["--params", "7e9", "--replicas", "3"], "--world 64 does not divide by --replicas 3"),
        (["--params", "7e9", "--replicas", "64"], "--world 64 of as many replicas shards nothing"),
        (["--params", "7e9", "--ranks-per-host", "5"], "--world 64 is not a number of hosts with"),
        (["--params", "7e9", "--tflops", "5"], "--tokens-per-rank and --tflops belong together"),
        (["--params", "7e9", "--policy", "hybird"], "did you mean 'hybrid'?"),
    ],
)
def test_what_advise_refuses(argv: list[str], said: str, capsys: Any) -> None:
    assert main(["advise", "--world", "64", "--bandwidth", "1Gbit", *argv]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert out == ""


def test_a_file_without_shapes(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "bad.json"
    file.write_text('{"a": [1, 0]}')
    assert main(["explain", str(file), "--world", "2"]) == 2
    assert f"{file} holds no shapes: write an object of parameter names" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [("10Gbit", 1.25e9), ("10Gbit/s", 1.25e9), ("200Mbps", 2.5e7), ("1.5GB/s", 1.5e9)],
)
def test_bandwidths(text: str, value: float) -> None:
    assert bandwidth(text) == value


def test_times_and_counts() -> None:
    assert seconds("50us") == pytest.approx(50e-6)
    assert seconds("1.2s") == 1.2
    assert [count(text) for text in ("64", "7e9", "1.3M", "7B")] == [64, 7e9, 1.3e6, 7e9]


# explain


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(65, 129)
        self.up_proj = nn.Linear(129, 255)
        self.experts = nn.ModuleList(nn.Linear(31, 31) for _ in range(2))


class Net(nn.Module):
    """Sizes that no number of ranks divides, tied weights, and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(301, 63)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(65)
        self.lm_head = nn.Linear(63, 301, bias=False)
        self.lm_head.weight = self.wte.weight
        self.get_parameter("layers.1.up_proj.weight").requires_grad_(False)


@on_ranks(2, 3)
@pytest.mark.parametrize("policy", ["non-attn", "hybrid", "loco-4bit"])
def test_explain_is_what_wrap_makes(rank: int, world_size: int, policy: str) -> None:
    check_explained(policy, world_size)


@on_ranks(4)
@pytest.mark.parametrize("policy", ["hybrid", "loco-4bit"])
def test_explain_is_what_wrap_makes_on_hosts(rank: int, world_size: int, policy: str) -> None:
    check_explained(policy, world_size, hosts=2)


def check_explained(policy: str, world_size: int, hosts: int | None = None) -> None:
    with torch.device("meta"):
        expected = tagc.explain(Net(), policy, world_size=world_size, ranks_per_host=hosts or 1)
    model: Any = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    # FSDP learns only in its first forward which module is the root.
    wrapped = tagc.wrap(model, policy, hosts=hosts, ops="reference")
    plan = tagc.compressor(wrapped).plan()
    assert [u.info.name for u in plan.units] == [u.info.name for u in expected.units]
    # Only ranks know where they are.
    said = [line for line in str(plan).splitlines() if not line.startswith("- hosts: ")]
    assert len(said) == len(str(plan).splitlines()) - 1
    assert said == str(expected).splitlines()
    assert plan.fingerprint == expected.fingerprint


def test_explain_a_module_from_a_file(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "explained_net.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    m = nn.Module()\n"
        "    m.h = nn.ModuleList(nn.Linear(1 << 20, 1 << 10, bias=False) for _ in range(3))\n"
        "    m.wte = nn.Embedding(1024, 64)\n"
        "    return m\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    policy = {"name": "h.*"}
    file = tmp_path / "mine.yaml"
    file.write_text(
        "schema: 1\ngradients:\n"
        f"  - {{when: {json.dumps(policy)}, codec: {{kind: quantized, bits: 8}}}}\n"
    )
    out = run(
        capsys, "explain", "explained_net:make", "--policy", str(file), "--world", "8",
        "--dtype", "bf16",
    )  # fmt: skip
    assert out.startswith("3,221,291,008 parameters, 3 blocks, 8 ranks\n")
    line = next(line for line in out.splitlines() if "h.2.weight" in line)
    # 2 ** 27 columns: dense 7 · 2 bytes of each, 8 bits and 2 / 256 bytes of scale.
    assert "quantized int8" in line
    assert f"{7 * 2 * 2**27 / 2**30:.2f} GiB" in line
    assert f"{7 * 2**27 * (1 + 2 / 256) / 2**20:.2f} MiB" in line
    assert any("wte.weight" in line and " dense " in line for line in out.splitlines())


def test_explain_auto_needs_a_link(capsys: Any) -> None:
    assert main(["explain", "1e6", "--world", "4", "--policy", "auto"]) == 2
    assert "policy 'auto' chooses by the link: give --bandwidth" in capsys.readouterr().err
    out = run(capsys, "explain", "1e6", "--world", "4", "--policy", "auto", "--bandwidth", "1Gbit")
    assert "- chosen by the bandwidth that was given; codec time is not included" in out
    assert "quantized int4" in out


def test_explain_in_python() -> None:
    shapes = {name: tuple(shape) for name, shape in SHAPES.items()}
    link = Link(bandwidth=1e6)
    plan = tagc.explain(shapes, "auto", world_size=4, replicas=2, link=link)
    directions = ("gradients", "parameters", "replicas")
    assert [(u.direction, u.info.world_size) for u in plan.all_units] == [
        (direction, 2) for direction in directions for _ in range(2)
    ]
    assert {u.segments[0].codec.name for u in plan.units} == {"quantized int4"}
    with pytest.raises(tagc.PolicyError, match="needs a measured or a given link"):
        tagc.explain(shapes, "auto", world_size=4)
    with pytest.raises(ValueError, match="4 ranks do not divide among 3 replicas"):
        tagc.explain(shapes, "dense", world_size=4, replicas=3)


def test_explain_prints_warnings(capsys: Any) -> None:
    """At 64 ranks a sketch of density 0.2 sends more than bfloat16."""
    assert main(["explain", "1e8", "--world", "64", "--policy", "mlp-only", "--dtype", "bf16"]) == 0
    assert "warning: policy 'mlp-only' sends" in capsys.readouterr().err


# Shapes


@pytest.mark.parametrize("numel", [100_000, 1_300_000, 10_000_000, 7_000_000_000, 70 * 10**9])
def test_a_synthetic_model_has_as_many_parameters_as_asked(numel: int) -> None:
    shapes = synthetic(numel)
    assert abs(shapes.numel / numel - 1) < 0.04
    assert len(shapes.blocks) >= 2


def test_blocks_of_names() -> None:
    names = {
        f"{stack}.{i}.mlp.experts.{e}.w1.weight": [8, 8]
        for stack in ("encoder.layers", "decoder.layers")
        for i in range(2)
        for e in range(3)
    } | {"head.0.weight": [8, 8]}
    assert ModelShapes.of(names).blocks == (
        "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"
    )  # fmt: skip


def test_layer_1_is_no_prefix_of_layer_10() -> None:
    shapes = ModelShapes.of({f"layers.{i}.w.weight": [4, i + 1] for i in range(12)})
    reduces, gathers = shapes.units(2, torch.float32, torch.bfloat16)
    assert [[p.name for p in u.params] for u in reduces] == [
        [f"layers.{i}.w.weight"] for i in range(12)
    ]
    assert {u.per_step for u in gathers} == {2}
    assert load_model("1e6").blocks


# Speeds


@pytest.mark.parametrize("parameters", [False, True])
def test_every_codec_of_the_shipped_policies_has_a_speed(parameters: bool) -> None:
    """Whatever a plan holds is among what is measured for it."""
    from tagc.costs import speed as codec_speed

    timed: dict[str, Speed] = {}
    with patch.dict(codec_speed._ELEMENTS, {"cpu": 1 << 12}):
        for name in tagc.policies():
            codecs = auto.codecs_of(tagc.Policy.load(name), torch.float32, 2, parameters=parameters)
            new = [c for c in codecs if speed_key(c) not in timed]
            ops, device = get_ops("cpu", "reference"), torch.device("cpu")
            timed |= measure_speeds(new, ops, device, torch.float32, repeats=1)
    assert all(speed.encode > 0 and speed.decode > 0 for speed in timed.values())
    link = Link(bandwidth=1e3)
    for name in tagc.policies():
        plan = tagc.explain(synthetic_shapes(), name, world_size=2, link=link)
        for unit in plan.all_units:
            if unit.compressed and (unit.direction == "parameters") == parameters:
                assert {speed_key(s.codec) for s in unit.segments} <= set(timed)


@pytest.mark.parametrize("codec", [{"bits": 2}, {"group": 16, "level": 1.3}])
def test_a_matrix_has_a_speed(codec: dict[str, Any]) -> None:
    """By the rule as by the plan, whatever the shape."""
    from tagc.costs import speed as codec_speed

    rule = {"when": {"name": "*.weight"}, "codec": {"kind": "matrix", **codec}}
    policy = tagc.Policy.load({"schema": 1, "gradients": [rule]})
    codecs = auto.codecs_of(policy, torch.float32, 2, parameters=False)
    ops, device = get_ops("cpu", "reference"), torch.device("cpu")
    with patch.dict(codec_speed._ELEMENTS, {"cpu": 1 << 12}):
        timed = measure_speeds(codecs, ops, device, torch.float32, repeats=1)
    plan = tagc.explain({"a.weight": (96, 40)}, policy, world_size=2, link=Link(bandwidth=1e9))
    assert {speed_key(s.codec) for s in plan.units[0].segments} < set(timed)
    assert all(speed.encode > 0 and speed.decode > 0 for speed in timed.values())


def test_every_turn_starts_from_an_empty_residual() -> None:
    """One that grew from turn to turn would select more than fits, and time the trimming of it."""
    from types import SimpleNamespace

    from tagc.costs import speed as codec_speed

    real, seen = get_ops("cpu", "reference"), []

    def encoding(name: str) -> Any:
        def call(grad: Any, residual: Any, *rest: Any, **sizes: Any) -> None:
            seen.append((name, float(residual.abs().max())))
            getattr(real, name)(grad, residual, *rest, **sizes)

        return call

    decoders = {name: getattr(real, name) for name in ("decode", "unpack", "dequantize")}
    encoders = {name: encoding(name) for name in ("encode", "pack", "quantize")}
    ops: Any = SimpleNamespace(**decoders, **encoders)
    with patch.dict(codec_speed._ELEMENTS, {"cpu": 1 << 12}):
        for policy in ("all", "packed-20", "loco-4bit"):
            codecs = auto.codecs_of(tagc.Policy.load(policy), torch.float32, 2, parameters=False)
            measure_speeds(codecs, ops, torch.device("cpu"), torch.float32, repeats=3)
    assert seen == [(name, 0.0) for name in ("encode", "pack", "quantize") for _ in range(4)]


def synthetic_shapes() -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in synthetic(1_000_000).params}

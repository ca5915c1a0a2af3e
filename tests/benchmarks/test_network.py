"""The network benchmark on a network: what the kernel counted is what was meant to be sent."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.network.cells import Options, ResultsFile, measure
from benchmarks.network.methods import resolve_all
from benchmarks.network.namespaces import Network, Rate, existing, remove_stale
from benchmarks.network.ranks import Ranks, RanksError
from benchmarks.network.results import group
from benchmarks.network.training import Model, Settings
from examples.gpt import Block, GPTConfig
from support.paths import ROOT

pytestmark = [
    pytest.mark.network,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
        reason="needs root, ip and tc",
    ),
]

# Large enough that headers are a small share of the bytes.
SETTINGS = Settings(width=192, layers=2, heads=4)
POLICY = """\
schema: 1
about: Every weight matrix, from the first step on.
gradients:
  - when: {role: [attention, mlp, embedding, head, other]}
    codec: {kind: sketch, density: 0.2}
"""


def test_the_kernel_counts_what_tagc_counts(tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    methods = tuple(resolve_all([str(policy), "fp32-gloo", "fp32-messages", f"{policy}@bf16"]))
    rates = (Rate(None), Rate.parse("400mbit"))
    options = Options(ranks=(2,), rates=rates, methods=methods, settings=SETTINGS, steps=3)
    results = ResultsFile(tmp_path / "results.jsonl")
    measure(options, results, lambda text: None)
    cells = [json.loads(line) for line in results.path.read_text().splitlines()]
    steps = {(c["key"]["method"], c["key"]["rate"]): c for c in cells if c["key"]["kind"] == "step"}
    assert len(steps) == 8
    assert len(cells) == 2 + 8

    gathered = _gathered_bytes(2)
    for rate in ("unlimited", "400mbit"):
        ours = steps[str(policy), rate]
        sent = ours["tagc_bytes"]["gradients"]
        assert sent > 0
        assert ours["kernel_bytes"] == pytest.approx(gathered + sent, rel=0.03)
        half = steps[f"{policy}@bf16", rate]
        assert half["kernel_bytes"] == pytest.approx(gathered / 2 + sent, rel=0.03)
        dense = _shard_bytes(2)
        assert ours["payload_bytes"]["gradients"] == sent
        whole = steps["fp32-messages", rate]
        assert whole["payload_bytes"]["gradients"] == dense
        assert whole["kernel_bytes"] == pytest.approx(gathered + dense, rel=0.03)
        # gloo's own reduce-scatter sends twice what it must.
        wasted = steps["fp32-gloo", rate]["kernel_bytes"]
        assert wasted == pytest.approx(gathered + 2 * dense, rel=0.03)
        for cell in steps.values():
            assert cell["payload_bytes"]["parameters"] in (gathered, gathered / 2)

    before = results.path.read_text()
    measure(options, ResultsFile(results.path), lambda text: None)
    assert results.path.read_text() == before
    assert _mine() == []


def test_sites_over_a_link_with_latency(tmp_path):
    """The kernel counts what the plan says, and an exchange takes a round trip at least."""
    policy = {"schema": 1, "extends": "sites", "sites": {"every": 2}}
    (tmp_path / "policy.yaml").write_text(json.dumps(policy))
    methods = tuple(resolve_all([str(tmp_path / "policy.yaml")]))
    rates = (Rate(None), Rate.parse("400mbit"))
    options = Options(
        ranks=(2,),
        rates=rates,
        methods=methods,
        settings=SETTINGS,
        latency=0.03,
        step_time=0.02,
    )
    results = ResultsFile(tmp_path / "results.jsonl")
    measure(options, results, lambda text: None)
    cells = {c["key"]["rate"]: c for c in results.cells if c["key"]["kind"] == "sites"}
    (cell,) = cells.values()
    assert cell["key"]["rate"] == "400mbit"
    assert cell["plan_bytes"] == pytest.approx(cell["sent_bytes"])
    assert cell["kernel_bytes"] == pytest.approx(cell["plan_bytes"], rel=0.03)
    assert cell["waited_exchanges"] == cell["exchanges"] == len(cell["period_seconds"])
    assert cell["every"] * cell["waited_seconds"] > 0.03
    assert min(alone for _, alone in cell["period_seconds"]) > 2 * 0.02
    assert all(c["exchange_latency"] > 0.03 for c in results.cells if c["key"]["kind"] == "link")
    assert _mine() == []


def test_what_leaves_a_host_of_two_ranks(tmp_path):
    """Both send to their like on the other host, a row of the host's sum each, where each of 4
    ranks that send for themselves sends three rows of its own. The rest goes over the loopback."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY + "parameters:\n  - when: {}\n    codec: {kind: quantized, bits: 8}\n")
    methods = tuple(resolve_all(["fp32-messages", "bf16-wire-messages", str(policy)]))
    options = Options(
        ranks=(4,),
        ranks_per_host=2,
        rates=(Rate(None), Rate.parse("400mbit")),
        methods=methods,
        settings=SETTINGS,
        steps=3,
    )
    results = ResultsFile(tmp_path / "results.jsonl")
    measure(options, results, lambda text: None)
    cells = [json.loads(line) for line in results.path.read_text().splitlines()]
    steps = {(c["key"]["method"], c["key"]["rate"]): c for c in cells if c["key"]["kind"] == "step"}
    dense = 2 / 3 * (_gathered_bytes(4) + _shard_bytes(4))
    for rate in ("unlimited", "400mbit"):
        # Headers and acknowledgements are a larger share of fewer bytes.
        whole, half = (steps[name, rate] for name in ("fp32-messages", "bf16-wire-messages"))
        assert whole["kernel_bytes"] == pytest.approx(dense, rel=0.03)
        assert half["kernel_bytes"] == pytest.approx(dense / 2, rel=0.03)
        ours = steps[str(policy), rate]
        assert ours["kernel_bytes"] == pytest.approx(sum(ours["tagc_bytes"].values()), rel=0.05)
        assert ours["kernel_bytes"] < dense / 2
    assert [r.title for r in group(cells)] == ["4 ranks on 2 hosts"]
    assert _mine() == []


def test_a_failing_rank_ends_the_run_and_leaves_nothing():
    with Network(2) as net, Ranks(net, SETTINGS) as ranks:
        assert len(_mine()) == 3
        ranks.ask("ready")
        with pytest.raises(RanksError, match="no such method"):
            ranks.ask("settle", method="no such method")
    assert _mine() == []


def test_a_killed_run_is_cleaned_up_by_the_next_one():
    script = (
        "import time\nfrom benchmarks.network.namespaces import Network\n"
        "with Network(2) as net:\n    print(*net.namespaces, flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    with process:
        names = process.stdout.readline().split()
        assert len(names) == 2
        process.kill()
    assert set(names) <= set(existing())
    assert set(names) <= set(remove_stale())
    assert not set(names) & set(existing())


def test_an_interrupted_command_leaves_neither_processes_nor_namespaces(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "network", "--quick"]
    command += ["--json", str(tmp_path / "results.jsonl")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT)
    with process:
        names: list[str] = []
        deadline = time.monotonic() + 60
        while not _processes(names) and time.monotonic() < deadline:
            time.sleep(0.1)
            names = [name for name in existing() if f"-{process.pid}-" in name]
        workers = _processes(names)
        assert workers
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert not set(names) & set(existing())
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def _processes(names: list[str]) -> list[str]:
    return [
        pid
        for name in names
        for pid in subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
        ).stdout.split()
    ]


def _mine() -> list[str]:
    return [name for name in existing() if f"-{os.getpid()}-" in name]


def _shard_bytes(ranks: int, *, blocks_twice: bool = False) -> int:
    """fp32 bytes that a rank sends to reduce-scatter all gradients, or to gather all parameters:
    dimension 0 of each in chunks, padded to the first one's size."""
    config = GPTConfig(width=SETTINGS.width, layers=SETTINGS.layers, heads=SETTINGS.heads)
    model = Model(config)
    inside = {id(p) for m in model.modules() if isinstance(m, Block) for p in m.parameters()}
    columns = sum(
        math.ceil(p.shape[0] / ranks)
        * math.prod(p.shape[1:])
        * (2 if blocks_twice and id(p) in inside else 1)
        for p in model.parameters()
    )
    return (ranks - 1) * columns * 4


def _gathered_bytes(ranks: int) -> int:
    return _shard_bytes(ranks, blocks_twice=True)


@pytest.mark.parametrize("code", [0, 3])
def test_a_script_runs_on_every_host_until_one_fails(tmp_path: Path, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "rank = os.environ['RANK']\n"
        "open(sys.argv[1] + rank, 'w').write(os.environ['WORLD_SIZE'])\n"
        "while not os.path.exists(sys.argv[1] + '0'): time.sleep(0.01)\n"
        f"if rank == '1': sys.exit({code})\n"
        f"time.sleep({60 if code else 0})\n"
    )
    command = [sys.executable, "-m", "benchmarks.network.launch", "--rate", "100mbit", script]
    before = set(existing())
    command.append(tmp_path / "of rank ")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == code, done.stderr
    assert [(tmp_path / f"of rank {rank}").read_text() for rank in range(2)] == ["2", "2"]
    assert set(existing()) == before


def test_an_aggregator_adds_sketches_without_decoding(tmp_path: Path) -> None:
    """Every worker checks the sums of sketches itself, to the bit."""
    command = "-m benchmarks aggregate --workers 3 --rates unlimited --numel 65536 --rounds 2"
    command = [sys.executable, *command.split(), "--json", tmp_path / "records.jsonl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [row.removeprefix("| ").split(" | ") for row in done.stdout.splitlines()[2:]]
    bits = {row[0]: (float(row[1]), float(row[2])) for row in rows}
    assert bits["dense fp32"] == (32, 32)
    assert len(bits) == 7
    shared, own = (bits[f"sketch of {whose} 5%, int8x4"] for whose in ("a shared", "each worker's"))
    assert shared < own

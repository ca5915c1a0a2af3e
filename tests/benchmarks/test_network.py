"""The network benchmark on a network: what the kernel counted is what was meant to be sent."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network import suite
from benchmarks.network.launch import existing
from benchmarks.network.methods import Settings, resolve
from benchmarks.network.report import group
from benchmarks.records import read
from examples.gpt import GPT, Block, GPTConfig
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


def measured(tmp_path: Path, methods: list[str], **given: Any) -> list[dict[str, Any]]:
    """The cells of a run without a limit, and at 400 Mbit/s."""
    defaults = {"ranks": (2,), "ranks_per_host": 1, "latency": 0.0, "steps": 3, "step_time": None}
    args = argparse.Namespace(
        rates=("unlimited", "400mbit"),
        methods=tuple(map(resolve, methods)),
        settings=SETTINGS,
        json=tmp_path / "results.jsonl",
        command="test",
        **{**defaults, **given},
    )
    suite.measure(args, args.ranks[0])
    cells = read([args.json])
    suite.measure(args, args.ranks[0])
    assert read([args.json]) == cells  # nothing is measured twice
    assert _mine() == []
    return cells


def steps_of(cells: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(c["key"]["method"], c["key"]["rate"]): c for c in cells if c["key"]["kind"] == "step"}


def test_the_kernel_counts_what_tagc_counts(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    names = [str(policy), "fp32-gloo", "fp32-messages", f"{policy}@bf16"]
    cells = measured(tmp_path, names)
    steps = steps_of(cells)
    assert len(steps) == 8
    assert len(cells) == 2 + 8

    gathered, dense = _gathered_bytes(2), _shard_bytes(2)
    for rate in ("unlimited", "400mbit"):
        ours = steps[str(policy), rate]
        sent = ours["tagc_bytes"]["gradients"]
        assert sent > 0
        assert ours["kernel_bytes"] == pytest.approx(gathered + sent, rel=0.03)
        half = steps[f"{policy}@bf16", rate]
        assert half["kernel_bytes"] == pytest.approx(gathered / 2 + sent, rel=0.03)
        assert ours["payload_bytes"]["gradients"] == sent
        whole = steps["fp32-messages", rate]
        assert whole["payload_bytes"]["gradients"] == dense
        assert whole["kernel_bytes"] == pytest.approx(gathered + dense, rel=0.03)
        # gloo's own reduce-scatter sends twice what it must.
        wasted = steps["fp32-gloo", rate]["kernel_bytes"]
        assert wasted == pytest.approx(gathered + 2 * dense, rel=0.03)
    for cell in steps.values():
        assert cell["payload_bytes"]["parameters"] in (gathered, gathered / 2)
        assert len(cell["step_seconds"]) >= 3
        assert cell["compute_seconds"] > 0


def test_sites_over_a_link_with_latency(tmp_path: Path) -> None:
    """The kernel counts what the plan says, and an exchange takes a round trip at least."""
    policy = {"schema": 1, "extends": "sites", "sites": {"every": 2}}
    (tmp_path / "policy.yaml").write_text(json.dumps(policy))
    cells = measured(tmp_path, [str(tmp_path / "policy.yaml")], latency=0.03, step_time=0.02)
    (cell,) = (c for c in cells if c["key"]["kind"] == "sites")
    assert cell["key"]["rate"] == "400mbit"
    assert cell["plan_bytes"] == pytest.approx(cell["sent_bytes"])
    assert cell["kernel_bytes"] == pytest.approx(cell["plan_bytes"], rel=0.03)
    assert cell["waited_exchanges"] == cell["exchanges"] == len(cell["period_seconds"])
    assert cell["every"] * cell["waited_seconds"] > 0.03
    assert min(alone for _, alone in cell["period_seconds"]) > 2 * 0.02
    assert all(c["exchange_latency"] > 0.03 for c in cells if c["key"]["kind"] == "link")


def test_what_leaves_a_host_of_two_ranks(tmp_path: Path) -> None:
    """Both send to their like on the other host, a row of the host's sum each, where each of 4
    ranks that send for themselves sends three rows of its own. The rest goes over the loopback."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY + "parameters:\n  - when: {}\n    codec: {kind: quantized, bits: 8}\n")
    names = ["fp32-messages", "bf16-wire-messages", str(policy)]
    cells = measured(tmp_path, names, ranks=(4,), ranks_per_host=2)
    steps = steps_of(cells)
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


def test_an_interrupted_command_leaves_neither_processes_nor_namespaces(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "network", "--ranks", "2"]
    command += ["--methods", "fp32-messages", "--json", str(tmp_path / "results.jsonl")]
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
    model = GPT(config)
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

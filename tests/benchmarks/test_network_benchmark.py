"""The network benchmark without a network: its options, its results, its report."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import suites
from benchmarks.network import launch, ledger, report, suite
from benchmarks.network.launch import UNLIMITED, Network, NetworkUnavailable
from benchmarks.network.methods import DEFAULT, METHODS, keys, resolve
from benchmarks.records import Results, read
from support.paths import DATA

FIXTURE = DATA / "network-results.jsonl"


@pytest.mark.parametrize(
    ("rate", "bits", "label"),
    [("10gbit", 10**10, "10 Gbit/s"), ("200mbit", 2e8, "200 Mbit/s"), ("1.5mbit", 1.5e6, None)],
)
def test_rates_are_read(rate: str, bits: float, label: str | None) -> None:
    assert launch.rates(f"unlimited,{rate}") == ("unlimited", rate)
    assert launch.bits_per_second(rate) == bits
    assert label in (None, launch.label(rate))


@pytest.mark.parametrize("text", ["", "10", "0mbit", "-1mbit", "10mbyte", "1gbit,"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="bandwidth"):
        launch.rates(text)


def test_a_rate_becomes_a_token_bucket_with_a_millisecond_of_tokens() -> None:
    assert launch._rate_command("10gbit") == (
        "tc qdisc replace dev e0 root tbf rate 10000000000bit burst 1250000 latency 50ms"
    )
    assert "burst 69632 " in launch._rate_command("100mbit")  # no less than a large packet
    assert launch._rate_command(UNLIMITED) == "tc qdisc del dev e0 root"


@pytest.mark.parametrize("bridge", [True, False])
def test_nothing_is_made_in_the_hosts_own_namespace(bridge: bool) -> None:
    commands = [c.split() for c in launch._creation_commands("tag", 3, bridge=bridge)]
    made = [c[3] for c in commands if c[:3] == ["ip", "netns", "add"]]
    assert made == ["tag-switch", "tag-h0", "tag-h1", "tag-h2"]
    for command in commands:
        if command[:3] != ["ip", "netns", "add"]:
            assert command[:2] == ["ip", "-n"]
            assert command[2] in made
    # Without a bridge a process connects the ports.
    assert any("br0" in c for c in commands) == bridge


def options(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    suite.add_arguments(parser)
    args = parser.parse_args(words.split())
    suite.check(args)
    return args


def test_the_key_of_a_cell_has_what_its_numbers_depend_on() -> None:
    words = "--ranks 2 --rates 100mbit --methods ddp-bf16,sites"
    those = [key for key, _ in keys(options(words), 2)]
    # Sites are not measured without a limit.
    assert [(key["kind"], key["rate"]) for key in those] == [
        ("link", UNLIMITED),
        ("step", UNLIMITED),
        ("link", "100mbit"),
        ("step", "100mbit"),
        ("sites", "100mbit"),
    ]
    slow = [key for key, _ in keys(options(f"{words} --latency 50ms"), 2)]
    assert slow == [key | {"latency": 0.05} for key in those]
    elsewhere = [key for key, _ in keys(options(f"{words} --step-time 250ms"), 2)]
    assert elsewhere == [*those[:4], those[4] | {"step_time": 0.25}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ranks 1", "--ranks 1: one rank alone"),
        ("--ranks 4 --ranks-per-host 3", "not several hosts"),
        ("--micro-batches 0", "--micro-batches 0: a step has at least one"),
        ("--methods nothing", "'nothing' is no method"),
        ("--methods hybrid@fp8", "'hybrid@fp8': after a policy's name"),
        ("--methods sites@ddp", "'sites@ddp': every rank is a site"),
    ],
)
def test_options_are_refused(words: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        options(words)


def test_a_missing_tool_and_root_are_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(launch, "_run", _never)
    monkeypatch.setattr(launch.os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(NetworkUnavailable, match=r"^tc not found: install iproute2"), Network(2):
        pass
    monkeypatch.setattr(launch.os, "geteuid", lambda: 1000)
    assert suites.main(["network"]) == 2
    assert "need root" in capsys.readouterr().err


def test_a_network_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def run(command: str) -> str:
        words = command.split()
        if words[:3] == ["ip", "netns", "list"]:
            return "\n".join(made)
        if words[:3] == ["ip", "netns", "add"]:
            made.append(words[3])
        elif words[:3] == ["ip", "netns", "del"]:
            made.remove(words[3])
        elif "veth" in words:
            raise NetworkUnavailable("no veth here")
        return ""

    monkeypatch.setattr(launch, "check_requirements", lambda: None)
    monkeypatch.setattr(launch, "_run", run)
    with pytest.raises(NetworkUnavailable, match="no veth here"), Network(2):
        pass
    assert made == []


def test_only_namespaces_of_dead_processes_are_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = []

    def run(command: str) -> str:
        if "del" in command:
            removed.append(command.split()[3])
        return "tagcnet-1-r0 (id: 3)\ntagcnet-999999999-r0\ntagcnet-999999999-switch\nother\n"

    monkeypatch.setattr(launch, "_run", run)
    launch.remove_stale()
    assert removed == ["tagcnet-999999999-r0", "tagcnet-999999999-switch"]


def test_the_report_is_drawn_from_the_file_alone(tmp_path: Path, capsys: Any) -> None:
    assert suites.main(["report", str(FIXTURE), "--plots", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    # Of fp32's steps of 0.5, 0.6 and 0.7 s and 0.4 s in a second pass, and of 0.25 s.
    times = _row(text, "step time", "tagc-paper")
    assert _row(text, "step time", "fp32-messages") == ["0.050 s", "0.100 s", "0.550 s"]
    assert times == ["0.070 s", "0.120 s (0.83×)", "0.250 s (2.20×)"]
    # Kernel, over the payload of 2.5, payload two ways, tagc's count, collectives.
    row = _row(text, "MB per host", "tagc-paper")
    assert row == ["2.60", "+4.0%", "2.00", "0.50", "0.50", "30"]
    (drawn,) = tmp_path.iterdir()
    assert drawn.name == "network-step-time.png"
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_sites_are_compared_with_training_without_exchange() -> None:
    numbers = {
        "every": 32,
        "kernel_bytes": 101e3,
        "plan_bytes": 100e3,
        "waited_seconds": 0.02,
        "period_seconds": [[10.0, 9.5], [16.0, 8.0]],
    }
    key = {"ranks": 2, "rate": "100mbit", "latency": 0.05, "settings": {}}
    dense = {"kernel_bytes": 20e6, "step_seconds": [3.0, 1.0]}
    cells = [
        {"key": key | {"kind": "step", "method": "ddp-bf16", "definition": "a"}, **dense},
        {"key": key | {"kind": "sites", "method": "sites", "definition": "b"}, **numbers},
    ]
    cells.append({**cells[1], "key": cells[1]["key"] | {"step_time": 0.25}})
    (results,) = report.group([*cells, {"key": key | {"kind": "link", "latency": 0.02}}])[:1]
    assert results.title == "2 ranks, latency 50 ms"
    text = report.sites_table(results)
    assert "| 2.000 s | 13.7% | 20000.0 |" in text
    row = "| 0.406 s | 72.5% (50.0% to 95.0%) | 101.0 | 198 | +1.0% | 4.9% |"
    assert f"| `sites`, 100 Mbit/s {row}" in text
    assert f"| `sites`, 250 ms elsewhere, 100 Mbit/s {row}" in text


def test_cells_of_a_methods_former_definition_are_left_out() -> None:
    cells = read([FIXTURE])
    newer = json.loads(json.dumps(next(c for c in cells if c["key"].get("method") == "tagc-paper")))
    newer["key"]["definition"], newer["step_seconds"] = "newer", [9.0]
    (results,) = report.group([*cells, newer])
    found = [cell for rate in results.rates for cell in results.find("step", rate, "tagc-paper")]
    assert found == [newer]
    assert len(results.find("step", "100mbit", "fp32-messages")) == 2


def test_a_record_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    path, kind = tmp_path / "results.jsonl", {"suite": "network"}
    key = {"kind": "step", "ranks": 2, "method": "fp32"}
    results = Results(path, "key", kind)
    assert results.get(key) is None
    results.add(key, {"step_seconds": [1.0]})
    found = Results(path, "key", kind).get(dict(reversed(key.items())))
    assert found == kind | {"key": key, "step_seconds": [1.0]}
    assert Results(path, "key", kind).get(key | {"method": "bf16"}) is None
    assert Results(path, "key", {"suite": "quality"}).records == []


@pytest.mark.parametrize(
    ("kind", "size"),
    [("all_gather", 720), ("reduce_scatter", 180), ("all_reduce", 360), ("send", 240)],
)
def test_payload_is_what_a_rank_must_send(kind: str, size: int) -> None:
    assert ledger.payload_bytes(kind, torch.zeros(60), 4) == size


def test_a_policy_is_a_method_and_may_gather_in_bf16(tmp_path: Path) -> None:
    method = resolve("one-bit@bf16")
    assert (method.policy, method.wire) == ("one-bit", "bfloat16")
    assert resolve("one-bit").wire == "gloo"
    hybrid = resolve("hybrid@bf16")  # has rules for parameters
    assert (hybrid.wire, hybrid.mixed_precision) == ("gloo", True)
    assert resolve("one-bit").definition != method.definition
    assert resolve("fp32-gloo") is METHODS["fp32-gloo"]
    assert resolve("sites").apart
    for name in DEFAULT:
        assert resolve(name).measures_link == (name == "auto")
    # A definition follows the policy, not its name.
    policy = tmp_path / "mine.yaml"
    rule = "gradients:\n  - when: {role: mlp}\n    codec: {kind: sketch, density: 0.1}\n"
    policy.write_text(f"schema: 1\nabout: x\n{rule}")
    before = resolve(str(policy)).definition
    policy.write_text(policy.read_text().replace("0.1", "0.2"))
    assert resolve(str(policy)).definition != before


def _row(text: str, header: str, method: str) -> list[str]:
    """The cells of a method's row in the table whose header starts so."""
    table = text[text.index(f"| {header}") :].split("\n\n")[0]
    line = next(line for line in table.splitlines() if line.startswith(f"| `{method}`"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def _never(command: str) -> str:
    raise AssertionError(f"ran {command}")

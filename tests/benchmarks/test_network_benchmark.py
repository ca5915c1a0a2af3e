"""The network benchmark without a network: its options and its cells."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import suites
from benchmarks.network import launch, suite
from benchmarks.network.launch import UNLIMITED, Network, NetworkUnavailable
from benchmarks.network.methods import DEFAULT, METHODS, keys, resolve


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
    ("words", "message"),
    [
        ("--ranks 1", "--ranks 1: one rank alone"),
        ("--ranks 4 --ranks-per-host 3", "not several hosts"),
        ("--methods nothing", "'nothing' is no method"),
        ("--methods hybrid@fp8", "'hybrid@fp8': after a policy's name"),
        ("--methods sites@ddp", "'sites@ddp': every rank is a site"),
    ],
)
def test_options_are_refused(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
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


def _never(command: str) -> str:
    raise AssertionError(f"ran {command}")

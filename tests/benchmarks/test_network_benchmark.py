"""The network benchmark without a network: its commands, its results file, its report."""

from __future__ import annotations

import argparse
import json
import shutil
from typing import Any

import pytest
import torch

from benchmarks import network, suites
from benchmarks.network import ledger, namespaces, report
from benchmarks.network.cells import UNLIMITED, ResultsFile, _keys, combine, combine_sites
from benchmarks.network.latency import Switch
from benchmarks.network.methods import METHODS, default_methods, resolve
from benchmarks.network.namespaces import Network, NetworkUnavailable, Rate, creation_commands
from benchmarks.network.predicted import predicted_seconds
from benchmarks.network.results import Results
from benchmarks.records import read
from support.paths import DATA, ROOT

FIXTURE = DATA / "network-results.jsonl"


@pytest.mark.parametrize(
    ("text", "bits", "label"),
    [
        ("unlimited", None, "unlimited"),
        ("10gbit", 10**10, "10 Gbit/s"),
        ("200mbit", 2 * 10**8, "200 Mbit/s"),
        ("1.5mbit", 1_500_000, "1.5 Mbit/s"),
    ],
)
def test_rates_are_read_and_written(text, bits, label):
    rate = Rate.parse(text)
    assert rate.bits_per_second == bits
    assert str(rate) == text
    assert rate.label == label


@pytest.mark.parametrize("text", ["", "10", "10 gbit", "0mbit", "-1mbit", "10mbyte"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ValueError, match="is no rate"):
        Rate.parse(text)


def test_a_rate_becomes_a_token_bucket_with_a_millisecond_of_tokens():
    command = namespaces.rate_command("ns", Rate.parse("10gbit"))
    assert " ".join(command) == (
        "tc -n ns qdisc replace dev e0 root tbf rate 10000000000bit burst 1250000 latency 50ms"
    )
    slow = namespaces.rate_command("ns", Rate.parse("100mbit"))
    assert slow[slow.index("burst") + 1] == str(68 * 1024)  # no less than a large packet
    assert namespaces.rate_command("ns", Rate(None))[3:5] == ["qdisc", "del"]


def test_nothing_is_made_in_the_hosts_own_namespace():
    commands = creation_commands("tag", 3)
    made = [c[3] for c in commands if c[:3] == ["ip", "netns", "add"]]
    assert made == ["tag-switch", "tag-h0", "tag-h1", "tag-h2"]
    for command in commands:
        if command[:3] != ["ip", "netns", "add"]:
            assert command[:2] == ["ip", "-n"]
            assert command[2] in made
    pairs = [c for c in commands if "veth" in c]
    assert [c[c.index("netns") + 1] for c in pairs] == made[1:]
    addresses = {c[c.index("add", 3) + 1] for c in commands if "addr" in c}
    assert addresses == {"10.77.0.1/24", "10.77.0.2/24", "10.77.0.3/24"}


def test_with_latency_a_process_connects_the_ports():
    commands = creation_commands("tag", 2, bridge=False)
    assert not [c for c in commands if "br0" in c]
    assert len([c for c in commands if "veth" in c]) == 2


def test_the_switch_holds_frames_and_learns_where_hosts_are():
    def frame(target: int, source: int) -> bytes:
        return bytes(10) + bytes([target] * 6) + bytes([source] * 6) + b"content"

    everyone = 0xFF
    switch = Switch(3, 0.05)
    assert switch.pause(1.0) is None
    switch.take(0, frame(everyone, 1), 1.0)
    assert switch.pause(1.0) == pytest.approx(0.05)
    assert list(switch.due(1.049)) == []
    assert list(switch.due(1.05)) == [(1, frame(everyone, 1)), (2, frame(everyone, 1))]
    switch.take(1, frame(1, 2), 2.0)  # to the host that was heard
    switch.take(0, frame(2, 1), 2.01)
    assert switch.pause(3.0) == 0
    assert list(switch.due(2.055)) == [(0, frame(1, 2))]
    assert list(switch.due(3.0)) == [(1, frame(2, 1))]
    assert switch.pause(3.0) is None


def test_latency_is_an_option_and_part_of_the_key():
    parser = argparse.ArgumentParser()
    network.add_arguments(parser)
    args = ["--ranks", "2", "--rates", "100mbit", "--methods", "ddp-bf16,sites"]
    without = network._options(parser.parse_args(args))
    options = network._options(parser.parse_args([*args, "--latency", "50ms"]))
    assert (without.latency, options.latency) == (0, 0.05)
    elsewhere = network._options(parser.parse_args([*args, "--step-time", "250ms"]))
    for key, other in zip(_keys(elsewhere, 2), _keys(without, 2), strict=True):
        assert key == other | ({"step_time": 0.25} if key["kind"] == "sites" else {})
    keys, those = list(_keys(options, 2)), list(_keys(without, 2))
    assert keys == [key | {"latency": 0.05} for key in those]
    # Sites are not measured without a limit.
    found = [(key["kind"], key["rate"]) for key in keys]
    assert options.rates == (UNLIMITED, Rate.parse("100mbit"))
    assert [(kind, rate) for kind, rate in found if kind != "link"] == [
        ("step", "unlimited"),
        ("step", "100mbit"),
        ("sites", "100mbit"),
    ]


def test_sites_are_compared_with_training_without_exchange():
    answer = {
        "every": 32,
        "kernel_bytes": 101e3,
        "plan_bytes": 100e3,
        "sent_bytes": 100e3,
        "waited_seconds": 0.01,
        "waited_exchanges": 1,
        "exchanges": 2,
        "parameters": 10,
        "period_seconds": [[10.0, 9.0], [8.0, 8.0]],
    }
    other = answer | {"period_seconds": [[9.0, 9.5], [16.0, 8.0]], "waited_seconds": 0.03}
    numbers = combine_sites([answer, other])
    assert numbers["period_seconds"] == [[10.0, 9.5], [16.0, 8.0]]
    assert (numbers["waited_seconds"], numbers["every"]) == (0.02, 32)
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


def test_root_is_asked_for_first(monkeypatch):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces, "_run", _never)
    with pytest.raises(NetworkUnavailable, match="need root"), Network(2):
        pass


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    monkeypatch.setattr(namespaces, "_run", _never)
    with pytest.raises(NetworkUnavailable, match=r"^tc not found: install iproute2"), Network(2):
        pass


def test_a_network_that_cannot_be_made_leaves_nothing(monkeypatch):
    made = []

    def run(command):
        if command[:3] == ["ip", "netns", "list"]:
            return "\n".join(made)
        if command[:3] == ["ip", "netns", "add"]:
            made.append(command[3])
        elif command[:3] == ["ip", "netns", "del"]:
            made.remove(command[3])
        elif "veth" in command:
            raise NetworkUnavailable("no veth here")
        return ""

    monkeypatch.setattr(namespaces, "check_requirements", lambda: None)
    monkeypatch.setattr(namespaces, "_run", run)
    with pytest.raises(NetworkUnavailable, match="no veth here"), Network(2):
        pass
    assert made == []


def test_only_namespaces_of_dead_processes_are_stale(monkeypatch):
    removed = []

    def run(command):
        if command[2] == "del":
            removed.append(command[3])
        return "tagcnet-1-r0 (id: 3)\ntagcnet-999999999-r0\ntagcnet-999999999-switch\nother\n"

    monkeypatch.setattr(namespaces, "_run", run)
    assert namespaces.remove_stale() == removed
    assert removed == ["tagcnet-999999999-r0", "tagcnet-999999999-switch"]


def test_the_command_says_why_it_cannot_run_here(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    parser = argparse.ArgumentParser()
    network.add_arguments(parser)
    assert network.run(parser.parse_args(["--json", str(tmp_path / "x.jsonl")])) == 2
    assert "need root" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_report_is_drawn_from_the_file_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(namespaces, "_run", _never)
    assert suites.main(["report", str(FIXTURE), "--plots", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    # Of fp32's steps of 0.5, 0.6 and 0.7 s and 0.4 s in a second pass, and of 0.25 s.
    assert _row(text, "step time", "fp32-messages") == ["0.050 s", "0.100 s", "0.550 s"]
    assert _row(text, "step time", "tagc-paper") == [
        "0.070 s",
        "0.120 s (0.83×)",
        "0.250 s (2.20×)",
    ]
    (drawn,) = tmp_path.iterdir()
    assert drawn.name == "network-step-time.png"
    assert drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("network", "0.313 s (1.07×) | 0.359 s (2.21×) | 0.568 s (4.90×) | 0.873 s (5.98×) |"),
        ("network-hosts", "1.085 s (3.00×) | 1.006 s (5.64×) | 1.222 s (8.70×) |"),
        ("network-hosts-quiet", "0.878 s | 0.813 s | 0.817 s | 1.044 s |"),
    ],
)
def test_committed_records_print_what_the_docs_say(file, said):
    assert said in report.table(read([ROOT / "benchmarks" / "results" / f"{file}.jsonl"]))


def test_a_step_is_predicted_from_the_unlimited_one_and_the_bytes():
    link = {"exchange_rate": 80e6, "all_gather_rate": 40e6, "exchange_latency": 1e-3}
    free = {"exchange_rate": 800e6, "all_gather_rate": 800e6, "exchange_latency": 1e-3}
    unlimited = {"compute_seconds": 0.5, "communication_seconds": [0.9, 0.08, 0.07]}
    cell = {
        "key": {"rate": "80mbit"},
        "payload_bytes": {"parameters": 2e6, "gradients": 1e6},
        "collectives": {"all_gather": 4.0, "reduce_scatter": 2.0},
    }
    # 10 MB/s; gloo's all-gather takes twice as long, its reduce-scatter sends twice the bytes. A
    # full bucket at each of the six collectives.
    saved = 6 * 68 * 1024 / 10e6
    native = predicted_seconds("bf16-gloo", cell, unlimited, link, free, 2)
    assert native == pytest.approx(0.5 + 0.08 + (0.4 + 0.2) - saved - (0.02 + 0.02))
    # A probe of the unlimited link that came out slow makes no link faster than it.
    assert predicted_seconds("bf16-gloo", cell, unlimited, free, link, 2) == pytest.approx(0.58)
    cell["collectives"] = {"send": 3.0, "receive": 3.0}
    messages = predicted_seconds("hybrid", cell, unlimited, link, free, 2)
    assert messages == pytest.approx(0.5 + 0.08 + 0.3 - saved / 2 - 0.03)
    # Without compute there is no pause in which a bucket could fill.
    busy = unlimited | {"compute_seconds": 0.0}
    messages = predicted_seconds("hybrid", cell, busy, link, free, 2)
    assert messages == pytest.approx(0.08 + 0.3 - 0.03)
    assert predicted_seconds("fsdp1-bf16-hook", cell, unlimited, link, free, 2) is None


def test_a_prediction_is_compared_with_the_step_of_its_own_pass():
    settings = {"width": 8}

    def cell(kind: str, rate: str, turn: int, **numbers: Any) -> Any:
        key = {"kind": kind, "ranks": 2, "rate": rate, "pass": turn, "settings": settings}
        if kind == "step":
            key["method"] = "hybrid"
        return {"key": key, **numbers}

    cells = []
    for turn, compute in enumerate((1.0, 2.0)):  # the machine was slower in the second pass
        for rate, bits, took in (("unlimited", 80e9, 0.0), ("80mbit", 80e6, 0.0930)):
            probe = dict.fromkeys(("exchange_rate", "all_gather_rate"), bits)
            cells.append(cell("link", rate, turn, exchange_latency=0.0, **probe))
            cells.append(
                cell(
                    "step",
                    rate,
                    turn,
                    step_seconds=[compute + took],
                    communication_seconds=[took],
                    compute_seconds=compute,
                    payload_bytes={"gradients": 1e6},
                    collectives={"send": 1.0},
                )
            )
    results = Results(settings, 2, 1, cells)
    miss = results.predicted_miss("hybrid", Rate.parse("80mbit"))
    assert miss == pytest.approx(0, abs=1e-3)
    assert results.predicted_miss("hybrid", Rate(None)) is None
    assert "0%" in report.predicted_table(results)


def test_the_table_of_bytes_shows_what_each_count_is():
    (results,) = report.group(read([FIXTURE]))
    row = _row(report.bytes_table(results), "MB per host", "tagc-paper")
    # Kernel, over the payload of 2.5, payload two ways, tagc's count, collectives.
    assert row == ["2.60", "+4.0%", "2.00", "0.50", "0.50", "30"]


def test_cells_of_a_methods_former_definition_are_left_out():
    cells = read([FIXTURE])
    newer = json.loads(json.dumps(next(c for c in cells if c["key"].get("method") == "tagc-paper")))
    newer["key"]["definition"], newer["step_seconds"] = "newer", [9.0]
    (results,) = report.group([*cells, newer])
    found = [cell for rate in results.rates for cell in results.steps("tagc-paper", rate)]
    assert found == [newer]
    assert len(results.steps("fp32-messages", Rate.parse("100mbit"))) == 2


def test_a_cell_that_is_there_is_not_measured_again(tmp_path):
    path = tmp_path / "results.jsonl"
    key = {"kind": "step", "ranks": 2, "method": "fp32"}
    assert ResultsFile(path).get(key) is None
    ResultsFile(path, {"torch": "2"}).add(key, {"step_seconds": [1.0]})
    found = ResultsFile(path).get(dict(reversed(key.items())))
    assert found is not None
    assert (found["torch"], found["step_seconds"]) == ("2", [1.0])
    assert ResultsFile(path).get(key | {"method": "bf16"}) is None


def test_a_cell_is_as_slow_as_its_slowest_rank():
    answer = {
        "kernel_bytes": 10,
        "tagc_bytes": None,
        "payload_bytes": {},
        "collectives": {},
    }
    first = answer | {"step_seconds": [1.0, 5.0, 3.0], "communication_seconds": [0.5, 1.0, 1.0]}
    second = answer | {"step_seconds": [2.0, 4.0, 3.0], "communication_seconds": [0.5, 1.0, 2.0]}
    cell = combine([first, second | {"kernel_bytes": 30}])
    assert cell["step_seconds"] == [2.0, 5.0, 3.0]
    assert cell["communication_seconds"] == [0.5, 1.0, 1.5]
    assert cell["compute_seconds"] == 1.5  # of 1, 3.5 and 1.5
    assert cell["kernel_bytes"] == 20
    assert cell["tagc_bytes"] is None
    counted = combine([first | {"tagc_bytes": [4, 8]}, second | {"tagc_bytes": [8, 0]}])
    assert counted["tagc_bytes"] == {"gradients": 6, "parameters": 4}


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("all_gather", 720),
        ("reduce_scatter", 180),
        ("all_to_all", 180),
        ("all_reduce", 360),
        ("send", 240),
        ("receive", 0),
    ],
)
def test_payload_is_what_a_rank_must_send(kind, size):
    assert ledger.payload_bytes(kind, torch.zeros(60), 4) == size


def test_a_policy_is_a_method_and_may_gather_in_bf16():
    method = resolve("loco-4bit@bf16")
    assert (method.policy, method.wire) == ("loco-4bit", "bfloat16")
    assert resolve("loco-4bit").wire == "gloo"
    hybrid = resolve("hybrid@bf16")  # has rules for parameters
    assert (hybrid.wire, hybrid.mixed_precision) == ("gloo", True)
    assert resolve("loco-4bit").definition != method.definition
    assert resolve("fp32-gloo") is METHODS["fp32-gloo"]
    assert resolve("sites").apart
    assert not resolve("hosts").apart
    for name in default_methods():
        assert resolve(name).measures_link == (name == "auto")


@pytest.mark.parametrize("name", ["nothing", "loco-4bit@fp8", "fp32-gloo@bf16", "sites@ddp"])
def test_an_unknown_method_is_refused(name):
    with pytest.raises(ValueError, match=name):
        resolve(name)


def test_a_definition_follows_the_policy_not_the_name(tmp_path):
    policy = tmp_path / "mine.yaml"
    policy.write_text(
        "schema: 1\nabout: x\ngradients:\n  - when: {role: mlp}\n"
        "    codec: {kind: sketch, density: 0.1}\n"
    )
    before = resolve(str(policy)).definition
    policy.write_text(policy.read_text().replace("0.1", "0.2"))
    assert resolve(str(policy)).definition != before


def _row(text: str, header: str, method: str) -> list[str]:
    """The cells of a method's row in the table whose header starts so."""
    table = text[text.index(f"| {header}") :].split("\n\n")[0]
    line = next(line for line in table.splitlines() if line.startswith(f"| `{method}`"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def _never(command: list[str]) -> str:
    raise AssertionError(f"ran {json.dumps(command)}")

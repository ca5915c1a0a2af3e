"""Which runs the comparisons of quality make, and training runs on real ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks import suites
from benchmarks.gloo import on_ranks as spawned
from benchmarks.llama import rotated
from benchmarks.one_device import Memory, through_memory
from benchmarks.quality.methods import DENSE, GRID, LINES, METHODS, method_of
from benchmarks.quality.pretrained import REHEARSAL, Pairs, encoder, retrieval
from benchmarks.quality.runs import Comparison, paired_runs, sweep_runs
from benchmarks.quality.settings import SETTINGS, Recipe, Run, Shape
from benchmarks.quality.training import Lion, train
from support.distributed import on_ranks
from support.marks import slow
from tagc.policy import Policy

SHAPE = Shape(width=32, heads=1, layers=1, context=16, ranks=2, batch=2)
pytestmark = pytest.mark.timeout(600)
METHOD = method_of("matrix, 1 bit")


def made(comparison: Comparison, loss_of: Callable[[Run], float]) -> list[Run]:
    """The runs in their order, where each ends at a loss."""
    runs: list[Run] = []
    while run := next(comparison(lambda run: loss_of(run) if run in runs else None), None):
        assert run not in runs
        runs.append(run)
    return runs


def swept(best: float, **given: Any) -> list[tuple[float, int]]:
    """Rates and seeds in the order of a sweep whose loss is least at ``best``."""
    runs = partial(sweep_runs, methods=[METHOD.name], shape=SHAPE, steps=4, seeds=2, **given)

    def loss(run: Run) -> float:
        distance = abs(math.log(run.rate / best))
        return distance if distance < 2 else math.inf

    return [(run.rate, run.seed) for run in made(runs, loss)]


def test_a_sweep_goes_on_until_the_best_lies_between_others() -> None:
    start = [(rate, 0) for rate in METHOD.rates]
    middle = METHOD.rates[1]
    assert swept(middle) == [*start, (middle, 1)]
    lower = list(reversed([rate for rate in GRID if rate < METHOD.rates[0]]))
    assert swept(lower[1]) == [*start, *((rate, 0) for rate in lower[:3]), (lower[1], 1)]
    assert swept(lower[1], max_rates=4) == [*start, (lower[0], 0), (lower[0], 1)]
    assert swept(GRID[-1], max_rates=len(GRID))[-2:] == [(GRID[-1], 0), (GRID[-1], 1)]


def test_pairs_are_of_the_settings_own_lines() -> None:
    setting = replace(SETTINGS["llama"], lines=("hosts", "one-bit"))
    # Dense's losses differ by seed; hosts are always 1% above, 1 bit by its seed more.
    above = {"dense": 0.0, "hosts": 0.01, "one-bit": 0.02}

    def runs(lines: list[str]) -> list[tuple[str, int]]:
        found = made(
            partial(paired_runs, settings=[setting], lines=lines, kept=True, seeds=(3, 4)),
            lambda run: (2 + run.seed) * (1 + above[run.method.name] * (1 + run.seed % 2)),
        )
        assert all(run.recipe.kept == (run.method != DENSE) for run in found)
        return [(run.method.name, run.seed) for run in found]

    own = ("dense", "hosts", "one-bit")
    assert runs([]) == [*((n, seed) for seed in range(3) for n in own), *((n, 3) for n in own)]
    assert {name for name, _ in runs(["hosts"])} == {"dense", "hosts"}


SITES = (
    "sites, every step, 4 bits",
    "sites, every 32, 2 bits, outer momentum 0.5, together 500",
    "sites, every 32, 1 bit, no feedback, delay 4",
)


@pytest.mark.parametrize("name", [*METHODS, *LINES, *SITES, *SETTINGS["llama"].lines])
def test_every_name_has_a_policy_and_rates_to_begin_with(name: str) -> None:
    method = method_of(name)
    at = [GRID.index(rate) for rate in method.rates]
    assert len(at) >= 3
    assert at == list(range(at[0], at[0] + len(at)))
    assert (method.policy is None) == (method == DENSE or method.powersgd is not None)
    assert method.in_sites == name.startswith("sites")
    if method.policy is not None:
        Policy.load(method.policy)


def test_lion_is_the_papers() -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5))
    optimizer = Lion([p], lr=0.1, betas=(0.9, 0.99))
    optimizer.param_groups[0]["weight_decay"] = 0.5
    w, m = p.detach().clone(), torch.zeros(5)
    for _ in range(4):
        g = torch.randn(5)
        p.grad = g.clone()
        optimizer.step()
        w -= 0.1 * ((0.9 * m + 0.1 * g).sign() + 0.5 * w)
        m = 0.99 * m + 0.01 * g
        torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-6)


def test_rotated_products_depend_on_distances_alone() -> None:
    torch.manual_seed(0)
    q, k = (rotated(torch.randn(8).expand(6, 8)) for _ in range(2))  # the same at all positions
    products = q @ k.T
    for distance in range(1, 6):
        same = products.diagonal(-distance)
        torch.testing.assert_close(same, same[:1].expand_as(same))
        assert not torch.allclose(same[0], products[0, 0])


# Training on real ranks

RUN = Run(
    method=method_of("matrix, 1 bit"),
    shape=SHAPE,
    steps=4,
    rate=1e-3,
    recipe=Recipe(windows=8, averaged=2),
)


@on_ranks(2, timeout=300)
def test_a_run_says_what_it_sent(rank: int, world_size: int) -> None:
    found = train(RUN)
    # 1 bit, and the scales of short rows and columns.
    assert 1 < found["bits"] < 3
    assert "parameter_bits" not in found
    assert list(found["losses"]) == ["1", "2", "3", "4"]
    assert len(found["norms"]) == 4
    assert found["loss"] == pytest.approx(found["losses"]["4"], abs=1e-5)
    assert train(RUN)["loss"] == found["loss"]
    assert train(replace(RUN, rate=2e-3))["loss"] != found["loss"]
    assert train(replace(RUN, method=DENSE))["bits"] == 32
    changes = train(replace(RUN, method=method_of("changes in 4 bits")))
    assert (changes["bits"], changes["parameter_bits"] < 5) == (32, True)


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("optimizer", [slow("muon"), slow("sgd"), "lion"])
def test_every_optimizer_trains(rank: int, world_size: int, optimizer: str) -> None:
    recipe = Recipe(optimizer=optimizer, windows=8, kept=True, clip=None)
    found = train(replace(RUN, method=method_of("1 bit"), recipe=recipe))
    assert found["loss"] is not None


@on_ranks(2, timeout=300)
def test_a_second_family_trains(rank: int, world_size: int) -> None:
    shape = replace(SHAPE, family="llama", width=64, heads=2)
    run = replace(RUN, shape=shape, steps=2, method=DENSE)
    first = replace(run, shape=replace(shape, family="gpt")).key
    assert "family" not in first  # so its records stay known
    assert run.key == first | {"family": "llama"}
    dense = train(run)
    rows, projections = 2 * 256, 3 * 64 + 9 * 64  # of embedding and head; of a block, at width 64
    assert dense["parameters"] == 64 * (rows + projections + 3)
    recipe = replace(run.recipe, kept=True)
    found = train(replace(run, method=method_of("thrifty"), recipe=recipe))
    assert found["bits"] < 32
    assert found["loss"] == pytest.approx(dense["loss"], rel=0.02)
    assert found["loss"] != dense["loss"]


@pytest.mark.slow
def test_exact_changes_are_counted_at_several_rates(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "exact.jsonl"
    command = ["quality", "exact", "--steps", "3", "--json", str(file)]
    assert suites.main(command) == 0
    printed = capsys.readouterr().out
    assert "| 1e-06, after 0.0003 | 3 |" in printed
    records = [json.loads(line) for line in file.read_text().splitlines()]
    means = [sum(r["bits"]) / 3 for r in records]
    assert 10 > means[0] > means[1] > means[2] > means[3] > 0
    for r in records:
        assert len(r["bits"]) == 3
        assert r["native_bits_kept"] == pytest.approx(16)
        assert 16 < r["native_bits"] < 32  # FSDP gathers the root once
    assert suites.main(command) == 0
    assert capsys.readouterr().out == printed
    assert len(file.read_text().splitlines()) == 4


@pytest.mark.slow
def test_fine_tuning_retrieves_better_and_lines_are_paired(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "pretrained.jsonl"
    command = ["quality", "pretrained", "--rehearse", "--seeds", "1"]
    command += ["--lines", "dense;loco-4bit;DDP, one-bit", "--json", str(file)]
    assert suites.main([*command, "--steps", "60"]) == 0
    printed = capsys.readouterr().out
    dense, four, one = (json.loads(line) for line in file.read_text().splitlines())
    assert (four["bits"] < 5, one["bits"] < 2, one["run"]["ddp"]) == (True, True, True)
    for record in (dense, four, one):
        assert record["before"] == dense["before"]
        assert record["loss"] < dense["before"] - 0.02
        assert 0 <= record["recall"][0] <= 1 - record["before"]
        assert 0 <= record["recall"][1] <= 1 - record["loss"]
    gap = dense["loss"] - four["loss"]
    assert f"| loco-4bit | 4.06 | 32.00 | {1 - four['loss']:.4f} | {gap:+.4f} (1) |" in printed
    assert f"| before |  |  | {1 - dense['before']:.4f} |" in printed


@on_ranks(2, timeout=300)
def test_every_ranks_bodies_are_choices(rank: int, world_size: int) -> None:
    """Loss and gradients, averaged over ranks, are those of all pairs on one rank."""
    model = encoder(REHEARSAL)
    names, bodies = torch.randint(256, (2, 4, 8), generator=torch.Generator().manual_seed(1))
    both = model(names) @ model(bodies).T
    expected = F.cross_entropy(20 * both, torch.arange(4))
    weight = model.get_parameter("embeddings.word_embeddings.weight")
    (gradient,) = torch.autograd.grad(expected, weight)
    loss = model(names[rank::2], bodies[rank::2])
    (mine,) = torch.autograd.grad(loss, weight)
    for found, wanted in ((loss.detach(), expected), (mine, gradient)):
        dist.all_reduce(found)
        torch.testing.assert_close(found / 2, wanted.detach(), rtol=1e-4, atol=1e-6)


@on_ranks(4, timeout=300)
def test_retrieval_counts_the_better_bodies(rank: int, world_size: int) -> None:
    """Embeddings are on a circle, at the angle of a text's only token in hundredths."""
    names = torch.tensor([[1], [100], [200]])

    def found(*bodies: int) -> tuple[float, float]:
        held_out = names, torch.tensor(bodies)[:, None]
        return retrieval(_on_circle, Pairs(train=held_out, held_out=held_out))

    assert found(10, 120, 220) == pytest.approx((0, 1))
    # The first two names find each other's body first.
    assert found(120, 10, 220) == pytest.approx((1 - (1 / 2 + 1 / 2 + 1) / 3, 1 / 3))


def _on_circle(tokens: torch.Tensor) -> torch.Tensor:
    angles = tokens[:, 0] / 100
    return torch.stack([angles.cos(), angles.sin()], 1)


def _beside_gloo(rank: int, memory: Memory) -> None:
    for name in ("dense", "4 bits, changes in 4 bits", "1 bit"):
        half = replace(RUN.recipe, half=name != "dense", kept=name == "1 bit")
        run = replace(RUN, method=method_of(name), recipe=half)
        over_gloo = train(run)
        with through_memory(memory, rank, torch.device("cpu")):
            found = train(run)
        assert found | {"step_ms": 0} == over_gloo | {"step_ms": 0}, name


@pytest.mark.slow
def test_messages_through_memory_are_those_of_gloo(monkeypatch: Any) -> None:
    monkeypatch.setenv("TAGC_OPS", "reference")
    memory = Memory(2, 2**20, torch.device("cpu"))
    spawned(_beside_gloo, 2, memory)


@pytest.mark.slow
def test_lines_on_one_device(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TAGC_OPS", "reference")
    file = tmp_path / "gpu.jsonl"
    command = ["quality", "gpu", "--device", "cpu", "--json", str(file)]
    assert suites.main([*command, "--steps", "20"]) == 0
    assert "| step | dense | hybrid | one-bit | thrifty |" in capsys.readouterr().out
    records = [json.loads(line) for line in file.read_text().splitlines()]
    dense, *others = (r["losses"] for r in records)
    assert dense["20"] < dense["5"] - 0.1
    for losses in others:
        assert losses["20"] == pytest.approx(dense["20"], rel=5e-3)
    curves = file.with_suffix(".curves.jsonl").read_text().splitlines()
    assert len(curves) == sum(len(r["losses"]) for r in records)

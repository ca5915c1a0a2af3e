"""The simulation of many ranks: overlaps, and what every codec sends and recovers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import suites
from benchmarks.scaling import simulate
from benchmarks.scaling.codecs import CODECS, Setting
from benchmarks.scaling.gradients import times_selected
from benchmarks.scaling.overlap import LINKS, Overlap, union_densities
from tagc.ops import get_ops

OPS = get_ops("cpu", "cpu")


def setting(world_size: int, spread: float = 1.5, density: float = 0.05) -> Setting:
    overlap = {group: Overlap(density=density, spread=spread) for group in (1, 2, 4)}
    return Setting(numel=1 << 14, world_size=world_size, density=density, overlap=overlap)


def test_union_of_every_choice_of_ranks() -> None:
    supports = torch.rand(4, 50, generator=torch.Generator().manual_seed(0)) < 0.3
    found = union_densities(supports.sum(0), 4)
    for world, union in found.items():
        each = [
            supports[list(c)].any(0).float().mean() for c in itertools.combinations(range(4), world)
        ]
        assert union == pytest.approx(float(sum(each)) / len(each))
    assert [*found] == [1, 2, 4]


def test_selected_groups_are_the_largest_of_each_matrix() -> None:
    one = {"a": torch.tensor([[9.0, 0.0, -8.0, 1.0]]), "b": torch.tensor([[0.1, 0.4, 0.2, 0.3]])}
    two = {"a": torch.tensor([[9.0, 5.0, 0.0, 1.0]]), "b": torch.tensor([[0.0, 0.4, 0.0, 0.3]])}
    assert times_selected([one, two], 1, 0.5).tolist() == [2, 1, 1, 0, 0, 2, 0, 2]
    assert times_selected([one, two], 2, 0.5).tolist() == [2, 0, 2, 0]


@pytest.mark.parametrize("link", LINKS)
def test_the_density_is_one_ranks_union(link: str) -> None:
    for spread in (0.05, 0.5, 2.0):
        assert Overlap(density=0.05, spread=spread, link=link).union(1) == pytest.approx(0.05)


def test_without_spread_supports_are_independent() -> None:
    assert Overlap(density=0.05, spread=1e-6).union(8) == pytest.approx(1 - 0.95**8)
    assert Overlap(density=0.05, spread=100.0).union(8) == pytest.approx(0.05, rel=0.1)


@pytest.mark.some(1)
@pytest.mark.parametrize("link", LINKS)
def test_a_fit_finds_the_spread(link: str) -> None:
    true = Overlap(density=0.05, spread=1.3, link=link)
    measured = {w: true.union(w) for w in (1, 2, 4, 8)}
    assert Overlap.fit(measured, link).spread == pytest.approx(1.3, rel=1e-3)
    assert Overlap.fit(measured, link).misfit(measured) < 1e-3
    assert true.misfit({8: 2 * true.union(8)}) == pytest.approx(0.5)


def test_supports_have_the_union() -> None:
    overlap = Overlap(density=0.05, spread=1.5)
    drawn = torch.stack([*overlap.supports(1 << 16, 16, seed=3)])
    assert float(drawn.float().mean()) == pytest.approx(0.05, rel=0.05)
    assert float(drawn.any(0).float().mean()) == pytest.approx(overlap.union(16), rel=0.05)


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_recovers_what_was_sent(name: str) -> None:
    """It raises if not; the packed union is what was drawn."""
    chosen = setting(16)
    said = simulate(name, chosen, OPS)
    assert said["bytes_per_rank"] == pytest.approx(said["bytes_per_element"] * 16 * chosen.numel)
    normalised = said["bytes_per_element_normalised"]
    assert said["bytes_per_element"] == pytest.approx(normalised * 15 / 16)
    if name == "packed int4":
        expected = chosen.overlap[1].union(16)
        assert said["union_density"] == pytest.approx(expected, rel=0.1)
    if name.endswith("shared"):
        assert said["shared"]
        assert said["union_density"] == pytest.approx(0.05, rel=0.2)


def test_bytes_are_what_messages_hold() -> None:
    # 64 blocks of 256: 32 words of scales, 64 · 32 of codes.
    said = simulate("quantized int4", setting(4), OPS)
    assert said["bytes_per_element_normalised"] * (1 << 14) == 4 * (32 + 64 * 32)
    assert simulate("dense bf16", setting(4), OPS)["bytes_per_element"] == 2 * 3 / 4


def test_shared_supports_do_not_grow_and_sketches_do() -> None:
    def growth(name: str) -> float:
        few, many = (
            simulate(name, setting(w), OPS)["bytes_per_element_normalised"] for w in (2, 128)
        )
        return many / few - 1

    assert growth("sketch int16x2 shared") < 0.1
    # From 16 ranks on a symbol holds half as many elements; that, and no fill-in.
    assert 0.5 < growth("sketch shared") < 1
    assert growth("sketch sized to the union") > 1
    assert growth("sketch") > growth("sketch sized to the union")


def test_a_table_too_small_counts_what_it_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Overlap, "union", lambda self, ranks: 0.02)
    said = simulate("sketch sized to the union", setting(8), OPS)
    assert 0 < said["unresolved"] <= said["keys"]


@pytest.mark.parametrize("name", ["sketch", "packed int4", "quantized int4"])
def test_a_wrong_sum_is_no_result(name: str) -> None:
    def wrong(op: str, at: int) -> Any:
        def call(*tensors: Any, **sizes: Any) -> None:
            getattr(OPS, op)(*tensors, **sizes)
            tensors[at].view(-1)[7] += 1

        return call

    names = ("encode", "pack", "quantize")
    broken = SimpleNamespace(
        **{n: getattr(OPS, n) for n in names},
        decode=wrong("decode", 4),
        unpack=wrong("unpack", 1),
        dequantize=wrong("dequantize", 1),
    )
    with pytest.raises(AssertionError, match=r"wrong|not what was sent"):
        simulate(name, setting(2), broken)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_quick_run(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "scaling.jsonl"
    command = ["scaling", "--quick", "--densities", "0.05", "--json", str(file)]
    assert suites.main([*command, "--plots", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    records = [json.loads(line) for line in file.read_text().splitlines()]
    runs = [r for r in records if r["kind"] == "codec"]
    assert {(r["codec"], r["world_size"]) for r in runs} == {
        (name, world) for name in CODECS for world in (2, 4, 8, 16)
    }
    # Real gradients overlap, more than chance would have it, and less than fully.
    (union,) = (r for r in records if r["kind"] == "union" and r["group"] == 1)
    assert 0.05 < union["measured"]["4"] < 0.9 * (1 - 0.95**4)
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert suites.main(["report", str(file)]) == 0
    assert capsys.readouterr().out.strip() in said

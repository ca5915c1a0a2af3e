"""State: what is saved, and that training goes on from it as if it had never stopped."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import tagc
from support.distributed import on_ranks, run_ranks
from support.exact import EXACT, equal
from support.replicated_net import two_by_two
from support.small_net import local_weights, sharded
from support.states import (
    BFLOAT16,
    LEAD,
    MATRIX,
    PACKED,
    POLICIES,
    QUANTIZED,
    SKETCH,
    load,
    residual_sums,
    rules,
    run,
    save,
    set_weights,
    shared_folder,
    snapshot,
    wrapped,
)
from tagc.places import Elements, Place
from tagc.plan import UnitParam
from tagc.resharding import merged, plan_merge
from tagc.state_files import MARKER
from tagc.state_format import About

SAVERS = ("dcp", "safetensors")
by_saver = pytest.mark.parametrize("saver", SAVERS)


# The same ranks


@on_ranks(2)
@by_saver
@pytest.mark.parametrize("policy", POLICIES)
def test_a_resumed_run_is_the_run_that_never_stopped(
    rank: int, world_size: int, saver: str, policy: str
) -> None:
    resumes(rank, saver, policy)


@on_ranks(3)
@by_saver
@pytest.mark.parametrize("policy", ["sketch shared", "packed bfloat16"])
def test_three_ranks_resume(rank: int, world_size: int, saver: str, policy: str) -> None:
    resumes(rank, saver, policy)


def resumes(rank: int, saver: str, policy: str) -> None:
    """Train, save, go on; and the same with another model that loads what was saved."""
    model = wrapped(POLICIES[policy])
    run(model, rank, range(5))
    with shared_folder() as folder:
        save(model, folder, saver)
        weights = local_weights(model)
        run(model, rank, range(5, 9))

        resumed, forgetful = wrapped(POLICIES[policy]), wrapped(POLICIES[policy])
        for other in (resumed, forgetful):
            set_weights(other, weights)
        load(resumed, folder, saver)
        run(resumed, rank, range(5, 9))
        run(forgetful, rank, range(5, 9))
    equal(snapshot(resumed), snapshot(model))
    if policy not in ("quantized none", "parameters"):
        # There is something to remember.
        mine, theirs = local_weights(forgetful), local_weights(model)
        assert any(not torch.equal(mine[name], theirs[name]) for name in mine)


@on_ranks(2)
@by_saver
def test_a_running_model_can_go_back(rank: int, world_size: int, saver: str) -> None:
    """Loading replaces all that happened since, a count in flight too."""
    for policy in ("sketch shared", "packed shared", "quantized average"):
        model = wrapped(POLICIES[policy])
        with shared_folder() as folder:
            save(model, folder, saver)  # before the first step
            run(model, rank, range(3))
            expected = snapshot(model)
            set_weights(model, local_weights(sharded()))
            load(model, folder, saver)
        run(model, rank, range(3))
        equal(snapshot(model), expected)


def kind_of(chosen: dict) -> str:
    return chosen["gradients"][0]["codec"]["kind"]


@on_ranks(4)
@by_saver
@pytest.mark.parametrize(
    "chosen", [rules(QUANTIZED), rules(PACKED), rules(SKETCH), rules(MATRIX, LEAD)], ids=kind_of
)
def test_replicas_resume(rank: int, world_size: int, saver: str, chosen: dict) -> None:
    policy = chosen | {"replicas": chosen["gradients"]}
    with shared_folder() as folder:
        models = []
        for _ in range(2):
            model, replicas = two_by_two()
            models.append(wrapped(policy, model, replicas=replicas))
        model, resumed = models
        run(model, rank, range(3))
        save(model, folder, saver)
        set_weights(resumed, local_weights(model))
        run(model, rank, range(3, 6))
        load(resumed, folder, saver)
        run(resumed, rank, range(3, 6))
        equal(snapshot(resumed), snapshot(model))
        shards = {n for n in tagc.compressor(model).state_dict() if n.endswith(f"{rank % 2}_of_2")}
        owed = {n for n in shards if ".residual.replicas." in n}
        kept = {n for n in shards if ".sent.replicas." in n or ".sent.gradients." in n}
        assert owed | kept == shards
        assert owed
        assert bool(kept) == (kind_of(chosen) == "matrix")


@on_ranks(2)
def test_a_residual_lies_where_the_gradient_does(rank: int, world_size: int) -> None:
    """What is not sent in the first step is the gradient itself, by rows and by columns sharded."""

    def layers() -> Any:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 7))

    alone, model = layers(), layers()
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.shape[-1:] == (6,) else None)
    wrapped(POLICIES["packed"], model)
    x = torch.linspace(-1, 1, 12).view(2, 6) + rank
    for one in (alone, model):
        one(x).square().sum().backward()
    residuals = residual_sums(model)
    assert set(residuals) == {"0.weight", "1.weight"}
    for name, residual in residuals.items():
        grad = alone.get_parameter(name).grad
        assert grad is not None
        assert 0.5 < (residual == grad.double()).float().mean() < 1
    compressor = tagc.compressor(model)
    state = compressor.state_dict()
    compressor.load_state_dict(state)
    equal(compressor.state_dict(), state)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_places(dim: int, shards: int) -> None:
    """Rows are what `chunk` gives, padded at their end."""
    shape = [4, 3, 2]
    # FSDP pads the first dimension only.
    shape[dim] = 7 if dim == 0 else 2 * shards
    whole = torch.randn(shape)
    chunk = -(-shape[dim] // shards)
    columns = whole.numel() // shape[dim] * chunk
    residual = torch.full((shards, columns + 5), torch.nan)
    for row, piece in zip(residual, whole.chunk(shards, dim), strict=False):
        row[2 : 2 + piece.numel()] = piece.flatten()
    param = UnitParam(name="p", shape=tuple(shape), columns=columns, dim=dim)
    place = Place(param=param, start=2, shards=shards)
    torch.testing.assert_close(place.take(residual), whole, **EXACT)
    written = torch.full_like(residual, torch.nan)
    place.put(written, whole)
    assert torch.equal(written[:, 2:-3].nan_to_num(), residual[:, 2:-3].nan_to_num())
    assert not written[:, 2:-3].isnan().any()
    assert written[:, :2].isnan().all()
    assert written[:, -3:].isnan().all()
    for shard in range(shards):
        place = Place(param=param, start=2, shards=shards, shard=shard)
        if place.numel:
            piece = whole.chunk(shards, dim)[shard]
            torch.testing.assert_close(place.take(residual[shard : shard + 1]), piece, **EXACT)
            written = torch.full((1, columns + 5), torch.nan)
            place.put(written, piece)
            assert torch.equal(place.take(written), piece)


def test_pieces_of_a_place() -> None:
    """A parameter of 7 elements that straddles rows, in other columns of each."""
    pieces: Any = (
        SimpleNamespace(row=0, column=3, offset=0, length=1),
        SimpleNamespace(row=1, column=0, offset=1, length=4),
        SimpleNamespace(row=2, column=1, offset=5, length=2),
    )
    param = UnitParam(name="p", shape=(7, 1), columns=4)
    place = Place(param=param, start=0, shards=3, pieces=pieces)
    residual = torch.full((3, 4), torch.nan)
    value = torch.arange(1.0, 8.0)[:, None]
    place.put(residual, value)
    assert torch.equal(place.take(residual), value)
    rows = [[0, 0, 0, 1], [2, 3, 4, 5], [0, 6, 7, 0]]
    assert residual.nan_to_num().tolist() == rows


# Other ranks


def train_and_save(rank: int, saver: str, policy: dict, folder: Path) -> dict[str, Tensor]:
    model = wrapped(policy)
    run(model, rank, range(3))
    save(model, folder, saver)
    return residual_sums(model)


def load_and_train(
    rank: int, policy: dict, folder: Path, force: bool
) -> tuple[dict[str, Tensor], str]:
    model = wrapped(policy)
    compressor = tagc.compressor(model)
    message = ""
    if force:
        with pytest.warns(UserWarning, match="dropped") as caught:
            compressor.load(folder, force=True)
        message = str(caught[0].message)
        assert len(caught) == 1
    else:
        compressor.load(folder)
    sums = residual_sums(model)
    run(model, rank, range(3, 5))
    metrics = compressor.metrics()
    assert metrics.steps == 2
    assert metrics.unresolved == 0
    return sums, message


def totals(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """By name; not every rank has something of every small parameter's average."""
    names = dict.fromkeys(name for of in ranks for name in of)
    return {name: everyones(ranks, name).sum(0) for name in names}


def everyones(ranks: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([of[name] for of in ranks if name in of])


@by_saver
@pytest.mark.parametrize(
    "policy",
    ["quantized average", "packed bfloat16", "sketch shared", "quantized momentum", "matrix lead"],
)
@pytest.mark.parametrize(("old", "new"), [(2, 3), (4, 2), (3, 4)])
def test_the_sum_over_ranks_is_conserved(
    tmp_path: Path, saver: str, policy: str, old: int, new: int
) -> None:
    chosen = POLICIES[policy]
    before = totals(run_ranks(train_and_save, old, saver, chosen, tmp_path))
    loaded = run_ranks(load_and_train, new, chosen, tmp_path, False)
    ranks = [sums for sums, _ in loaded]
    after = totals(ranks)
    assert set(before) == set(after)
    for name, total in before.items():
        assert total.any()
        # Each new rank rounds its own sum once, by half a unit in the last place at most.
        eps = 2.0**-8 if policy.endswith("bfloat16") else 2.0**-24
        bound = eps * everyones(ranks, name).abs().sum(0) + 1e-37
        assert ((after[name] - total).abs() <= bound).all()
    if new > old:
        owed = {n: s for n, s in ranks[-1].items() if " of " not in n}
        assert not any(sums.any() for sums in owed.values())


def goes_on_warming_up(rank: int, folder: Path) -> None:
    model = wrapped(POLICIES["warming up"])
    compressor = tagc.compressor(model)
    compressor.load(folder)
    run(model, rank, range(3, 6))
    assert math.isnan(compressor.metrics().density)
    run(model, rank, range(6, 7))
    assert compressor.metrics().density > 0


def test_a_warm_up_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """Of 6 steps; 3 were made before."""
    run_ranks(train_and_save, 2, "safetensors", POLICIES["warming up"], tmp_path)
    run_ranks(goes_on_warming_up, 3, tmp_path)


def loads_badly(rank: int, saver: str, policy: dict, folder: Path) -> tuple[str, str]:
    """What loading as the same number of ranks says, and that it changed nothing."""
    model = wrapped(policy)
    run(model, rank, range(1))
    before = snapshot(model)
    try:
        load(model, folder, saver)
    except (Exception, CheckpointException) as error:
        equal(snapshot(model), before)
        return type(error).__name__, str(error)
    raise AssertionError("loaded")


@by_saver
def test_another_policy_is_refused_unless_forced(tmp_path: Path, saver: str) -> None:
    before = totals(run_ranks(train_and_save, 2, saver, POLICIES["packed"], tmp_path))
    other = rules({"kind": "quantized", "bits": 8}, BFLOAT16)
    other["gradients"][0]["when"] = {"name": "second.*"}
    said = run_ranks(loads_badly, 2, "safetensors", other, tmp_path)
    for kind, message in said:
        assert kind == "StateError"
        for policy in (POLICIES["packed"], other):
            assert tagc.Policy.load(policy).hash[:12] in message
        assert "force=True" in message
    if saver == "dcp":
        # torch looks for the names first; they are of the other policy, and the remedy.
        for kind, message in run_ranks(loads_badly, 2, "dcp", other, tmp_path):
            assert kind == "CheckpointException"
            assert f"policy_{tagc.Policy.load(other).hash[:12]}" in message
            assert "tagc_Compressor_load" in message
    loaded = run_ranks(load_and_train, 2, other, tmp_path, True)
    after = totals([sums for sums, _ in loaded])
    for name in ("second.0.weight", "second.2.weight"):
        ranks = torch.stack([sums[name] for sums, _ in loaded])
        assert ((after[name] - before[name]).abs() <= 2.0**-8 * ranks.abs().sum(0) + 1e-37).all()
        assert before[name].any()
    for _, message in loaded:
        for name in ("first.0.weight", "first.2.weight", "head.weight", "norm.weight"):
            assert f"residual of gradients of {name}" in message
        assert "second" not in message


@by_saver
def test_one_rank_has_no_use_for_residuals(tmp_path: Path, saver: str) -> None:
    run_ranks(train_and_save, 2, saver, POLICIES["packed"], tmp_path)
    ((kind, message),) = run_ranks(loads_alone, 1, tmp_path)
    assert kind == "StateError"
    assert "would be dropped" in message
    assert "force=True" in message


def loads_alone(rank: int, folder: Path) -> tuple[str, str]:
    with pytest.warns(UserWarning, match="world size 1"):
        model = wrapped(POLICIES["packed"])
    compressor = tagc.compressor(model)
    with pytest.raises(tagc.StateError) as caught:
        compressor.load(folder)
    with pytest.warns(UserWarning, match="dropped the saved residual"):
        compressor.load(folder, force=True)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("ranks", [2, 3])
def test_other_ranks_are_told_to_load_the_folder(tmp_path: Path, ranks: int) -> None:
    """torch asks for a part by name; a part of the ranks' residuals must not do."""
    old = 5 - ranks
    run_ranks(train_and_save, old, "dcp", POLICIES["packed"], tmp_path)
    for kind, message in run_ranks(loads_badly, ranks, "dcp", POLICIES["packed"], tmp_path):
        assert kind == "CheckpointException"
        assert f"of_{ranks}_ranks" in message
        assert "tagc_Compressor_load" in message


def own_files(rank: int, folder: Path, write: bool) -> tuple[str, str]:
    """Every rank keeps its own state dict, by torch.save."""
    file = folder / f"{min(rank, 1)}.pt"
    model = wrapped(POLICIES["packed"])
    if write:
        run(model, rank, range(2))
        torch.save(tagc.compressor(model).state_dict(), file)
        return "", ""
    try:
        tagc.compressor(model).load_state_dict(torch.load(file, weights_only=True))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_state_dicts_are_of_one_rank(tmp_path: Path) -> None:
    run_ranks(own_files, 2, tmp_path, True)
    assert run_ranks(own_files, 2, tmp_path, False) == [("", "")] * 2
    for kind, message in run_ranks(own_files, 3, tmp_path, False):
        assert kind == "StateError"
        assert re.search(r"saved by rank [01] of 2, but this is rank [012] of 3", message)
        assert "load(folder)" in message


def place_of(param: UnitParam, shard: int, shards: int, flat: bool = False) -> Place:
    """Of one shard; flat ones cut a parameter anywhere."""
    if not flat:
        return Place(param=param, start=0, shards=shards, shard=shard)
    numel = math.prod(param.shape)
    size = -(-numel // shards)
    elements = Elements(min(numel, shard * size), min(numel, (shard + 1) * size))
    return Place(param=param, start=0, shards=shards, elements=elements)


def part_of_place(whole: Tensor, place: Place) -> Tensor:
    if place.elements is not None:
        return whole.flatten()[slice(*place.elements)]
    first, length = place.span
    return whole[first : first + length]


class Copies:
    """A source of what replicas have: `copies` of a parameter, each in `shards`."""

    alone = False
    where, identity = "here", ""

    def __init__(
        self,
        param: UnitParam,
        copies: int,
        shards: int,
        kind: str = "residual.replicas",
        flat: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(copies * 10 + shards)
        self.whole = torch.randn(copies, *param.shape, generator=generator)
        self._pieces: dict[int, dict[str, Tensor]] = {}
        for i in range(copies * shards):
            place = place_of(param, i % shards, shards, flat)
            if place.numel:
                piece = part_of_place(self.whole[i // shards], place)
                self._pieces[i] = {f"{kind}.p{place.suffix}": piece}

    def abouts(self) -> Mapping[int, About]:
        one = About(policy="", policy_hash="", layout="", world_size=9, rank=0, step=0)
        return dict.fromkeys(self._pieces, one)

    def shapes(self, rank: int) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {n: (t.dtype, tuple(t.shape)) for n, t in self._pieces[rank].items()}

    def read(self, rank: int, name: str) -> Tensor:
        return self._pieces[rank][name]


@pytest.mark.parametrize("old", [(2, 2), (3, 1), (1, 4), (4, 3)])
@pytest.mark.parametrize("new", [(2, 2), (2, 3), (1, 2), (3, 5)])
def test_replicas_of_other_shapes(old: tuple[int, int], new: tuple[int, int]) -> None:
    param = UnitParam(name="p", shape=(7, 3), columns=0)
    source = Copies(param, *old)
    copies, shards = new
    holdings: dict[int, dict[str, Place]] = {}
    for i in range(copies * shards):
        place = Place(param=param, start=0, shards=shards, shard=i % shards)
        holdings[i] = {f"residual.replicas.p{place.suffix}": place} if place.numel else {}
    total = torch.zeros(param.shape, dtype=torch.float64)
    taken = {}
    for rank, held in holdings.items():
        merge = plan_merge(source, holdings, rank)
        taken[rank] = merge.taken
        assert not merge.dropped
        for name, place in held.items():
            first, length = place.span
            part = merged(source, merge.parts[name], place, torch.float32)
            total[first : first + length] += part
    merge.check("here", taken)
    exact = source.whole.double().sum(0)
    bound = 2.0**-24 * source.whole.double().abs().sum(0) * copies
    assert ((total - exact).abs() <= bound).all()
    taken[0] = {}
    with pytest.raises(tagc.StateError, match=r"of the \d+ elements"):
        merge.check("here", taken)


@pytest.mark.parametrize("kind", ["average.replicas", "average.gradients", "sent.replicas"])
@pytest.mark.parametrize("old", [(1, 2), (2, 2), (3, 1), (4, 3)])
@pytest.mark.parametrize("new", [(1, 2), (2, 3), (3, 5)])
@pytest.mark.parametrize("flat", [(False, False), (False, True), (True, False), (True, True)])
def test_every_copy_keeps_the_mean_of_the_copies(
    kind: str, old: tuple[int, int], new: tuple[int, int], flat: tuple[bool, bool]
) -> None:
    """What an owner hands out is no debt: with as much as before in every copy, their average is
    what it was. Across replicas all copies are equal, and so is the mean, to the bit."""
    param = UnitParam(name="p", shape=(7, 3), columns=0)
    source = Copies(param, *old, kind, flat[0])
    if kind.endswith("replicas"):
        source.whole[:] = source.whole[0]
    exact = source.whole.double().mean(0)
    copies, shards = new
    holdings: dict[int, dict[str, Place]] = {}
    for i in range(copies * shards):
        place = place_of(param, i % shards, shards, flat[1])
        holdings[i] = {f"{kind}.p{place.suffix}": place} if place.numel else {}
    taken = {}
    for rank, held in holdings.items():
        merge = plan_merge(source, holdings, rank)
        taken[rank] = merge.taken
        assert not merge.dropped
        for name, place in held.items():
            part = merged(source, merge.parts[name], place, torch.float32)
            assert torch.equal(part, part_of_place(exact, place).float())
    merge.check("here", taken)
    taken[0] = {}
    with pytest.raises(tagc.StateError, match=r"of the \d+ elements"):
        merge.check("here", taken)


@on_ranks(2)
def test_an_average_does_not_do_for_what_was_sent(rank: int, world_size: int) -> None:
    """Forced from feedback `momentum` to a lead, which starts without a last sum."""
    model = wrapped(POLICIES["quantized momentum"])
    run(model, rank, range(2))
    other = wrapped(rules(QUANTIZED, LEAD))
    with shared_folder() as folder:
        tagc.compressor(model).save(folder)
        with pytest.warns(UserWarning, match="average of gradients of first.0.weight"):
            tagc.compressor(other).load(folder, force=True)
    state = residual_sums(other)
    assert state["first.0.weight"].any()
    assert not state["sent of first.0.weight"].any()


# What is in a state


@on_ranks(2)
def test_names_shapes_and_metadata(rank: int, world_size: int) -> None:
    model = wrapped(POLICIES["sketch"])
    run(model, rank, range(2))
    compressor = tagc.compressor(model)
    assert isinstance(compressor, Stateful)
    state = compressor.state_dict()
    assert all(isinstance(tensor, Tensor) for tensor in state.values())
    policy = compressor.plan().policy
    starts = {re.split(r"(?<=rank_\d)\.", name)[0] for name in state}
    layout = compressor.plan().fingerprint
    assert starts == {f"of_2_ranks.policy_{policy.hash[:12]}.layout_{layout[:12]}.rank_{rank}"}
    shapes = {n: p.shape for n, p in model.named_parameters() if n.endswith("weight")}
    assert {n: t.shape for n, t in residual_sums(model).items()} == shapes
    with shared_folder() as folder:
        compressor.save(folder)
        (file,) = folder.glob(f"rank-0000{rank}-of-00002-*.safetensors")
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
            assert set(opened.keys()) == {re.split(r"rank_\d\.", n)[1] for n in list(state)[1:]}
        assert metadata["policy"] == "<dict>"
        assert metadata["policy_hash"] == policy.hash
        assert metadata["layout"] == layout
        assert (metadata["step"], metadata["rank"], metadata["world_size"]) == ("2", str(rank), "2")
        assert metadata["version"] == tagc.__version__
        dist.barrier()
        # A second save takes the place of the first, files and all.
        run(model, rank, range(1))
        compressor.save(folder)
        dist.barrier()
        assert len(list(folder.iterdir())) == 3
        assert not file.exists()


@on_ranks(2)
def test_what_is_saved_is_a_copy(rank: int, world_size: int) -> None:
    model = wrapped(POLICIES["sketch shared"])
    run(model, rank, range(2))
    state = tagc.compressor(model).state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    run(model, rank, range(2, 4))
    equal(state, before)


# Files that are not what they should be


def damaged(rank: int, folder: Path, policy: dict) -> tuple[str, str]:
    return loads_badly(rank, "safetensors", policy, folder)


def of_rank(folder: Path, rank: int) -> Path:
    (file,) = folder.glob(f"rank-{rank:05d}-*.safetensors")
    return file


def drop(folder: Path) -> None:
    of_rank(folder, 1).unlink()


def cut(folder: Path) -> None:
    file = of_rank(folder, 1)
    file.write_bytes(file.read_bytes()[:-10])


def flip(folder: Path) -> None:
    file = of_rank(folder, 1)
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def older(folder: Path) -> None:
    """The file of another save under this one's name."""
    file = of_rank(folder, 1)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file), file, metadata | {"save": "0" * 16})


def newer(folder: Path) -> None:
    file = of_rank(folder, 1)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file), file, metadata | {"format": "2"})


def uncommitted(folder: Path) -> None:
    (folder / MARKER).unlink()


def elsewhere(folder: Path) -> None:
    said = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps(said | {"save": "../../etc"}))


DAMAGES: dict[Callable[[Path], None], str] = {
    drop: r"rank-00001-of-00002-\w+\.safetensors: there is no such file",
    cut: r"rank-00001-of-00002-\w+\.safetensors: not a safetensors file",
    flip: r"rank-00001-of-00002-\w+\.safetensors: damaged",
    older: r"rank-00001-of-00002-\w+\.safetensors: not a file of save",
    newer: r"rank-00001-of-00002-\w+\.safetensors: not a state of tagc .* format is '2'",
    uncommitted: r"holds no complete save",
    elsewhere: r"tagc.json: save is '../../etc'",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_files_are_refused_on_all_ranks(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run_ranks(train_and_save, 2, "safetensors", POLICIES["packed"], tmp_path)
    damage(tmp_path)
    said = run_ranks(damaged, 2, tmp_path, POLICIES["packed"])
    assert re.search(DAMAGES[damage], said[1][1], re.DOTALL), said
    assert said[1][0] == "StateError"
    # Rank 0 fails too: by what it sees itself, or by what it hears of rank 1.
    assert said[0][0] in ("StateError", "RuntimeError")
    assert re.search(DAMAGES[damage], said[0][1], re.DOTALL), said


class Evil:
    def __reduce__(self) -> tuple:
        return (print, ("code from a checkpoint",))


def test_an_index_runs_no_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(train_and_save, 2, "dcp", POLICIES["packed"], tmp_path)
    index = tmp_path / ".metadata"
    content = pickle.loads(index.read_bytes())
    content.planner_data = Evil()
    index.write_bytes(pickle.dumps(content))
    for kind, message in run_ranks(damaged, 2, tmp_path, POLICIES["packed"]):
        assert kind == "StateError"
        assert "builtins.print" in message
    assert "code from a checkpoint" not in capfd.readouterr().out


# Saving


@on_ranks(2)
def test_a_failed_save_leaves_the_one_before(rank: int, world_size: int) -> None:
    model = wrapped(POLICIES["packed"])
    run(model, rank, range(2))
    compressor = tagc.compressor(model)
    with shared_folder() as folder, pytest.MonkeyPatch.context() as patch:
        compressor.save(folder)
        before = compressor.state_dict()
        run(model, rank, range(2, 4))
        if rank == 1:

            def fail(*_: Any) -> None:
                raise OSError("no space left on device")

            patch.setattr("tagc.state_folders.write_rank", fail)
        with pytest.raises((OSError, RuntimeError), match="no space left on device"):
            compressor.save(folder)
        dist.barrier()
        compressor.load(folder)
        equal(compressor.state_dict(), before)


@on_ranks(2)
def test_ranks_must_load_the_same_save(rank: int, world_size: int) -> None:
    model = wrapped(POLICIES["packed"])
    compressor = tagc.compressor(model)
    states = []
    for step in range(2):
        run(model, rank, range(step, step + 1))
        states.append(compressor.state_dict())
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="All ranks must load what was saved together"):
        compressor.load_state_dict(states[rank])
    equal(snapshot(model), before)


@on_ranks(2)
def test_key_of_a_checkpoint(rank: int, world_size: int) -> None:
    model = wrapped(POLICIES["packed"])
    run(model, rank, range(2))
    compressor = tagc.compressor(model)
    with shared_folder() as folder:
        dcp.save({"app": {"comm": compressor.state_dict()}}, checkpoint_id=folder)
        with pytest.raises(tagc.StateError, match=r"nothing in this checkpoint is called 'tagc'"):
            compressor.load(folder)
        before = compressor.state_dict()
        run(model, rank, range(2))
        compressor.load(folder, key="app.comm")
        equal(compressor.state_dict(), before)


# Switched off


@on_ranks(2)
def test_disabled_is_native_and_keeps_state(rank: int, world_size: int) -> None:
    policy = POLICIES["sketch"]
    model = wrapped(policy)
    run(model, rank, range(2))
    state = tagc.compressor(model).state_dict()
    native = sharded()
    run(native, rank, range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAGC_DISABLE", "1")
        with pytest.warns(UserWarning, match="TAGC_DISABLE=1: tagc compresses nothing; unset it"):
            disabled = wrapped(policy)
        with pytest.raises(tagc.PolicyError):
            wrapped(rules({"kind": "nonsense"}))
    compressor = tagc.compressor(disabled)
    compressor.load_state_dict(state)
    run(disabled, rank, range(3))
    equal(local_weights(disabled), local_weights(native))
    equal(compressor.state_dict(), state)
    assert compressor.plan().rows == tagc.compressor(model).plan().rows
    compressor.remove()

    fresh = sharded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAGC_DISABLE", "1")
        with pytest.warns(UserWarning, match="TAGC_DISABLE"):
            wrapped(POLICIES["parameters"], fresh)
    run(fresh, rank, range(2))
    metrics = tagc.compressor(fresh).metrics()
    assert metrics.steps == metrics.wire_bytes == metrics.parameter_wire_bytes == 0
    assert metrics.parameter_error == metrics.residual_norm == 0


@on_ranks(4)
def test_disabled_still_averages_over_replicas(rank: int, world_size: int) -> None:
    rule = {"when": {"name": "*.weight"}, "codec": PACKED}
    model, replicas = two_by_two()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAGC_DISABLE", "1")
        with pytest.warns(UserWarning, match="TAGC_DISABLE"):
            wrapped({"schema": 1, "gradients": [rule]}, model, replicas=replicas)
    dense, replicas = two_by_two()
    tagc.wrap(dense, "dense", replicas=replicas)
    run(model, rank, range(3))
    run(dense, rank, range(3))
    equal(local_weights(model), local_weights(dense))


@on_ranks(2)
def test_ranks_must_agree_on_the_switch(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAGC_DISABLE", str(rank))
        with pytest.raises(RuntimeError, match=r"TAGC_DISABLE=0, rank 1 has TAGC_DISABLE=1"):
            wrapped(POLICIES["packed"])
        patch.setenv("TAGC_DISABLE", "yes")
        with pytest.raises(ValueError, match="TAGC_DISABLE is 'yes'"):
            wrapped(POLICIES["packed"])


@on_ranks(2)
@pytest.mark.parametrize("policy", ["sketch shared", "packed shared", "parameters"])
def test_removed_is_native(rank: int, world_size: int, policy: str) -> None:
    """After steps of every kind of traffic, `remove` leaves nothing behind."""
    model, native = wrapped(POLICIES[policy]), sharded()
    run(model, rank, range(2))
    tagc.compressor(model).remove()
    set_weights(model, local_weights(native))
    run(model, rank, range(3))
    run(native, rank, range(3))
    equal(local_weights(model), local_weights(native))

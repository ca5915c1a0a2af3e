"""A changed bit in what was saved is refused, in checkpoints of torch and in state dicts, too."""

from __future__ import annotations

import hashlib
import io
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.marks import slow
from support.states import POLICIES, load, rules, run, save, shared_folder, wrapped
from tagc.checkpoint import OneRank, StateError, digest, to_state_dict
from tagc.checkpoint.dcp import CheckpointFolder
from tagc.checkpoint.digest import matches_digest, with_digest
from tagc.checkpoint.format import StateHeader, metadata_from_tensor, metadata_to_tensor

HEADER = StateHeader(
    policy="p", policy_hash="a" * 64, layout="b" * 64, world_size=1, rank=0, step=3
)
NAME, COUNTERS = "residual.gradients.p", "unit.gradients.u.counters"
TENSORS = {NAME: torch.arange(6.0).view(2, 3), COUNTERS: torch.tensor([3, 2])}

# Kinds of tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_any_tensor_has_a_digest(dtype: torch.dtype) -> None:
    """That of its elements in order, whatever their strides and number."""
    base = torch.arange(24).view(4, 6).to(dtype)
    strided = {
        "one element": base[:1, ::6],
        "one of a column": base[::4, :1].t(),
        "no dimensions": base[2, 3],
        "no elements": base[:0].t(),
        "every other": base[::2, ::3],
        "columns": base.t(),
        "expanded": base[0, :1].expand(5),
    }
    assert strided["one element"].stride(-1) > 1
    for name, tensor in strided.items():
        plain = torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
        assert matches_digest(with_digest({}, {name: tensor}), {name: plain})
        if tensor.numel():
            plain.view(-1).view(torch.uint8)[-1] ^= 1
            assert not matches_digest(with_digest({}, {name: tensor}), {name: plain})


def with_one_element() -> Any:
    torch.manual_seed(1)
    model: Any = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 2))
    return wrapped(rules({"kind": "sketch", "density": 0.5}), fully_shard(model))


@on_ranks(2)
@pytest.mark.parametrize("saver", ["dcp", "safetensors"])
def test_a_parameter_of_one_element_is_saved(rank: int, world_size: int, saver: str) -> None:
    model, resumed = with_one_element(), with_one_element()
    for _ in range(2):
        model(torch.tensor([[0.25 + rank]])).square().sum().backward()
    with shared_folder() as folder:
        save(model, folder, saver)
        load(resumed, folder, saver)
    state = tagc.compressor(model).state_dict()
    (owed,) = (t for name, t in state.items() if name.endswith("residual.gradients.0.weight"))
    assert owed.shape == (1, 1)
    equal(tagc.compressor(resumed).state_dict(), state)


# Bits


def bits(folder: Path) -> Iterator[tuple[Path, int, bool]]:
    """Places in a checkpoint's files, and whether they are in a tensor's own bytes."""
    draw = random.Random(9)
    index = pickle.loads((folder / ".metadata").read_bytes())
    files = sorted(folder.glob("*.distcp"))
    assert len(files) == 2
    for file in files:
        content = file.read_bytes()
        stored = [s for s in index.storage_data.values() if s.relative_path == file.name]
        for i in range(16):
            entry = draw.choice(stored)
            start, length = entry.offset, entry.length
            if i % 2:
                whole = content[start : start + length]
                tensor = torch.load(io.BytesIO(whole), weights_only=True)
                values = tensor.view(-1).view(torch.uint8).numpy().tobytes()
                if not values or whole.count(values) != 1:
                    continue
                start, length = start + whole.find(values), len(values)
            yield file, 8 * start + draw.randrange(8 * length), bool(i % 2)


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@on_ranks(2)
@pytest.mark.parametrize("loader", [slow("dcp"), "folder"])
def test_a_flipped_bit_is_refused_or_means_nothing(rank: int, world_size: int, loader: str) -> None:
    model = wrapped(POLICIES["sketch"])
    compressor = tagc.compressor(model)
    run(model, rank, range(3))
    refused = unchanged = in_values = flips = 0
    with shared_folder() as folder:
        save(model, folder, "dcp")
        saved = compressor.state_dict()
        run(model, rank, range(3, 5))
        now = compressor.state_dict()
        dist.barrier()
        for file, bit, inside in list(bits(folder)):
            dist.barrier()
            if rank == 0:
                flip(file, bit)
            dist.barrier()
            flips += 1
            in_values += inside
            try:
                load(model, folder, loader)
            except (Exception, CheckpointException) as error:
                equal(compressor.state_dict(), now)
                clear = isinstance(error, StateError) or ": StateError: " in str(error)
                refused += clear or loader == "dcp"  # torch's own reader may fail first
            else:
                equal(compressor.state_dict(), saved)
                unchanged += 1
                compressor.load_state_dict(now)
            dist.barrier()
            if rank == 0:
                flip(file, bit)
            dist.barrier()
        load(model, folder, loader)
        equal(compressor.state_dict(), saved)
    assert refused + unchanged == flips
    assert 12 <= in_values <= refused


# What the digest is of


def renamed(tensors: dict[str, Tensor]) -> None:
    tensors[NAME + "q"] = tensors.pop(NAME)


def reshaped(tensors: dict[str, Tensor]) -> None:
    tensors[NAME] = tensors[NAME].view(3, 2)


def retyped(tensors: dict[str, Tensor]) -> None:
    tensors[NAME] = tensors[NAME].view(torch.int32)


def changed(tensors: dict[str, Tensor]) -> None:
    tensors[NAME].view(torch.uint8)[0, 0] ^= 1


def dropped(tensors: dict[str, Tensor]) -> None:
    del tensors[COUNTERS]


@pytest.mark.parametrize("change", [renamed, reshaped, retyped, changed, dropped])
def test_every_change_is_found(change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    metadata = with_digest(HEADER.to_strings(), tensors)
    assert matches_digest(metadata, dict(reversed(tensors.items())))
    assert not matches_digest(metadata | {"step": "4"}, tensors)
    assert not matches_digest(HEADER.to_strings(), tensors)
    change(tensors)
    assert not matches_digest(metadata, tensors)


def test_they_stay_what_they_are() -> None:
    """Those of this format, and of earlier versions, which hashed the elements themselves."""
    metadata = replace(HEADER, version="1").to_strings()
    now = "5579be9aaaf3efebc052c9057d9b75b12456d7aa7811554f01a4cb3814b9a444"
    former = "661f52878d3a1dc4495904af6ac720f2ee2b555c074cb59835da165e93636624"
    assert with_digest(metadata, TENSORS) == metadata | {"digest": now}
    damaged = TENSORS | {NAME: TENSORS[NAME] + 1}
    for said in ({"digest": now}, {"sha256": former}):
        assert matches_digest(metadata | said, TENSORS)
        assert not matches_digest(metadata | said, damaged)


@on_ranks(2)
def test_a_state_is_not_read_again(rank: int, world_size: int) -> None:
    """Its digest is of the sums that the device took: `dcp.async_save` waits for that alone."""
    model = wrapped(POLICIES["sketch"])
    run(model, rank, range(2))
    with patch.object(digest, "sums_of", side_effect=AssertionError("read again")):
        state = tagc.compressor(model).state_dict()
    tagc.compressor(model).load_state_dict(state)


def test_only_sums_are_hashed() -> None:
    hashed = 0

    class Counting:
        def __init__(self, content: bytes) -> None:
            self._digest = hashlib.sha256()
            self.update(content)

        def update(self, content: Any) -> None:
            nonlocal hashed
            hashed += memoryview(content).nbytes
            self._digest.update(content)

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    tensors = {"p": torch.randn(1 << 20)}
    expected = with_digest(HEADER.to_strings(), tensors)
    with patch.object(digest, "hashlib", SimpleNamespace(sha256=Counting)):
        assert with_digest(HEADER.to_strings(), tensors) == expected
    assert 0 < hashed < 2048


def sources(folder: Path, state: dict[str, Tensor]) -> Iterator[OneRank | CheckpointFolder]:
    """A state dict, and the checkpoint that it makes."""
    yield OneRank(state)
    with pytest.warns(UserWarning, match="save in a single process"):
        dcp.save({"tagc": state}, checkpoint_id=folder, no_dist=True)
    yield CheckpointFolder(folder, "tagc")


def test_a_changed_state_is_refused(tmp_path: Path) -> None:
    state = to_state_dict(HEADER, {name: tensor.clone() for name, tensor in TENSORS.items()})
    (name,) = (name for name in state if name.endswith(NAME))
    state[name][0, 0] += 1
    for source in sources(tmp_path, state):
        with pytest.raises(StateError, match="damaged: its content is not what was saved"):
            source.read(0, COUNTERS)


def test_states_without_a_digest_load_as_they_are(tmp_path: Path) -> None:
    """Earlier versions wrote none."""
    state = to_state_dict(HEADER, TENSORS)
    state[next(iter(state))] = metadata_to_tensor(HEADER.to_strings())
    for source in sources(tmp_path, state):
        assert source.headers() == {0: HEADER}
        for name, tensor in TENSORS.items():
            assert torch.equal(source.read(0, name), tensor)


@pytest.mark.parametrize("character", ["\U0001f600", "\0", "\\", "\ud800"])
def test_the_longest_name_of_a_policy_fits(character: str) -> None:
    header = StateHeader(
        policy=character * 300,
        policy_hash="a" * 64,
        layout="b" * 64,
        world_size=10**8,
        rank=10**8 - 1,
        step=10**17,
    )
    metadata = with_digest(header.to_strings(), {})
    assert metadata_from_tensor(metadata_to_tensor(metadata), "here") == metadata

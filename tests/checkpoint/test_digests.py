"""A changed bit in what was saved is refused, in checkpoints of torch and in state dicts, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tagc.checkpoint import OneRank, StateError, to_state_dict
from tagc.checkpoint.dcp import CheckpointFolder
from tagc.checkpoint.digest import matches_digest, with_digest
from tagc.checkpoint.format import StateHeader, metadata_from_tensor, metadata_to_tensor

HEADER = StateHeader(
    policy="p", policy_hash="a" * 64, layout="b" * 64, world_size=1, rank=0, step=3
)
NAME, COUNTERS = "residual.gradients.p", "unit.gradients.u.counters"
TENSORS = {NAME: torch.arange(6.0).view(2, 3), COUNTERS: torch.tensor([3, 2])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_any_tensor_has_a_digest(dtype: torch.dtype) -> None:
    """That of its elements in order, whatever their strides and number."""
    base = torch.arange(24).view(4, 6).to(dtype)
    strided = {
        "one element": base[:1, ::6],
        "one of a column": base[::4, :1].t(),
        "no dimensions": base[2, 3],
        "no elements": base[:0].t(),
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


# Bits


def renamed(tensors: dict[str, Tensor]) -> None:
    tensors[NAME + "q"] = tensors.pop(NAME)


def retyped(tensors: dict[str, Tensor]) -> None:
    tensors[NAME] = tensors[NAME].view(torch.int32)


def changed(tensors: dict[str, Tensor]) -> None:
    tensors[NAME].view(torch.uint8)[0, 0] ^= 1


def dropped(tensors: dict[str, Tensor]) -> None:
    del tensors[COUNTERS]


@pytest.mark.parametrize("change", [renamed, retyped, changed, dropped])
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


@pytest.mark.parametrize("character", ["\U0001f600", "\ud800"])
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

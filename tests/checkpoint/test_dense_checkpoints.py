"""From a checkpoint of dense training to tagc: every way of loading says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from tagc.checkpoint import OneRank, StateError, open_folder, to_state_dict
from tagc.checkpoint.format import _ABOUT, _FORMER_ABOUT, StateHeader

HEADER = StateHeader(
    policy="hybrid", policy_hash="0" * 64, layout="1" * 64, world_size=2, rank=0, step=3
)
ALONE = "torch.distributed is disabled"  # torch's own notice
WEIGHTS = {"weight": torch.zeros(3, dtype=torch.float32)}


class Compressor:
    """What torch's distributed checkpoints see of one."""

    def state_dict(self) -> dict[str, Tensor]:
        return to_state_dict(HEADER, {"residual.gradients.weight": WEIGHTS["weight"]})

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        OneRank(state_dict)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    with pytest.warns(match=ALONE):
        dcp.save({"model": WEIGHTS}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_torchs_own_message_has_the_remedy(dense: Path) -> None:
    state = {"model": WEIGHTS, "tagc": Compressor()}
    with pytest.raises(CheckpointException) as caught, pytest.warns(match=ALONE):
        dcp.load(state, checkpoint_id=dense, no_dist=True)
    said = str(caught.value)
    assert "Missing key in checkpoint state_dict: tagc." in said
    assert "from a checkpoint of dense training, leave the compressor's key out" in said
    with pytest.warns(match=ALONE):
        dcp.load({"model": WEIGHTS}, checkpoint_id=dense, no_dist=True)


def test_folders_and_state_dicts_without_a_state_name_the_remedy(
    dense: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    remedy = "from training without tagc, there is nothing to load: leave this out"
    with pytest.raises(StateError, match=f"is called 'tagc'.*{remedy}"):
        open_folder(dense, "tagc")
    with pytest.raises(StateError, match=f"holds no complete save.*{remedy}"):
        open_folder(tmp_path_factory.mktemp("empty"), "tagc")
    for found in ({}, WEIGHTS):
        with pytest.raises(StateError, match=remedy):
            OneRank(found)


def test_states_of_the_former_name_are_read() -> None:
    state = Compressor().state_dict()
    former = {name.replace(_ABOUT, _FORMER_ABOUT): tensor for name, tensor in state.items()}
    assert former.keys() != state.keys()
    assert OneRank(former).headers() == OneRank(state).headers() == {0: HEADER}

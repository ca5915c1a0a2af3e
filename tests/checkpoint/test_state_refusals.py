"""States that are damaged, foreign, or not this rank's: every rank raises, the message has the
remedy, and what the rank has stays."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

import tagc
from support.distributed import on_ranks, run_ranks
from support.exact import equal
from support.layouts import Layout
from support.marks import slow
from support.states import (
    BFLOAT16,
    LEAD,
    POLICIES,
    QUANTIZED,
    load,
    residual_sums,
    rules,
    run,
    save,
    shared_folder,
    snapshot,
    train_and_save,
    wrapped,
)
from tagc.checkpoint.files import MARKER

POLICY = POLICIES["quantized residual"]
OTHER = rules({"kind": "quantized", "bits": 8}, BFLOAT16)
OTHER["gradients"][0]["when"] = {"name": "second.*"}
HASHES = [tagc.Policy.load(policy).hash[:12] for policy in (POLICY, OTHER)]
NOTHING = "from training without tagc, there is nothing to load: leave this out"


class Saved:
    """A model, and what was saved of it, in both formats and as state dicts of two steps."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.model = wrapped(POLICY)
        self.states = []
        for step in range(2):
            run(self.model, rank, range(step, step + 1))
            self.states.append(tagc.compressor(self.model).state_dict())
        for saver in ("safetensors", "dcp"):
            save(self.model, folder / saver, saver)
        weights = {"model": {"weight": torch.zeros(3)}}
        dcp.save(weights, checkpoint_id=folder / "dense")
        run(self.model, rank, range(2, 3))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        tagc.compressor(self.model).load_state_dict(state)

    def load_changed(self, change: Callable[[Path], None]) -> None:
        """The files of the save after a change to their folder."""
        changed = self.folder / "changed"
        if self.rank == 0:
            shutil.rmtree(changed, ignore_errors=True)
            shutil.copytree(self.folder / "safetensors", changed)
            change(changed)
        dist.barrier()
        tagc.compressor(self.model).load(changed)

    def load_by(self, saver: str, policy: dict[str, Any]) -> None:
        """With another policy."""
        load(wrapped(policy), self.folder / saver, saver)

    def exchanged(self) -> dict[str, Tensor]:
        """The next rank's state."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.states[0])
        return found[self.rank - 1]


def of_rank_1(folder: Path) -> Path:
    (file,) = folder.glob("rank-00001-*.safetensors")
    return file


def flip(folder: Path) -> None:
    file = of_rank_1(folder)
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def changed_bit(state: dict[str, Tensor]) -> dict[str, Tensor]:
    name = next(name for name in state if ".residual." in name)
    tensor = state[name].clone()
    tensor.view(-1).view(torch.uint8)[0] ^= 1
    return state | {name: tensor}


REFUSED: dict[str, tuple[Callable[[Saved], None], str]] = {
    "a file is missing": (
        lambda t: t.load_changed(lambda folder: of_rank_1(folder).unlink()),
        r"rank-00001-of-00002-\w+\.safetensors: there is no such file",
    ),
    "a changed bit in a file": (
        lambda t: t.load_changed(flip),
        r"rank-00001-of-00002-\w+\.safetensors: damaged",
    ),
    "a changed bit in a state dict": (
        lambda t: t.load_state_dict(changed_bit(t.states[0])),
        "the state dict: damaged: its content is not what was saved",
    ),
    "a save that was not committed": (
        lambda t: t.load_changed(lambda folder: (folder / MARKER).unlink()),
        f"holds no complete save.*{NOTHING}",
    ),
    "a checkpoint of dense training": (
        lambda t: tagc.compressor(t.model).load(t.folder / "dense"),
        f"nothing in this checkpoint is called 'tagc'; pass the compressor's key.*{NOTHING}",
    ),
    "a checkpoint of dense training, by torch": (
        lambda t: load(t.model, t.folder / "dense", "dcp"),
        "Missing key.*tagc.*of dense training, leave the compressor's key out",
    ),
    "an empty state dict": (lambda t: t.load_state_dict({}), NOTHING),
    "another policy": (
        lambda t: t.load_by("safetensors", OTHER),
        rf"{HASHES[0]}.*{HASHES[1]}.*force=True",
    ),
    # torch looks for the names first; they are of the other policy, and the remedy.
    "another policy, by torch": (
        lambda t: t.load_by("dcp", OTHER),
        rf"policy_{HASHES[1]}.*load it with tagc.compressor\(model\).load\(folder\)",
    ),
    "another rank's state dict": (
        lambda t: t.load_state_dict(t.exchanged()),
        r"saved by rank [01] of 2, but this is rank [01] of 2.*load\(folder\)",
    ),
    "state dicts of different steps": (
        lambda t: t.load_state_dict(t.states[t.rank]),
        "All ranks must load what was saved together",
    ),
}


@on_ranks(2)
def test_what_cannot_be_loaded_says_why(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        saved = Saved(rank, folder)
        for name, (loads, complaint) in REFUSED.items():
            before = snapshot(saved.model)
            error: BaseException | None = None
            try:
                loads(saved)
            except (ValueError, RuntimeError, CheckpointException) as caught:
                error = caught
            assert error is not None, name
            assert re.search(complaint, str(error), re.DOTALL), (name, str(error))
            equal(snapshot(saved.model), before)


# A state dict has the part of one rank


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "old", "new", "feedback"),
    [
        (4, Layout(2, tensor=2), Layout(4, tensor=1), {"kind": "residual"}),
        # Owners have other elements, too.
        (2, Layout(2), Layout(2, "FSDP1"), LEAD),
        slow(4, Layout(4, "DDP"), Layout(4, "DDP", per_host=2), {"kind": "residual"}),
    ],
    ids=str,
)
def test_a_state_dict_is_of_one_part(
    rank: int, world_size: int, old: Layout, new: Layout, feedback: dict[str, Any]
) -> None:
    """The same ranks in another layout would each add up something else."""
    policy = rules(QUANTIZED, feedback)
    states = []
    for layout in (old, new):
        model = layout.wrapped(policy)
        layout.run(model, rank, range(1))
        states.append(tagc.compressor(model).state_dict())
    before = snapshot(model)
    # Whichever rank finds it out first, the others learn of it.
    with pytest.raises((tagc.StateError, RuntimeError), match=r"in another way|would be dropped"):
        tagc.compressor(model).load_state_dict(states[0])
    equal(snapshot(model), before)


# What is loaded all the same


def forces(rank: int, folder: Path) -> tuple[dict[str, Tensor], str]:
    model = wrapped(OTHER)
    with pytest.warns(UserWarning, match="dropped") as caught:
        tagc.compressor(model).load(folder, force=True)
    assert len(caught) == 1
    sums = residual_sums(model)
    run(model, rank, range(3, 5))
    return sums, str(caught[0].message)


def test_another_policy_if_forced(tmp_path: Path) -> None:
    """What still has a residual keeps it; a warning names the others."""
    before = run_ranks(train_and_save, 2, "dcp", POLICY, tmp_path)
    loaded = run_ranks(forces, 2, tmp_path)
    for name in ("second.0.weight", "second.2.weight"):
        ranks = torch.stack([sums[name] for sums, _ in loaded])
        expected = torch.stack([sums[name] for sums in before]).sum(0)
        bound = 2.0**-8 * ranks.abs().sum(0) + 1e-37
        assert ((ranks.sum(0) - expected).abs() <= bound).all()
        assert expected.any()
    for _, message in loaded:
        for name in ("first.0.weight", "first.2.weight", "head.weight", "norm.weight"):
            assert f"residual of gradients of {name}" in message
        assert "second" not in message

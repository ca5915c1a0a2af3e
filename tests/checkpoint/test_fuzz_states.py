"""Mutated state files: clear errors, or exactly what they say; fixed seeds.

Nothing may crash, hang, run code from a file, or be taken for something else than it says.
"""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.distributed import run_ranks
from support.exact import equal
from support.launching import Echo
from support.mutation import SECONDS, by_count, mutated
from support.units import codec_plan, normal
from tagc.checkpoint import State, StateError, UnitState, save_folder
from tagc.checkpoint.files import open_checkpoint, open_files
from tagc.codecs.workspace import Workspace
from tagc.collect import SilentGroup, UnitReducer
from tagc.ops import get_ops
from tagc.plan import Plan
from tagc.policy import Policy


def state_of_a_unit() -> State:
    """Of a sketch after a few steps on the only rank, as if there were another."""
    codec = {"kind": "sketch", "density": 0.3, "symbol": "int32x1", "support": "shared"}
    unit, cpu, ranks = codec_plan(2, codec), torch.device("cpu"), SilentGroup(2)
    reducer = UnitReducer(
        unit, get_ops(cpu, "reference"), cpu, Workspace(cpu), seed=7, connect=Echo
    )
    for step in range(3):
        out, inp = torch.empty(unit.columns), normal(2, unit.columns, step)[0].flatten()
        reducer.reduce(out, inp, ranks, dist.ReduceOp.AVG)  # type: ignore[arg-type]
    rule = {"when": {"name": "a.*"}, "codec": codec}
    group = dist.group.WORLD
    assert group is not None
    return State(
        plan=Plan(Policy.load({"schema": 1, "gradients": [rule]}), (unit,)),
        groups=[group],
        reduced=[UnitState(direction="gradients", reducer=reducer, shard=0, shards=2)],
        gathered=[],
    )


def loads(state: State, before: dict[str, Tensor], folder: Path) -> bool:
    """Whether the files are loaded; if not, by a clear error. Nothing is changed in any case."""
    start = time.monotonic()
    try:
        state.load(partial(open_files, folder), force=False)
    except StateError:
        return False
    finally:
        assert time.monotonic() - start < SECONDS
        equal(state.take().tensors, before)
    return True


def fuzz_bytes(rank: int, folder: Path, count: int) -> int:
    """Files with changed bytes; how many were loaded all the same."""
    draw, loaded, state = random.Random(6), 0, state_of_a_unit()
    save_folder(folder, state)
    before = state.take().tensors
    files = {file: file.read_bytes() for file in sorted(folder.iterdir())}
    assert len(files) == 2
    words = [b"F32", b"I64", b"BOOL", b"F8_E4M3", b"shape", b"dtype", b'"', b"{", b"[" * 999]
    words += [b"0", b"-1", b"1e3", b"9" * 19, b"9" * 5000, b"null", b"true", b"\xff"]
    for _ in range(count):
        file = draw.choice(list(files))
        # Most of a file is residuals: aim at what it says about them, more often than not.
        content = files[file]
        head = draw.choice((40, 500, len(content)))
        file.write_bytes(mutated(content[:head], words, draw) + content[head:])
        loaded += loads(state, before, folder)
        file.write_bytes(content)
    return loaded


@by_count
def test_state_files(count: int, tmp_path: Path) -> None:
    # What is loaded all the same was changed where it says nothing, as in the space of JSON.
    (loaded,) = run_ranks(fuzz_bytes, 1, tmp_path, count, timeout=200)
    assert loaded < count / 4


def test_every_attack_on_an_index_is_refused(tmp_path: Path) -> None:
    for attack in attacks():
        (tmp_path / ".metadata").write_bytes(attack)
        with pytest.raises(StateError, match=r"nothing was loaded|not an index"):
            open_checkpoint(tmp_path, "tagc")
    assert not (tmp_path / "owned").exists()


def attacks() -> Iterator[bytes]:
    """Pickles that would run something."""

    class Runs:
        def __init__(self, what: Callable, *args: Any) -> None:
            self._made = (what, args)

        def __reduce__(self) -> Any:
            return self._made

    for what, *args in (
        (eval, "open('owned', 'w')"),
        (exec, "open('owned', 'w')"),
        (open, "owned", "w"),
        (getattr, "", "join"),
        (torch.load, "owned"),
    ):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            yield pickle.dumps(Runs(what, *args), protocol)

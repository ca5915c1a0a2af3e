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

from support.distributed import run_ranks
from support.exact import equal
from support.launching import Echo
from support.mutation import SECONDS, by_count, mutated
from support.units import codec_plan
from tagc.checkpoint import Source, State, StateError, UnitState, save_folder
from tagc.checkpoint.files import open_checkpoint, open_files
from tagc.codecs.workspace import Workspace
from tagc.collect import SilentGroup, UnitReducer
from tagc.ops import get_ops
from tagc.plan import Plan
from tagc.policy import Policy

CODECS = [
    {"kind": "quantized", "bits": 4, "block": 32},
    {"kind": "matrix", "bits": 1},
    {"kind": "sketch", "density": 0.2},
    {"kind": "sketch", "density": 0.3, "symbol": "int32x1", "support": "shared"},
]


class Unit:
    """A unit's state on the only rank, and its columns as if there were another."""

    def __init__(self, codec: dict[str, Any]) -> None:
        unit = codec_plan(2, codec)
        cpu = torch.device("cpu")
        reducer = UnitReducer(
            unit, get_ops(cpu, "reference"), cpu, Workspace(cpu), seed=7, connect=Echo
        )
        rule = {"when": {"name": "a.*"}, "codec": codec}
        group = dist.group.WORLD
        assert group is not None
        self.state = State(
            plan=Plan(Policy.load({"schema": 1, "gradients": [rule]}), (unit,)),
            groups=[group],
            reduced=[UnitState(direction="gradients", reducer=reducer, shard=0, shards=2)],
            gathered=[],
        )
        generator = torch.Generator().manual_seed(1)
        grad, ranks = torch.randn(2, unit.columns, generator=generator), SilentGroup(2)
        for _ in range(3):
            out: Any = torch.empty(unit.columns)
            reducer.reduce(out, grad.flatten(), ranks, dist.ReduceOp.AVG)  # type: ignore[arg-type]
        self.before = self.state.take().tensors

    def load(self, open_source: Callable[[], Source]) -> bool:
        """Whether it is loaded; if not, by a clear error, and nothing was changed."""
        start = time.monotonic()
        try:
            self.state.load(open_source, force=False)
        except StateError:
            equal(self.state.take().tensors, self.before)
            return False
        finally:
            assert time.monotonic() - start < SECONDS
        return True


def fuzz_bytes(rank: int, folder: Path, count: int) -> int:
    """Files with changed bytes; how many were loaded all the same."""
    draw, loaded = random.Random(6), 0
    for i, codec in enumerate(CODECS):
        tested, here = Unit(codec), folder / str(i)
        save_folder(here, tested.state)
        files = {file: file.read_bytes() for file in sorted(here.iterdir())}
        assert len(files) == 2
        words = [b"F32", b"I64", b"BOOL", b"F8_E4M3", b"shape", b"dtype", b'"', b"{", b"[" * 999]
        words += [b"0", b"-1", b"1e3", b"9" * 19, b"9" * 5000, b"null", b"true", b"\xff"]
        for _ in range(count // len(CODECS)):
            file = draw.choice(list(files))
            # Most of a file is residuals: aim at what it says about them, more often than not.
            content = files[file]
            head = draw.choice((40, 500, len(content)))
            changed = mutated(content[:head], words, draw) + content[head:]
            file.write_bytes(changed)
            if tested.load(partial(open_files, here)):
                loaded += 1
                equal(tested.state.take().tensors, tested.before)
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

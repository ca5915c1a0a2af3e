"""What lives across reductions stays where it is in memory.

FSDP reduces on a stream of its own. A tensor that is replaced is freed while that stream may still
work with it, and its block may be another stream's by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import tagc
from support import small_net
from support.distributed import on_ranks
from support.small_net import loss_of
from support.states import MATRIX, QUANTIZED, SKETCH
from tagc.codecs.workspace import Workspace
from tagc.collect.replay import Replay


def tensors_of(thing: Any, seen: set[int], at: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor that an object of the library refers to, and by which attributes. Scratch
    buffers are none of its state, and replays hold views of it."""
    if isinstance(thing, Tensor):
        yield at, thing
        return
    if id(thing) in seen or isinstance(thing, Workspace | Replay):
        return
    seen.add(id(thing))
    inside: list[tuple[Any, Any]] = []
    if isinstance(thing, Mapping):
        inside = list(thing.items())
    elif isinstance(thing, list | tuple | set):
        inside = list(enumerate(thing))
    elif type(thing).__module__.startswith("tagc."):
        inside = list(vars(thing).items())
    for name, value in inside:
        yield from tensors_of(value, seen, f"{at}.{name}")


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model's reducers and gatherers. Who keeps them finds others elsewhere."""
    compressor, seen = tagc.compressor(model), set[int]()
    owners = [*compressor.reducers, *compressor.replica_reducers, *compressor.gatherers]
    return dict(tensors_of(owners, seen))


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    same = {n for n, t in after.items() if n in before and before[n].data_ptr() == t.data_ptr()}
    return sorted((before.keys() | after.keys()) - same)


def rule(names: list[str], codec: dict[str, Any], feedback: dict[str, Any]) -> dict[str, Any]:
    return {"when": {"name": names}, "codec": codec, "feedback": feedback}


LEAD = {"kind": "residual", "lead": 0.5}
GRADIENTS = [
    rule(["first.*.weight"], SKETCH | {"support": "shared"}, {"kind": "residual"}),
    rule(["second.0.weight"], MATRIX | {"level": 1.3}, LEAD),
    rule(["*.weight"], QUANTIZED, {"kind": "average"}),
]
REPLICAS = [rule(["*.weight"], QUANTIZED, LEAD)]
PARAMETERS = [{"when": {"name": ["second.*.weight"]}, "codec": {"kind": "delta", "bits": 4}}]


@on_ranks(4)
def test_state_stays_where_it_is(rank: int, world_size: int) -> None:
    """Of every kind: through steps, a change of the loss scale, skipped steps and a load."""
    policy = {"gradients": GRADIENTS, "replicas": REPLICAS, "parameters": PARAMETERS}
    model, _ = small_net.wrapped(policy)
    compressor = tagc.compressor(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compressor.keep_rates(optimizer, second_moment=True)

    def train(steps: range) -> None:
        for step in steps:
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(range(2))
    before = state_of(model)
    train(range(2, 4))
    assert moved(before, state_of(model)) == []
    compressor.scale_residuals(2.0)
    copy = compressor.copy_residuals()
    train(range(4, 5))
    compressor.restore_residuals(copy, where=torch.ones(()))
    compressor.restore_residuals(copy)
    assert moved(before, state_of(model)) == []
    compressor.load_state_dict(compressor.state_dict())
    # A load begins a new gauge.
    assert not [name for name in moved(before, state_of(model)) if ".gauge." not in name]

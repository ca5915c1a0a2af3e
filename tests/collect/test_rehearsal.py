"""A rehearsal calls the operators that a step calls, and compiles all that a step launches."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tagc
from support.distributed import run_ranks
from support.marks import slow
from support.small_net import loss_of, sharded
from tagc.collect import rehearse
from tagc.ops import Ops, get_ops, reference
from tagc.selfcheck import Call, Recorder
from tagc.selfcheck.calls import OPERATORS

WEIGHTS = {"name": ["first*weight", "second*weight", "head.weight"]}
RESIDUAL = {"kind": "residual"}
DENSE = {"when": {}, "codec": {"kind": "dense"}}
RULES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "quantized": (
        {"kind": "quantized", "bits": 4, "block": 32},
        RESIDUAL,
        {"kind": "quantized", "bits": 8},
    ),
    "dithered": (
        {"kind": "quantized", "bits": 4, "block": 32, "rounding": "stochastic"},
        {"kind": "none"},
        {"kind": "delta", "bits": 4, "rounding": "stochastic"},
    ),
    "matrix": ({"kind": "matrix", "bits": 1}, RESIDUAL, {"kind": "delta", "bits": 2}),
    "sketch": ({"kind": "sketch", "density": 0.3, "symbol": "int8x4"}, RESIDUAL, None),
    "shared sketch": (
        {"kind": "sketch", "density": 0.9, "symbol": "int8x4", "support": "shared"},
        RESIDUAL,
        None,
    ),
}


def policy(name: str) -> dict[str, Any]:
    gradients, feedback, parameters = RULES[name]
    rules = [{"when": WEIGHTS, "codec": gradients, "feedback": feedback}]
    made: dict[str, Any] = {"schema": 1, "gradients": rules}
    if parameters is not None:
        made["parameters"] = [{"when": WEIGHTS, "codec": parameters}]
    return made


def idle() -> Ops:
    """Operators that do nothing; some return something."""

    def peel(cells: Tensor, index: Tensor, seed: Tensor, *, layout: Any) -> tuple[Tensor, Tensor]:
        symbols = cells.new_empty(layout.groups)
        return symbols, symbols.bool()

    def nothing(name: str) -> Any:
        given = getattr(get_ops("cpu", "reference"), name)

        def idles(*args: Any, **kwargs: Any) -> None: ...

        idles.__wrapped__ = given  # for its signature
        return idles

    operators = {name: nothing(name) for name in OPERATORS} | {"peel": peel}
    prepare = dict.fromkeys(
        (name for name in reference.__all__ if name.startswith("prepare")),
        lambda *sizes, **options: None,
    )
    return cast(Ops, SimpleNamespace(**operators, **prepare))


def called(rank: int, policy: Any, hosts: int | None, copies: int) -> tuple[set[Call], set[Call]]:
    """In three steps of training, and in the rehearsal of their plan."""
    model = sharded()
    if copies > 1:
        names = ("copies", "shards")
        model = sharded(mesh=init_device_mesh("cpu", (copies, 1), mesh_dim_names=names))
    recorder = Recorder(get_ops("cpu", "reference"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tagc.handle.collectives.get_ops", lambda device, name=None: recorder)
        with warnings.catch_warnings():
            # Such small segments pay with no codec.
            warnings.simplefilter("ignore", UserWarning)
            tagc.wrap(model, policy, hosts=hosts)
    recorder.calls.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = set(recorder.calls)
    rehearsed = Recorder(idle())
    rehearse(tagc.compressor(model).plan(), rehearsed.ops, stamped=False)
    dist.barrier()
    return trained, set(rehearsed.calls)


ON_HOSTS = policy("quantized") | {"inside": "int8"}
AVERAGED = policy("quantized")["gradients"]
OVER_REPLICAS = {"schema": 1, "gradients": [DENSE], "replicas": AVERAGED}
QUICK = ("matrix", "shared sketch")
OTHERS = [name for name in RULES if name not in QUICK]


@pytest.mark.parametrize(
    ("ranks", "rules", "hosts", "copies"),
    [
        *((2, policy(name), None, 1) for name in QUICK),
        (4, ON_HOSTS, 2, 1),
        slow(3, OVER_REPLICAS, None, 3),
        *(slow(2, policy(name), None, 1) for name in OTHERS),
    ],
    ids=[*QUICK, "hosts", "replicas", *OTHERS],
)
def test_a_rehearsal_calls_what_training_calls(
    ranks: int, rules: dict[str, Any], hosts: int | None, copies: int
) -> None:
    for trained, rehearsed in run_ranks(called, ranks, rules, hosts, copies):
        assert len(trained) >= 2
        assert trained == rehearsed

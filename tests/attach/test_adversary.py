"""A standing adversary: random sequences of calls, beside native FSDP2.

Parameters travel in 8 bits that are exact, since the weights lie on a grid, so that gradients must
be native FSDP2's to the bit; kept messages must never show, nor copies, which are refreshed where
weights change. A sequence that fails is shrunk, and
printed as a list that can be run again.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

import tagc
from parity.option import wrap_blocks
from support.block_net import grads, net, sharded, wrap
from support.distributed import on_ranks
from support.gathering import INT8, KEPT, gathering
from support.marks import slow
from support.shrinking import anywhere, shrunk

CHANGED = "changed between a forward and its backward"
CHANGES = {"kind": "delta", "bits": 8, "block": 32}
COMMON = ["forward", "forward", "backward", "backward", "teach", "teach", "evaluate", "step"]
# What native FSDP2 itself often fails after, which ends a sequence.
RARE = [
    "infer", "give up", "swap", "unswap", "zero", "sync off", "sync on", "save and load",
    "wrap again", "unshard", "reshard", "stay unsharded", "reshard again", "fail in a step",
    "keep inside hosts", "leave hosts", "drop waiting",
]  # fmt: skip
CALLS = [*COMMON * 4, *RARE]
SHAPES: list[dict[str, Any]] = [
    {},
    {"recompute": True},
    {"recompute": "reentrant"},
    {"times": 2},
    {"wrapper": True},
    {"reshard_after_forward": 2},
    {"reshard_after_forward": False},
]
USUAL = [{}, {"recompute": "reentrant"}, {"times": 2}]


def exact(shape: torch.Size, seed: int) -> Tensor:
    """Weights of one magnitude, that of code 127, and random signs: 8 bits carry them exactly."""
    signs = torch.randint(2, shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return signs * 127 * 2.0**-9


class Fails(torch.optim.SGD):
    """Its step raises before it changes anything."""

    def step(self, closure: Any = None) -> None:
        raise ArithmeticError("out of luck")


class Model:
    """A sharded model, and what was called on it."""

    def __init__(self, shape: dict[str, Any], policy: dict[str, Any] | None) -> None:
        options = dict(shape)
        wrapper = options.pop("wrapper", False)
        reshard = options.pop("reshard_after_forward", True)
        model = net(**options)
        if wrapper:
            wrap_blocks(model)
        self.module: Any = sharded(model, reshard_after_forward=reshard)
        self.policy = policy
        self.weights = self.writes = 0
        self.losses: list[tuple[int, int, Tensor]] = []
        self.steps = 0
        if policy is not None:
            wrap(self.module, policy)
        self.set_weights(0)
        # FSDP's first forward makes tensors: in inference mode no other forward could use them.
        self.call("evaluate", 0)

    def set_weights(self, seed: int) -> None:
        self.weights = seed
        self.writes += 1
        if self.policy is not None:
            tagc.compressor(self.module).refresh()
        with torch.no_grad():
            for i, p in enumerate(self.module.parameters()):
                if not isinstance(p, DTensor):
                    continue  # FSDP left it unsharded until the backward
                whole = exact(p.shape, 100 * seed + i)
                part = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
                p.copy_(part)

    def call(self, name: str, rank: int) -> None:
        self.steps += 1
        tokens = torch.randint(
            13, (4, 5), generator=torch.Generator().manual_seed(self.steps + rank)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a checkpoint that is not recorded
            getattr(self, name.replace(" ", "_"))(tokens)

    def forward(self, tokens: Tensor) -> None:
        if len(self.losses) < 2:
            loss = self.module(tokens).square().sum() / 64
            self.losses.append((self.weights, self.writes, loss))

    def backward(self, tokens: Tensor) -> None:
        if self.losses:
            self.losses.pop()[2].backward()

    def evaluate(self, tokens: Tensor) -> None:
        with torch.no_grad():
            self.module(tokens)

    def infer(self, tokens: Tensor) -> None:
        with torch.inference_mode():
            self.module(tokens)

    def teach(self, tokens: Tensor) -> None:
        """Evaluate other weights."""
        own = self.weights
        self.set_weights(own + 5)
        self.evaluate(tokens)
        self.set_weights(own)

    def give_up(self, tokens: Tensor) -> None:
        self.module(tokens)
        self.losses.clear()

    def swap(self, tokens: Tensor) -> None:
        self.set_weights(self.weights + 1)

    def unswap(self, tokens: Tensor) -> None:
        self.set_weights(max(0, self.weights - 1))

    def step(self, tokens: Tensor) -> None:
        """An optimizer that finds weights on the grid."""
        self.set_weights(self.weights + 10)
        self.zero(tokens)

    def zero(self, tokens: Tensor) -> None:
        self.module.zero_grad()

    def sync_off(self, tokens: Tensor) -> None:
        self.module.set_requires_gradient_sync(False)

    def sync_on(self, tokens: Tensor) -> None:
        self.module.set_requires_gradient_sync(True)

    def save_and_load(self, tokens: Tensor) -> None:
        if self.policy is not None and not self.losses:
            compressor = tagc.compressor(self.module)
            compressor.load_state_dict(compressor.state_dict())

    def wrap_again(self, tokens: Tensor) -> None:
        if self.policy is not None and not self.losses:
            tagc.compressor(self.module).remove()
            wrap(self.module, self.policy)

    def unshard(self, tokens: Tensor) -> None:
        if not self.losses:
            self.module.unshard()

    def reshard(self, tokens: Tensor) -> None:
        if not self.losses:
            self.module.reshard()

    def stay_unsharded(self, tokens: Tensor) -> None:
        if not self.losses:
            self.module.set_reshard_after_forward(False)

    def reshard_again(self, tokens: Tensor) -> None:
        if not self.losses:
            self.module.set_reshard_after_forward(True)

    def fail_in_a_step(self, tokens: Tensor) -> None:
        with pytest.raises(ArithmeticError):
            Fails(self.module.parameters(), lr=0.1).step()

    def keep_inside_hosts(self, tokens: Tensor) -> None:
        self.module.set_requires_all_reduce(False)

    def leave_hosts(self, tokens: Tensor) -> None:
        self.module.set_requires_all_reduce(True)

    def drop_waiting(self, tokens: Tensor) -> None:
        if self.policy is not None:
            tagc.compressor(self.module).drop_waiting()


def outcome(shape: dict[str, Any], calls: Sequence[str], rank: int) -> tuple[str, int]:
    """What is wrong after a sequence, empty if nothing is, and how many of the calls were made."""
    native = Model(shape, None)
    models = [(codec, Model(shape, gathering(codec))) for codec in (INT8, KEPT, CHANGES)]
    for at, name in enumerate(calls):
        try:
            native.call(name, rank)
        except RuntimeError:
            return "", at  # not even without tagc
        for codec, model in list(models):
            kept = codec is KEPT and any(weights != model.weights for weights, *_ in model.losses)
            # A copy is of the last forward's weights, whosever that was.
            copied = codec is CHANGES and any(w != model.writes for _, w, _ in model.losses)
            try:
                model.call(name, rank)
            except RuntimeError as error:
                if not (kept or copied) or CHANGED not in str(error):
                    return f"{at} ({name}), {codec}: {error}", at
                if kept:
                    return "", at
                models.remove((codec, model))  # the others go on
        theirs = grads(native.module)
        for codec, model in models:
            mine = grads(model.module)
            if mine.keys() != theirs.keys():
                return f"{at} ({name}), {codec}: gradients of {mine.keys()}", at
            for parameter, grad in mine.items():
                if not torch.equal(grad, theirs[parameter]):
                    return f"{at} ({name}), {codec}: another gradient of {parameter}", at
    return "", len(calls)


@pytest.mark.some(1)
@on_ranks(2)
@pytest.mark.parametrize(
    "shape", [shape if shape in USUAL else slow(shape) for shape in SHAPES], ids=str
)
def test_what_was_found_before(rank: int, world_size: int, shape: dict[str, Any]) -> None:
    for calls in (
        ["forward", "teach", "backward"],
        ["forward", "backward", "step", "forward", "evaluate", "backward"],
        ["forward", "backward", "fail in a step", "evaluate", "evaluate", "forward", "backward"],
        [
            "stay unsharded",
            "forward",
            "backward",
            "step",
            "evaluate",
            "reshard again",
            "forward",
            "backward",
            "step",
            "forward",
            "backward",
        ],
    ):
        wrong, made = outcome(shape, calls, rank)
        assert not wrong, (calls, wrong)
        assert made == len(calls)


@on_ranks(2, timeout=200)
@pytest.mark.parametrize("seed", [0, *(slow(seed) for seed in range(1, 100))])
def test_sequences(rank: int, world_size: int, seed: int) -> None:
    choose = random.Random(seed)
    shape = SHAPES[seed % len(SHAPES)]
    total = 0
    for _ in range(4):
        calls = choose.choices(CALLS, k=14)
        wrong, made = outcome(shape, calls, rank)
        if anywhere(wrong):
            calls = shrunk(calls, lambda some: anywhere(outcome(shape, some, rank)[0]))
            raise AssertionError(f"{shape} {calls}: {outcome(shape, calls, rank)}")
        total += made
    assert total >= 14, f"native FSDP2 itself failed after {total} of 56 calls"

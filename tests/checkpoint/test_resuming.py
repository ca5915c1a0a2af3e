"""A run that resumes has the bits of one that went on, for every shipped policy: those of the step
after a checkpoint; for sites of the steps until all has been exchanged once more.

The gradient of a weight ``w`` is ``c + w / 2``, with a constant ``c`` of the rank and the step, and
``w`` as it was gathered.
"""

from __future__ import annotations

import warnings
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

import tagc
from support.distributed import on_ranks
from support.small_net import local
from support.states import shared_folder
from tagc.costs import Link, Speed, auto, speed_key
from tagc.handle.compressor import Handle

# All that the shipped policies for sites leave out. The third exchange of the first fragment begins
# after the last step before the checkpoint, and so is in flight in it.
DELAYED = {
    "schema": 1,
    "extends": "sites",
    "sites": {
        "every": 6,
        "fragments": 2,
        "delay": 2,
        "alpha": 0.5,
        "outer": {"rate": 0.5, "momentum": 0.5},
    },
}
SHIPPED = {name: tagc.Policy.load(name) for name in tagc.policies()}
CASES = dict(sorted((SHIPPED | {"sites, delayed": tagc.Policy.load(DELAYED)}).items()))
# Steps of a policy after its warm-up, or after two exchanges between sites.
COMPRESSED = 3


def fixed(shape: torch.Size, *seed: object) -> Tensor:
    """Numbers that depend on ``seed`` alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    return torch.randn(shape, generator=generator)


class Block(nn.Module):
    """Weights under names that have roles; a norm; rows that do not divide by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 12, bias=False)
        self.up_proj = nn.Linear(32, 7, bias=False)
        self.norm = nn.LayerNorm(32, bias=False)

    def forward(self, seed: tuple[int, int]) -> Tensor:
        return _loss(self, seed)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])
        self.lm_head = nn.Linear(32, 5, bias=False)

    def forward(self, seed: tuple[int, int]) -> Tensor:
        return _loss(self.lm_head, seed) + sum(layer(seed) for layer in self.layers)


def _loss(module: nn.Module, seed: tuple[int, int]) -> Tensor:
    losses = [
        (weight * (fixed(weight.shape, name, *seed) + weight.detach() / 2)).sum()
        for name, weight in module.named_parameters()
    ]
    return torch.stack(losses).sum()


class Training:
    """The model of a policy, and its optimizer, with steps that are powers of two.

    Attributes:
        stop: steps before the checkpoint.
        more: steps after it.
    """

    def __init__(self, policy: tagc.Policy) -> None:
        self.model: Any = Model()
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(fixed(weight.shape, name))
        # The shipped policies leave weights of this size alone, and ask how fast the link is.
        link, speed = Link(bandwidth=1e6, latency=1e-4), Speed(encode=1e-9, decode=1e-9)
        with (
            patch("tagc.policy.rules.SMALL", 0),
            patch.object(auto, "measure_link", lambda *_: link),
            patch.object(auto, "measure_speeds", lambda cs, *_: {speed_key(c): speed for c in cs}),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message=".*sends .* per step at this number of ranks")
            self.handle, self.optimizer = self.begin(policy)
        self.stop, self.more = self.handle.plan().warmup_steps + COMPRESSED, 1

    def begin(self, policy: tagc.Policy) -> tuple[Handle, SGD]:
        """Give the model to tagc."""
        for module in (*self.model.layers, self.model):
            fully_shard(module)
        tagc.wrap(self.model, policy, hosts=None)
        return tagc.compressor(self.model), _sgd(self.model)

    def step(self, rank: int, step: int) -> None:
        """One, with gradients that are kept until the next."""
        self.optimizer.zero_grad()
        self.model((rank, step)).backward()
        self.optimizer.step()

    def own(self) -> dict[str, Any]:
        """What torch saves of the model and its optimizer."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}

    def placed(self, own: dict[str, Any]) -> dict[str, Any]:
        """By keys of a checkpoint in torch's format."""
        return own

    def save(self, folder: Path) -> None:
        """In both formats."""
        state = self.placed(self.own()) | {"tagc": self.handle}
        dcp.save(state, checkpoint_id=folder / "dcp")
        self.handle.save(folder / "files")

    def load(self, folder: Path, form: str) -> None:
        """What was saved, without ``force``; weights and optimizer are in torch's format only."""
        own = self.own()
        state = self.placed(own) | ({"tagc": self.handle} if form == "dcp" else {})
        dcp.load(state, checkpoint_id=folder / "dcp")
        weights, moments = own["model"], own["optimizer"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments
        )
        if form == "files":
            self.handle.load(folder / "files")

    def found(self) -> dict[str, Tensor]:
        """Gradients, weights, and all of the state."""
        found = dict(self.handle.state_dict())
        for name, param in self.model.named_parameters():
            found |= {f"weight {name}": local(param), f"gradient {name}": local(param.grad)}
        return found


class SiteTraining(Training):
    """Each rank is a site with a whole model."""

    def __init__(self, policy: tagc.Policy) -> None:
        super().__init__(policy)
        assert policy.sites is not None
        every = policy.sites.every
        self.stop, self.more = 2 * every + COMPRESSED, every

    def begin(self, policy: tagc.Policy) -> tuple[Handle, SGD]:
        """See :meth:`Training.begin`."""
        optimizer = _sgd(self.model)
        return tagc.sites(self.model, optimizer, policy), optimizer

    def placed(self, own: dict[str, Any]) -> dict[str, Any]:
        """See :meth:`Training.placed`: sites differ, and torch saves what has the same key once."""
        return {key: {f"site {dist.get_rank()}": value} for key, value in own.items()}


def _sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=2**-4, momentum=0.5)


def _training(case: str) -> Training:
    policy = CASES[case]
    return Training(policy) if policy.sites is None else SiteTraining(policy)


def train_on(training: Training, rank: int) -> dict[str, Tensor]:
    """What comes after a checkpoint."""
    for step in range(training.stop, training.stop + training.more):
        training.step(rank, step)
    return training.found()


@on_ranks(2, timeout=240)
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_resumes(rank: int, world_size: int, case: str) -> None:
    with shared_folder() as folder:
        training = _training(case)
        for step in range(training.stop):
            training.step(rank, step)
        training.save(folder)
        expected = train_on(training, rank)
        for form in ("files", "dcp"):
            resumed = _training(case)
            resumed.load(folder, form)
            found = train_on(resumed, rank)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), (form, name)

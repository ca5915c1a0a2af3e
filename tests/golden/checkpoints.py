"""A training that stops in its middle, for every shipped policy, and the step after that.

The gradient of a weight ``w`` is ``c + w / 2``, with a constant ``c`` of the rank and the step, and
``w`` as it was gathered: no sum in it, and so the same bits on every machine.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import tagc
from golden.inputs import content, digest, fixed
from tagc.costs import Link, Speed, auto, speed_key

# Sites have other checkpoints: of each site's own model.
SHIPPED = sorted(name for name in tagc.policies() if tagc.Policy.load(name).sites is None)
RANKS = 2
FORMATS = ("files", "dcp")
# Steps of a policy after its warm-up.
COMPRESSED = 3


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
    """The model of a policy, and its optimizer, with steps that are powers of two."""

    def __init__(self, policy: str) -> None:
        self.model: Any = Model()
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(fixed(weight.shape, name))
        for module in (*self.model.layers, self.model):
            fully_shard(module)
        # The shipped policies leave weights of this size alone, and ask how fast the link is.
        link, speed = Link(bandwidth=1e6, latency=1e-4), Speed(encode=1e-9, decode=1e-9)
        with (
            patch("tagc.policy.rules.SMALL", 0),
            patch.object(auto, "measure_link", lambda *_: link),
            patch.object(auto, "measure_speeds", lambda cs, *_: {speed_key(c): speed for c in cs}),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message=".*sends .* per step at this number of ranks")
            tagc.wrap(self.model, policy, hosts=None)
        self.compressor = tagc.compressor(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=2**-4, momentum=0.5)

    def step(self, rank: int, step: int) -> None:
        """One, with gradients that are kept until the next."""
        self.optimizer.zero_grad()
        self.model((rank, step)).backward()
        self.optimizer.step()

    @property
    def stop(self) -> int:
        """Steps before the checkpoint."""
        return self.compressor.plan().warmup_steps + COMPRESSED

    def save(self, folder: Path) -> None:
        """In both formats."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        state = {"model": weights, "optimizer": moments, "tagc": self.compressor}
        dcp.save(state, checkpoint_id=folder / "dcp")
        self.compressor.save(folder / "files")

    def load(self, folder: Path, form: str) -> None:
        """What was saved, without ``force``; weights and optimizer are in torch's format only."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        state = {"model": weights, "optimizer": moments}
        state |= {"tagc": self.compressor} if form == "dcp" else {}
        dcp.load(state, checkpoint_id=folder / "dcp")
        set_state_dict(
            self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments
        )
        if form == "files":
            self.compressor.load(folder / "files")

    def hashes(self) -> tuple[str, str, str]:
        """SHA-256 of this rank's gradients, weights, and state; counted bytes are not in it."""
        parameters: list[Any] = [p for _, p in self.model.named_parameters()]
        state = {
            name.partition(".rank_")[2].partition(".")[2]: tensor
            for name, tensor in self.compressor.state_dict().items()
        }
        # A gatherer's counters are bytes; a reducer's begin with steps.
        hashed = {
            name: tensor
            for name, tensor in state.items()
            if not (name.startswith("about") or "bytes" in name)
            and not (name.startswith("unit.parameters.") and name.endswith(".counters"))
        }
        counted = {n: hashed.pop(n)[:3] for n in list(hashed) if n.endswith(".counters")}
        return (
            digest(content(p.grad.to_local()) for p in parameters),
            digest(content(p.to_local()) for p in parameters),
            digest(n.encode() + content(t) for n, t in sorted((hashed | counted).items())),
        )


def train(rank: int, policies: list[str], folder: Path) -> None:
    """Train with each policy, and save what a golden file holds."""
    for policy in policies:
        training = Training(policy)
        for step in range(training.stop):
            training.step(rank, step)
        training.save(folder / policy)


def resume(rank: int, policies: list[str], folder: Path, form: str) -> dict[str, str]:
    """Hashes of the step after each checkpoint, by policy."""
    found = {}
    for policy in policies:
        training = Training(policy)
        training.load(folder / policy, form)
        training.step(rank, training.stop)
        found[policy] = " ".join(training.hashes())
    return found

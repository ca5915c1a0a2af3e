"""A training that stops in its middle, for every shipped policy, and the step after that; for sites
the steps until all has been exchanged once more.

The gradient of a weight ``w`` is ``c + w / 2``, with a constant ``c`` of the rank and the step, and
``w`` as it was gathered: no sum in it, and so the same bits on every machine.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

import tagc
from golden.inputs import content, digest, fixed
from support.distributed import run_ranks
from support.small_net import local
from tagc.costs import Link, Speed, auto, speed_key
from tagc.handle.handle import Handle

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
RANKS = 2
FORMATS = ("files", "dcp")
# Steps of a policy after its warm-up, or after two exchanges between sites.
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

    def hashes(self) -> tuple[str, str, str]:
        """SHA-256 of this rank's gradients, weights, and state; counted bytes are not in it."""
        parameters: list[Any] = [p for _, p in self.model.named_parameters()]
        state = {
            name.partition(".rank_")[2].partition(".")[2]: tensor
            for name, tensor in self.handle.state_dict().items()
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
            digest(content(local(p.grad)) for p in parameters),
            digest(content(local(p)) for p in parameters),
            digest(n.encode() + content(t) for n, t in sorted((hashed | counted).items())),
        )


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


def _train(rank: int, folder: Path) -> None:
    for case in CASES:
        training = _training(case)
        for step in range(training.stop):
            training.step(rank, step)
        training.save(folder / case)


def _resume(rank: int, folder: Path, form: str) -> dict[str, str]:
    found = {}
    for case in CASES:
        training = _training(case)
        training.load(folder / case, form)
        for step in range(training.stop, training.stop + training.more):
            training.step(rank, step)
        found[f"{case} | rank {rank}"] = " ".join(training.hashes())
    return found


def resumed(folder: Path, form: str) -> dict[str, str]:
    """Hashes by policy and rank, of what comes after a checkpoint in a format."""
    if not folder.exists():
        run_ranks(_train, RANKS, folder, timeout=240)
    ranks = run_ranks(_resume, RANKS, folder, form, timeout=240)
    return {case: found for of_rank in ranks for case, found in of_rank.items()}

"""``dimensions``: losses and step times with tensor, pipeline and expert parallelism."""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as native_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

import tagc
from examples.text import load_corpus
from tagc.basics.quantities import count
from tagc.policy import Policy

from ..gloo import on_ranks
from ..network.launch import Network, sent_bytes
from ..quality.report import difference
from ..quality.settings import Shape
from ..quality.training import held_out_loss
from ..records import Record, add_output, append, machine, markdown, read
from .model import Block, Net, Size, split_tensors

about = "losses, and times on slow links, with tensor, pipeline and expert parallelism"

STARVED = Size(width=64, layers=2, heads=2, experts=8, best=2, skew=6.0)
_TIMED = 8  # steps, on a link


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    add = parser.add_argument
    add("--layouts", default="pp 2; tp 2; ep 2; pp 2, tp 2", help="ranks by name (%(default)s)")
    add("--methods", default="dense; 8 bits; 4 bits",
        help="dense, bf16 (between stages), exact (as bf16, its exponents packed), '8 bits', "
        "'4 bits, stochastic', or a policy",
    )  # fmt: skip
    add("--starved", action="store_true", help="8 experts, of which the router favours the first")
    add("--seeds", type=count, default=3, help="pairs of each line")
    add("--steps", type=count, default=600, help="of a run whose loss is measured")
    add("--rate", help="measure steps on links of this rate instead of losses: 100mbit; needs root")
    add_output(parser, "runs/dimensions.jsonl")


def run(args: argparse.Namespace) -> list[Record]:
    """Make the runs that are missing."""
    kind = {"suite": "dimensions"} | ({"link": args.rate} if args.rate else {})
    for job in _jobs(args):
        about = kind | job.key
        known = read([args.json]) if args.json.exists() else []
        if any(about.items() <= record.items() for record in known):
            continue
        if args.rate:
            with Network(job.ranks, rate=args.rate) as network:
                record = network.on_ranks(train, 0, job)
        else:
            record = on_ranks(train, job.ranks, job)[0]
        append(args.json, machine() | about | record)
        found = f"{record['loss']:.4f}" if "loss" in record else f"{record['seconds']:.3f} s"
        print(f"{job.key['layout']}, {job.method}, seed {job.seed}: {found}", file=sys.stderr)
    return read([args.json])


def _jobs(args: argparse.Namespace) -> Iterator[Job]:
    for seed in range(1 if args.rate else args.seeds):
        for text in args.layouts.split(";"):
            parts = (part.split() for part in text.split(","))
            layout = {name: int(ranks) for name, ranks in parts}
            if args.starved and "ep" not in layout:
                raise ValueError(f"--starved: layout {text.strip()!r} has no dimension 'ep'")
            size = STARVED if args.starved else Size(experts=4 if "ep" in layout else 0)
            about = {"layout": layout, "steps": args.steps, "seed": seed, "size": size}
            for method in args.methods.split(";"):
                yield Job(method=method.strip(), timed=_TIMED if args.rate else 0, **about)


def table(records: Sequence[Record]) -> str:
    """The tables, as Markdown."""
    kinds = {"loss": _losses, "expert_shares": _shares, "seconds": _times}
    found = {kind: [r for r in records if kind in r] for kind in kinds}
    return "\n\n".join(kinds[kind](mine) for kind, mine in found.items() if mine)


def _losses(records: Sequence[Record]) -> str:
    found: dict[tuple[str, int, str], dict[int, float]] = {}
    for r in records:
        found.setdefault((r["layout"], r["steps"], r["method"]), {})[r["seed"]] = r["loss"]
    rows = []
    for (layout, steps, method), losses in found.items():
        mean = sum(losses.values()) / len(losses)
        dense = {} if method == "dense" else found.get((layout, steps, "dense"), {})
        to = difference(losses, dense) or ""
        rows.append((layout, steps, method, f"{mean:.4f}", len(losses), to))
    return markdown(("layout", "steps", "activations", "loss", "seeds", "to dense"), rows)


def _shares(records: Sequence[Record]) -> str:
    """Of the tokens, the share that each expert had."""
    rows = [
        (r["layout"], r["method"], r["seed"], i, *(f"{share:.2%}" for share in of_block))
        for r in records
        for i, of_block in enumerate(r["expert_shares"])
    ]
    experts = (f"expert {i}" for i in range(records[0]["experts"]))
    return markdown(("layout", "gradients", "seed", "block", *experts), rows)


def _times(records: Sequence[Record]) -> str:
    bf16 = {(r["layout"], r["link"]): r for r in records if r["method"] == "bf16"}
    head = ("link", "layout", "activations", "s a step", "bf16's time to it")
    rows = []
    for r in records:
        seconds, sent = r["seconds"], r["interface_bytes"]
        beside = bf16.get((r["layout"], r["link"]))
        faster = f"{beside['seconds'] / seconds:.2f}" if beside else ""
        fewer = f"{sent / beside['interface_bytes']:.3f}" if beside else ""
        row = [r["link"], r["layout"], r["method"], f"{seconds:.3f}", faster]
        rows.append([*row, f"{sent / 1e6:.2f}", fewer])
    return markdown((*head, "MB a step", "to bf16"), rows)


_BATCH = 32  # sequences of a step, on all ranks
_MICRO_BATCHES = 4  # of a pipeline's step
_WINDOWS = 2048  # of held-out text
_BF16 = ("bf16", "exact")
"""Methods whose stages send each other bfloat16."""


def policy_of(method: str) -> Any:
    """The policy of a method; None for torch's own groups."""
    if method in ("dense", "bf16"):
        return None
    bits, _, rest = method.partition(" ")
    if method == "exact":
        codec: dict[str, Any] = {"kind": "exact"}
    elif rest in ("bits", "bits, stochastic"):
        codec = {"kind": "quantized", "bits": int(bits), "block": 64}
        codec |= {"rounding": "stochastic"} if "stochastic" in rest else {}
    else:
        return method
    return {
        "schema": 1,
        "gradients": [{"when": {}, "codec": {"kind": "dense"}}],
        "dimensions": {name: {"codec": codec} for name in ("pp", "tp", "ep")},
    }


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train.

    Attributes:
        layout: ranks by dimension, the slowest first: ``pp``, ``dp``, ``ep``, ``tp``.
        method: ``dense`` is torch's own, ``bf16`` the same with stages that send each other
            bfloat16; see :func:`policy_of`.
        timed: steps that are timed, after as many to settle; no loss is measured then.
    """

    layout: Mapping[str, int]
    method: str
    steps: int = 600
    rate: float = 4.5e-3
    seed: int = 0
    size: Size = field(default_factory=Size)
    timed: int = 0

    @property
    def ranks(self) -> int:
        """Of all dimensions."""
        return math.prod(self.layout.values())

    @property
    def key(self) -> Record:
        """What the result depends on, except the machine."""
        layout = " × ".join(f"{name} {n}" for name, n in self.layout.items())
        about = {"layout": layout, "method": self.method, "steps": self.steps, "rate": self.rate}
        # Older records have no such keys.
        new = (("best", 1), ("skew", 0.0))
        size = {k: v for k, v in asdict(self.size).items() if (k, v) not in new}
        return about | {"seed": self.seed, "timed": self.timed, **size}


class _InBfloat16(nn.Module):
    """A stage that sends and receives bfloat16, and computes in float32."""

    def __init__(self, stage: Net) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        out = self.stage(x.float() if x.is_floating_point() else x)
        return out if self.stage.head is not None else out.bfloat16()


class Trainer:
    """A model split as the job says; all layouts start from the same weights, and see the same
    tokens in a step."""

    def __init__(self, job: Job) -> None:
        self._job, self._corpus = job, load_corpus()
        self._policy = policy_of(job.method)
        names, sizes = tuple(job.layout), tuple(job.layout.values())
        of_data = "dp" in names and not Policy.load(self._policy or "dense").dimensions
        self.mesh: DeviceMesh = (
            native_mesh("cpu", sizes, mesh_dim_names=names)
            if self._policy is None or of_data
            else tagc.init_device_mesh("cpu", sizes, mesh_dim_names=names, policy=self._policy)
        )
        torch.manual_seed(job.seed)
        self.net = Net(job.size)
        if "pp" in names:
            self.net.keep_stage(self._place("pp"), job.layout["pp"])
        blocks: Any = list(self.net.blocks.values())
        if "tp" in names:
            split_tensors(blocks, self.mesh["tp"])
        if "ep" in names:
            for block in blocks:
                block.mlp.split(self.mesh.get_group("ep"))
            ranks = dist.get_process_group_ranks(self.mesh.get_group("ep"))
            self._data: Any = dist.new_group(ranks, use_local_synchronization=True)
        self._shard(blocks)
        self._pipeline: Any = None
        if "pp" in names:
            module = _InBfloat16(self.net) if job.method in _BF16 else self.net
            group, cpu = self.mesh.get_group("pp"), torch.device("cpu")
            stage = PipelineStage(module, self._place("pp"), job.layout["pp"], cpu, group=group)
            self._pipeline = Schedule1F1B(stage, _MICRO_BATCHES, loss_fn=_loss)
        self.optimizer = torch.optim.AdamW(
            list(self.net.parameters()), lr=job.rate, betas=(0.9, 0.95), foreach=False
        )
        if self._policy is not None and "dp" in names:
            tagc.compressor(self.net).keep_rates(self.optimizer)
        self.steps = 0

    def _place(self, dimension: str) -> int:
        return self.mesh.get_local_rank(dimension) if dimension in self._job.layout else 0

    def _shard(self, blocks: list[Block]) -> None:
        if "dp" not in self._job.layout:
            if self._policy is not None:
                tagc.compress_activations(self.net)
            return
        mesh = self.mesh["dp"]
        if "ep" in self._job.layout:
            for block in blocks:
                experts: Any = block.mlp.experts
                fully_shard(experts, mesh=mesh)
            mesh = self.mesh["dp", "ep"]._flatten()
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        if self._policy is not None:
            tagc.wrap(self.net, self._policy)

    def step(self) -> None:
        """One optimizer step; the rate falls to zero over the job's steps."""
        job = self._job
        for group in self.optimizer.param_groups:
            group["lr"] = job.rate * (1 - self.steps / job.steps)
        parts = job.layout.get("dp", 1) * job.layout.get("ep", 1)
        part = self._place("dp") * job.layout.get("ep", 1) + self._place("ep")
        batch = self._corpus.batch(_BATCH, job.size.context, seed=job.seed, step=self.steps, rank=0)
        tokens, targets = (t.chunk(parts)[part] for t in batch)
        if self._pipeline is None:
            _loss(self.net(tokens), targets).backward()
        else:
            inputs = () if self.net.embed is None else (tokens,)
            self._pipeline.step(*inputs, target=None if self.net.head is None else targets)
        if "ep" in job.layout:
            self._average_over_experts()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def _average_over_experts(self) -> None:
        """Each rank has its own tokens, and every expert the tokens of all ranks."""
        for name, p in self.net.named_parameters():
            assert p.grad is not None
            if ".experts." not in name:
                if "dp" in self._job.layout:
                    continue  # FSDP has averaged it over all ranks
                dist.all_reduce(p.grad, group=self._data)
            p.grad /= self._data.size()

    def shares(self) -> list[list[float]]:
        """For each block, the share of each expert of all tokens' choices so far."""
        blocks: Any = self.net.blocks.values()
        tokens = torch.stack([block.mlp.tokens for block in blocks])  # [blocks, experts]
        dist.all_reduce(tokens)
        shares = (tokens / tokens.sum(1, keepdim=True)).tolist()
        return [[round(share, 5) for share in of_block] for of_block in shares]

    def weights(self, *, gradients: bool = False) -> dict[str, Tensor]:
        """All parameters of the whole model, or their gradients, on all ranks, by name."""
        mine = {}
        for name, p in self.net.named_parameters():
            t: Any = p.grad if gradients else p
            whole = t.full_tensor() if isinstance(t, DTensor) else t
            mine[self._whole_name(name)] = whole.detach().clone()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return {name: t for rank in everyone for name, t in rank.items()}

    def _whole_name(self, name: str) -> str:
        """Of a parameter of this rank, in the model that has all experts."""
        block, found, rest = name.partition(".mlp.experts.")
        if not found:
            return name
        i, _, rest = rest.partition(".")
        mlp: Any = self.net.get_submodule(f"{block}.mlp")
        return f"{block}.mlp.experts.{mlp.first + int(i)}.{rest}"

    def validate(self) -> float:
        """Held-out loss of the whole model, in nats per token, with exact activations."""
        net = Net(self._job.size)
        net.load_state_dict(self.weights())
        shape = Shape(context=self._job.size.context, vocabulary=self._job.size.vocab)
        return held_out_loss(lambda x, y: _loss(net(x), y), self._corpus, _WINDOWS, shape)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def train(rank: int, job: Job) -> Record:
    """Train as one of the job's ranks; on hosts of a network, if the job is timed.

    Returns:
        ``loss``, and ``expert_shares`` if the router has favourites; or for a timed job
        ``seconds`` of a step and ``interface_bytes`` of the busiest rank.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a small model
        trainer = Trainer(job)
    if not job.timed:
        for _ in range(job.steps):
            trainer.step()
        shares = {"expert_shares": trainer.shares()} if job.size.skew else {}
        return {"loss": trainer.validate(), **shares}
    for _ in range(job.timed):
        trainer.step()
    dist.barrier()
    before, began = sent_bytes(), time.perf_counter()
    for _ in range(job.timed):
        trainer.step()
    dist.barrier()
    seconds = (time.perf_counter() - began) / job.timed
    mine = torch.tensor([(sent_bytes() - before) / job.timed], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return {"seconds": seconds, "interface_bytes": mine.item()}

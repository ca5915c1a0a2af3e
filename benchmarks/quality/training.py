"""One training run under FSDP2, as each of its ranks does it."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tagc
from examples.gpt import GPT, GPTConfig
from examples.text import load_corpus
from tagc.policy.roles import layer_of

from ..gloo import clip, with_powersgd
from ..llama import Llama
from ..records import Record
from ..tokens import documentation, in_words
from .settings import BYTES, Recipe, Run, Shape

_HELD_OUT = 256
_CHUNK = 256
_CPU = torch.device("cpu")
_NORMS = 600
# As its documentation advises, PowerSGD starts late: after a tenth of the shortest runs.
_POWERSGD_FROM = 60


def train(
    run: Run,
    device: torch.device = _CPU,
    corpus: Any = None,
    report: Callable[[int, float, float], None] | None = None,
    make: Callable[[Run], nn.Module] | None = None,
    validate: Callable[..., float] | None = None,
) -> Record:
    """Train and validate; the process is a rank of a group of ``run.shape.ranks``.

    Args:
        corpus: text with tokens of the model's vocabulary; the standard library without.
        report: called after each evaluation with the step, the loss and the seconds of training.
        make: another model than :func:`make_model`'s, which makes a loss of two tensors of the
            corpus's batch; with ``validate`` in place of :func:`held_out_loss`.

    Returns:
        ``loss``: nats per token of held-out text, the mean of the recipe's last evaluations; None
        if it diverged. ``losses``: by step, on fewer windows except for the last ones. ``bits``:
        of the messages, per compressed element of the gradient; ``parameter_bits``: of the
        messages about parameters, where they are compressed. ``norms``: of the gradient, in each
        step; in longer runs in about 600 of them. ``step_ms``.
    """
    shape, recipe = run.shape, run.recipe
    rank, corpus = dist.get_rank(), corpus or _corpus(shape.family, shape.vocabulary)
    model = distributed((make or make_model)(run), run, device)
    validate = validate or held_out_loss
    compressor = None
    # A model this small may cost more compressed, and Muon and Lion are measured with 1 bit, too.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if run.method.policy is not None and not run.method.in_sites:
            model = tagc.wrap(model, run.method.policy)
            compressor = tagc.compressor(model)
        optimizers = make_optimizers(model, recipe, run.rate)
        if recipe.kept:
            assert compressor is not None, "dense rates need no keeping"
            for optimizer in optimizers:
                compressor.keep_rates(optimizer)
    sites = tagc.sites(model, optimizers, run.method.policy or {}) if run.method.in_sites else None
    last = recipe.last_evaluations(run.steps)
    losses: dict[int, float] = {}
    norms: list[float] = []
    seconds, done, often = 0.0, 0, recipe.evaluations
    for step in range(run.steps):
        started = time.perf_counter()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = run.rate * factor(step, run.steps, recipe.floor)
        batch = corpus.batch(shape.batch, shape.context, seed=run.seed, step=step, rank=rank)
        model(*(part.to(device) for part in batch)).backward()
        if compressor is not None and recipe.kept and recipe.clip is not None:
            norm = compressor.clip_grad_norm_(recipe.clip)
        else:
            norm = clip(model.parameters(), math.inf if recipe.clip is None else recipe.clip)
        norms.append(norm.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seconds += time.perf_counter() - started
        done = step + 1
        if done == run.steps and sites is not None:
            sites.exchange()
        if done in last or done * often // run.steps != step * often // run.steps:
            windows = recipe.windows if done in last else min(_HELD_OUT, recipe.windows)
            losses[done] = validate(model, corpus, windows, shape, device)
            if report is not None:
                report(done, losses[done], seconds)
            if not math.isfinite(losses[done]):  # on all ranks: it is their sum
                break
    ended = [losses[step] for step in last if step in losses]
    loss = math.fsum(ended) / len(ended) if done == run.steps else math.inf
    every = max(1, run.steps // _NORMS)
    record: Record = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bits": 32.0,
        "loss": loss if math.isfinite(loss) else None,
        "losses": {str(s): round(x, 5) for s, x in losses.items() if math.isfinite(x)},
        "norms": [float(f"{n:.4g}") for n in norms[::every] if math.isfinite(n)],
        "step_ms": round(1e3 * seconds / done, 1),
    }
    handle = compressor or sites
    if handle is not None:
        plan = handle.plan()
        record["bits"] = _bits(plan.units) or 32.0
        if bits := _bits(getattr(plan, "parameters", ())):
            record["parameter_bits"] = bits
        handle.remove()
    if run.method.powersgd is not None:
        shapes = [p.shape for p in model.parameters() if p.ndim == 2]
        both = sum(n + m for n, m in shapes)  # the two factors of each matrix
        record["bits"] = 32 * run.method.powersgd * both / sum(n * m for n, m in shapes)
    return record


def make_model(run: Run) -> nn.Module:
    """The whole model, with the same weights on all ranks."""
    shape = run.shape
    torch.manual_seed(run.seed)
    sizes = {name: getattr(shape, name) for name in ("width", "layers", "heads")}
    if shape.family == "llama":
        return Llama(vocabulary=shape.vocabulary, inner=3 * shape.width, **sizes)
    model = GPT(GPTConfig(vocab=shape.vocabulary, context=shape.context, **sizes))
    if shape.tied:
        for name, p in model.named_parameters():
            if p.ndim >= 2:
                last = name.endswith("c_proj.weight")
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * shape.layers) if last else 1))
        model.lm_head.weight = model.transformer.wte.weight  # pyright: ignore
    return model


def distributed(model: nn.Module, run: Run, device: torch.device = _CPU) -> Any:
    """The model sharded block by block, or replicated by DDP."""
    method = run.method
    if method.powersgd is not None:
        return with_powersgd(model, rank=method.powersgd, first=_POWERSGD_FROM)
    if method.ddp:
        return DistributedDataParallel(model)
    if method.in_sites:
        return model
    how: dict[str, Any] = {}
    if run.recipe.half:
        reduced = torch.bfloat16 if run.recipe.half_reduced else torch.float32
        how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduced)
    if device != _CPU:
        # By itself FSDP would make a group of NCCL beside one of gloo.
        world = dist.group.WORLD
        assert world is not None
        how["mesh"] = DeviceMesh.from_group(world, device.type)
    model = model.to(device)
    for blocks in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
        for block in blocks:
            fully_shard(block, **how)
    return fully_shard(model, **how)


def _bits(units: Any) -> float:
    """Of the messages, per compressed element; 0 where nothing is compressed."""
    segments = [s for unit in units for s in unit.compressed]
    columns = sum(s.columns for s in segments)
    return 32 * sum(s.codec.words + s.codec.cells for s in segments) / columns if columns else 0.0


@torch.no_grad()
def held_out_loss(
    model: Any, corpus: Any, windows: int, shape: Shape, device: torch.device = _CPU
) -> float:
    """Mean loss over all ranks' shares of the windows."""
    ranks = dist.get_world_size()
    batch = corpus.held_out(windows, shape.context, rank=dist.get_rank(), ranks=ranks)
    chunk = max(shape.batch, _CHUNK * BYTES // shape.vocabulary)  # logits take memory
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tokens, targets in zip(*(t.to(device).split(chunk) for t in batch), strict=True):
        total += model(tokens, targets).double() * len(tokens)
    total /= len(batch[0]) * ranks
    dist.all_reduce(total)
    return total.item()


@cache
def _corpus(family: str, vocabulary: int) -> Any:
    corpus = documentation() if family == "llama" else load_corpus()
    return corpus if vocabulary == BYTES else in_words(corpus, vocabulary)


def make_optimizers(model: nn.Module, recipe: Recipe, rate: float) -> list[torch.optim.Optimizer]:
    """The recipe's optimizer; a second one where Muon takes only the matrices of the blocks."""
    named = dict(model.named_parameters())
    betas = (0.9, recipe.beta2)
    if recipe.optimizer == "adamw":
        fused = next(iter(named.values())).is_cuda or None
        return [torch.optim.AdamW(_groups(named.values()), lr=rate, betas=betas, fused=fused)]
    if recipe.optimizer == "muon":
        hidden = {n: p for n, p in named.items() if layer_of(n) is not None and p.ndim == 2}
        rest = [p for n, p in named.items() if n not in hidden]
        muon = torch.optim.Muon(
            [*hidden.values()], lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        )
        return [muon, torch.optim.AdamW(_groups(rest), lr=rate, betas=betas)]
    if recipe.optimizer == "sgd":
        # Rates are larger than Adam's, so the decay that they multiply is smaller.
        groups = _groups(named.values(), decay=0.1 * 3e-4)
        return [torch.optim.SGD(groups, lr=rate, momentum=0.9)]
    assert recipe.optimizer == "lion"
    return [Lion(_groups(named.values()), lr=rate)]


def _groups(parameters: Iterable[nn.Parameter], decay: float = 0.1) -> list[dict[str, Any]]:
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def factor(step: int, steps: int, floor: float) -> float:
    """The rate's share in a step: a tenth of the steps to warm up, then a cosine to ``floor``."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return floor + (1 - floor) / 2 * (1 + math.cos(math.pi * progress))


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675, algorithm 2): the sign of an interpolated momentum."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step."""
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum: Tensor = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(momentum.lerp(p.grad, 1 - first).sign_(), alpha=group["lr"])
                momentum.lerp_(p.grad, 1 - second)

"""What tagc was handed, what all ranks owe a shard, and how much of both may round away."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import tagc
from support.conservation import for_shards, laid_out, planned
from support.launching import launch
from tagc.codecs.matrix import MatrixPlan
from tagc.collect import UnitReducer
from tagc.ops import Ops
from tagc.ops.launches import QuantizeAndPut, QuantizeMatrix
from tagc.ops.torch_operators import Expand
from tagc.plan.part import Part

from .apis import Api
from .option import F16, F32, F64, Dtype, Option, two_by_two

Divisors = Callable[[int], tuple[float, float]]
_QUANTIZE: tuple[Any, ...] = QuantizeMatrix, QuantizeAndPut


@contextmanager
def recorded() -> Iterator[dict[int, Tensor]]:
    """Magnitudes of what every reducer was handed, by its identity. Enter it before wrapping.

    Codec ``matrix`` has no code for 0, so what it sends may be more than what there was, and counts
    as well.
    """
    amounts: dict[int, Tensor] = {}
    reduce_, bound_by = UnitReducer.reduce, {kind: kind.bound for kind in _QUANTIZE}
    sent: list[Tensor] = []

    def add(self: UnitReducer, size: Tensor) -> None:
        amounts[id(self)] = amounts.get(id(self), torch.zeros_like(size)) + size

    def reduce(self: UnitReducer, out: Tensor, inp: Tensor, *how: Any, reached: Any = None) -> None:
        size = inp.view(self.plan.rows, -1).double().abs()
        if reached is not None:
            part = Part(self.plan, frozenset(reached))
            whole = size.new_empty(len(size), self.plan.columns)
            launch(Expand(part.runs), size, whole)
            size = whole
        if self.plan.info.flat is not None:
            # FSDP1 reduces the gradients of frozen parameters, too, and then drops them.
            size *= planned(self.plan)
        sent.clear()
        reduce_(self, out, inp, *how, reached=reached)
        add(self, size)
        matrices = [s for s in self.plan.segments if isinstance(s.codec, MatrixPlan)]
        if matrices and sent:
            # After slices, encoded for every owner at once, come their sums.
            whole = self.plan.shots is None
            of_segments = torch.cat([one for one in sent if whole or len(one) > 1], 1)
            widths = [self.residuals[s.start].shape[1] for s in matrices]
            pieces = of_segments.split(widths, 1)
            found = {s.start: piece for s, piece in zip(matrices, pieces, strict=True)}
            add(self, for_shards(self.plan, laid_out(self.plan, found)))

    def quantize(self: Any, ops: Ops, own: int) -> Callable[..., object]:
        run = bound_by[type(self)](self, ops, own)
        if isinstance(self, QuantizeAndPut) and not isinstance(self.quantize, QuantizeMatrix):
            return run

        def noted(x: Tensor, residual: Tensor | None, *more: Tensor | None) -> None:
            before = x.double() + (0 if residual is None else residual)
            run(x, residual, *more)
            sent.append((before - (0 if residual is None else residual)).abs())

        return noted

    with (
        patch.object(UnitReducer, "reduce", reduce),
        patch.object(QuantizeMatrix, "bound", quantize),
        patch.object(QuantizeAndPut, "bound", quantize),
    ):
        yield amounts


def reduction(api: Api, option: Option, dtype: Dtype) -> Divisors:
    """By what the sum over so many ranks is divided: in the reduction, and by FSDP after it."""

    def divisors(ranks: int) -> tuple[float, float]:
        if api.averages:
            return ranks, 1
        if dtype.reduced != F16:
            return (1, option.divides(ranks)) if option.sums else (ranks, 1)
        # FSDP divides a part of it before it sums, where float16 might overflow.
        total, before = option.divides(ranks) if option.sums else ranks, 1
        while total % before == 0 and total / before > before:
            before *= 2
        return 1, total / before

    return divisors


def owes(wrapped: Any, how: Divisors) -> list[Tensor]:
    """What all ranks together owe this rank's shards, in the units of the gradient."""
    compressor = tagc.compressor(wrapped)
    held = {}
    for reducer in (*compressor.reducers, *compressor.replica_reducers):
        rows = for_shards(reducer.plan, laid_out(reducer.plan, reducer.residuals))
        if reducer.plan.shots is not None:  # an owner of a slice owes the sum or the average
            W = reducer.plan.info.world_size
            divisor = how(W)[0] if reducer in compressor.reducers else W
            slice_ = dist.get_rank() // reducer.plan.info.ranks_per_host
            own = laid_out(reducer.plan, reducer.owner_residuals, row=slice_)
            rows += divisor * for_shards(reducer.plan, own)
        held[id(reducer)] = rows
    return spread(wrapped, how, held)


def spread(wrapped: Any, how: Divisors, rows: Mapping[int, Tensor]) -> list[Tensor]:
    """Rows ``[W, S]`` that every rank has for every shard, as they add up in the gradients of
    this rank's shards ``[S]``."""
    compressor = tagc.compressor(wrapped)
    found = []
    for i, reducer in enumerate(compressor.reducers):
        group, W = compressor.units[i].group, reducer.plan.info.world_size
        inside, after = how(W)
        shape = (reducer.plan.rows, reducer.plan.buffer_columns)
        total = rows.get(id(reducer), torch.zeros(shape, dtype=torch.float64)).clone()
        dist.all_reduce(total, group=group)
        everything = reducer.plan.all_reduced
        mine = (total.flatten() if everything else total[group.rank()]) / inside
        if compressor.replica_reducers:
            replicas = two_by_two()["replicate"].get_group()
            average = compressor.replica_reducers[i]
            mine += rows.get(id(average), torch.zeros(1, shape[1]))[0]
            dist.all_reduce(mine, group=replicas)
            mine /= replicas.size()
        found.append(mine / after)
    return found


def bound(ranks: int, reductions: int, dtype: Dtype) -> float:
    """Roundings of an element, relative to the sum of the magnitudes that went in.

    A reduction adds the residual and rounds what is left of it (2), adds up what the ranks send
    (as many, each at most twice what is there, since a code is at most twice its element), divides
    and converts (2). Natively the ranks' gradients are added up, divided, converted. What is there
    in any of the reductions is at most all that came in until then.

    FSDP1 divides before the sum, too, by a power of two: exactly, but for what `tiny` allows, as
    long as a gradient is none of the subnormal float32 or bfloat16 numbers. So are 1.5 and 2.5,
    by which it divides afterwards. Adding up shards is one more rounding for each (2): of
    4 R + 8 roundings that are allowed 3 R + 8 can happen.
    """
    final = torch.float32 if dtype.model == F64 else dtype.model
    unit = max(torch.finfo(t).eps / 2 for t in (dtype.reduced, final, F32))
    return 2 * (2 * ranks + 4) * reductions * unit


def tiny(dtype: Dtype) -> float:
    """Where numbers have no more bits to lose relatively."""
    return 64 * 2.0**-24 if dtype.reduced == F16 else 0.0

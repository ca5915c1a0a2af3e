"""The units of a model, from shapes alone, without weights or processes.

Units are those that FSDP2 makes if ``fully_shard`` is applied to every transformer block and then
to the model: each block is a unit, and the root holds the rest. Blocks are the children of every
outermost ``nn.ModuleList`` that has at least two children, all of one class. In a list of names, a
block is an outermost prefix that ends in a number, if at least two differ only in that number. The
root keeps its parameters until backward; blocks gather theirs twice a step. Or units are those that
:mod:`tagc.attach.ddp` makes, whatever the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tagc.attach.ddp import planned_units
from tagc.plan import UnitInfo, UnitParam


class ModelError(ValueError):
    """The input does not describe a model."""


MAX_PARAMETERS = 10**15
"""Most elements that a model may have. The largest known models have a thousandth of this."""
MAX_TENSORS = 200_000
_LONGEST_NAME = 400


@dataclass(frozen=True, kw_only=True)
class ParamShape:
    """A parameter, before sharding; ``part`` is the shape of this rank's part, if tensor
    parallelism divides it."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    part: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    params: tuple[ParamShape, ...]
    blocks: tuple[str, ...]
    source: str = ""  # what was read, for users

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)

    @property
    def data(self) -> dict[str, object]:
        blocks, source = len(self.blocks), self.source or None
        return {"parameters": self.numel, "blocks": blocks, "source": source}

    @classmethod
    def of(cls, model: nn.Module | Mapping[str, Sequence[int]], source: str = "") -> ModelShapes:
        """Take the shapes of a module (on any device), or shapes by name. Raises ModelError if a
        name or a size exceeds what any model has."""
        if isinstance(model, nn.Module):
            # What fully_shard cut is planned whole: for any number of ranks.
            parts = not any(isinstance(module, FSDPModule) for module in model.modules())
            params = [
                ParamShape(
                    name=name,
                    shape=tuple(p.shape),
                    trainable=p.requires_grad,
                    part=tuple(p.to_local().shape) if isinstance(p, DTensor) and parts else None,
                )
                for name, p in model.named_parameters()
            ]
            blocks = _blocks(model)
        else:
            params = [ParamShape(name=name, shape=tuple(shape)) for name, shape in model.items()]
            blocks = _numbered([*model])
        _check_sizes(params, source)
        return cls(params=tuple(params), blocks=tuple(blocks), source=source)

    def units(
        self,
        world_size: int,
        dtype: torch.dtype,
        parameter_dtype: torch.dtype,
        *,
        ranks_per_host: int = 1,
    ) -> tuple[list[UnitInfo], list[UnitInfo]]:
        """The reduce-scatter of gradients of ``dtype`` and the all-gather of parameters of
        ``parameter_dtype`` of every unit, in the same order, the root first."""
        held: dict[str, list[UnitParam]] = {"": []} | {block: [] for block in self.blocks}
        for param in self.params:
            held[_outermost(param.name, held)].append(_sharded(param, world_size))
        gathers = [
            UnitInfo(
                name=name,
                params=tuple(params),
                world_size=world_size,
                dtype=parameter_dtype,
                per_step=2 if name else 1,
                ranks_per_host=ranks_per_host,
            )
            for name, params in held.items()
            if params
        ]
        reduces = [
            replace(g, params=tuple(p for p in g.params if not p.frozen), dtype=dtype, per_step=1)
            for g in gathers
        ]
        return reduces, gathers

    def replicated_units(
        self, world_size: int, dtype: torch.dtype, *, ranks_per_host: int = 1
    ) -> list[UnitInfo]:
        """The all-reduce of every unit if each rank has the whole model, of ``dtype``, in DDP."""
        named = (
            (p.name, nn.Parameter(torch.empty(p.shape, dtype=dtype, device="meta"), p.trainable))
            for p in self.params
        )
        return planned_units(named, world_size, ranks_per_host)


def _check_sizes(params: Sequence[ParamShape], source: str) -> None:
    where, total = source or "the model", 0
    if len(params) > MAX_TENSORS:
        raise ModelError(f"{where}: {len(params):,} parameters, more than {MAX_TENSORS:,} tensors")
    for param in params:
        if not 0 < len(param.name) <= _LONGEST_NAME or not param.name.isprintable():
            raise ModelError(
                f"{where}: {param.name!r:.80} is not a parameter name: names have 1 to "
                f"{_LONGEST_NAME} printable characters"
            )
        # Check sizes before multiplying: a shape may have thousands, of thousands of digits each.
        sized = all(0 <= size <= MAX_PARAMETERS for size in param.shape) and len(param.shape) <= 16
        total += param.numel if sized else 0
        if not sized or total > MAX_PARAMETERS:
            raise ModelError(
                f"{where}: with {param.name!r:.80} it has more than {MAX_PARAMETERS:.0e} elements "
                "or 16 dimensions, so it is not a model"
            )


def _sharded(param: ParamShape, world_size: int) -> UnitParam:
    # FSDP splits the first dimension, and pads it to a multiple of the ranks.
    first, *rest = (param.part or param.shape) or (1,)
    local = (-(-first // world_size), *rest)
    return UnitParam(
        name=param.name,
        shape=param.shape,
        columns=math.prod(local),
        local=local,
        frozen=not param.trainable,
    )


def _blocks(model: nn.Module) -> list[str]:
    blocks: dict[str, None] = {}
    for name, module in model.named_modules():
        if _outermost(name, blocks):
            continue
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            children = list(module.named_children())
            if len({type(child) for _, child in children}) == 1:
                names = [f"{name}.{child}" if name else child for child, _ in children]
                blocks |= dict.fromkeys(names)
    return [*blocks]


def _outermost(name: str, blocks: Container[str]) -> str:
    """The outermost block that holds the module or parameter ``name``; empty if none does."""
    at = name.find(".")
    while at >= 0:
        if name[:at] in blocks:
            return name[:at]
        at = name.find(".", at + 1)
    return ""


def _numbered(names: Sequence[str]) -> list[str]:
    found: dict[str, dict[str, None]] = {}
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
        if at is not None:
            found.setdefault(".".join(parts[:at]), {})[".".join(parts[: at + 1])] = None
    return [block for blocks in found.values() if len(blocks) > 1 for block in blocks]


# In published decoder-only models of 1e9 to 1e11 parameters, width / layers is between 64 and 150.
_ASPECT = 120
_LEAST = 100_000


def synthetic(numel: int) -> ModelShapes:
    """A Llama-like decoder of about ``numel`` parameters.

    The MLP is gated and 8/3 as wide as the model. The vocabulary is 32000, or less in small models.
    The head is not tied. The MLP's size absorbs the rounding of width and layers, so the total is
    within 3% of ``numel``.

    Raises:
        ModelError: if ``numel`` is too small for a transformer, or more than any model has.
    """
    if numel > MAX_PARAMETERS // 2:  # the result may be a little larger
        raise ModelError(f"{numel:.3g} parameters are more than {MAX_PARAMETERS / 2:.0e}")
    if numel < _LEAST:
        raise ModelError(
            f"{numel} parameters are too few for a transformer: give {_LEAST:,} or more"
        )
    width = (numel * _ASPECT / 12) ** (1 / 3)
    step = 128 if width > 1024 else 32 if width > 128 else 8
    width = max(step, round(width / step) * step)
    vocabulary = min(32000, max(128, numel // (8 * width) // 32 * 32))
    rest = numel - 2 * vocabulary * width
    layers = max(2, round(rest / (12 * width**2)))
    inner = max(step, round((rest / layers - 4 * width**2) / (3 * width * step)) * step)
    block = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"}
    block |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    block |= {"mlp.down_proj": (width, inner)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for i in range(layers):
        matrices = {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
        norms = (f"model.layers.{i}.{n}_layernorm.weight" for n in ("input", "post_attention"))
        shapes |= matrices | dict.fromkeys(norms, (width,))
    return ModelShapes.of(
        shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}
    )

"""The units of a model that is nowhere yet: from shapes alone, without weights or processes.

Units are what FSDP2 makes of ``fully_shard`` on every transformer block, and then on the model:
each block is one, and the root holds the rest. Blocks are the children of every outermost
``nn.ModuleList`` whose children are of one class and at least two; of a list of names, those with a
number in the name, outermost, of which there are at least two. The root keeps its parameters until
backward, blocks gather theirs twice a step.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tagc.plan import UnitInfo, UnitParam


class ModelError(ValueError):
    """No model can be made of what was given."""


MAX_PARAMETERS = 10**15
"""Elements of the largest model that is planned for; known ones have a thousandth of it."""
MAX_TENSORS = 200_000
MAX_LAYERS = 1_000
_LONGEST_NAME = 400


def check_name(name: str, where: str) -> None:
    """Refuse what no module's parameter is called.

    Args:
        where: for the message.

    Raises:
        ModelError: if the name is empty, has control characters or parts of characters, or is
            longer than any.
    """
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise ModelError(
            f"{where}: {name!r:.80} is no name of a parameter, which has 1 to {_LONGEST_NAME} "
            "characters that can be printed"
        )


@dataclass(frozen=True, kw_only=True)
class ParamShape:
    """A parameter: ``shape`` is the whole one, before sharding."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """A model's parameters and the names of its blocks.

    Attributes:
        source: what was read, for people; empty if that needs no saying.
    """

    params: tuple[ParamShape, ...]
    blocks: tuple[str, ...]
    source: str = ""

    @property
    def numel(self) -> int:
        """Parameters."""
        return sum(p.numel for p in self.params)

    @classmethod
    def of(cls, model: nn.Module | Mapping[str, Sequence[int]], source: str = "") -> ModelShapes:
        """Of a module (on any device) or of shapes by name.

        Raises:
            ModelError: if a name or a size is beyond what any model has.
        """
        if isinstance(model, nn.Module):
            params = [
                ParamShape(name=name, shape=tuple(p.shape), trainable=p.requires_grad)
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
        """Reduce-scatter and all-gather of every unit, in the same order, the root first.

        Args:
            dtype: of the gradients that FSDP reduces.
            parameter_dtype: of the parameters that it gathers.
            ranks_per_host: see :class:`tagc.plan.UnitInfo`.
        """
        held: dict[str, list[ParamShape]] = {"": []} | {block: [] for block in self.blocks}
        for param in self.params:
            held[_outermost(param.name, held)].append(param)
        reduces, gathers = [], []
        for name, params in held.items():
            if params:
                sharded = [_sharded(p, world_size) for p in params]
                trained = [s for s, p in zip(sharded, params, strict=True) if p.trainable]
                common: dict[str, Any] = {
                    "name": name,
                    "world_size": world_size,
                    "ranks_per_host": ranks_per_host,
                }
                reduces.append(UnitInfo(params=tuple(trained), dtype=dtype, **common))
                gathers.append(
                    UnitInfo(
                        params=tuple(sharded),
                        dtype=parameter_dtype,
                        per_step=2 if name else 1,
                        **common,
                    )
                )
        return reduces, gathers


def _check_sizes(params: Sequence[ParamShape], source: str) -> None:
    where, total = source or "the model", 0
    if len(params) > MAX_TENSORS:
        raise ModelError(f"{where}: {len(params):,} parameters, more than {MAX_TENSORS:,} tensors")
    for param in params:
        check_name(param.name, where)
        # Not the product first: a shape may have thousands of sizes of thousands of digits.
        sized = all(0 <= size <= MAX_PARAMETERS for size in param.shape) and len(param.shape) <= 16
        total += param.numel if sized else 0
        if not sized or total > MAX_PARAMETERS:
            raise ModelError(
                f"{where}: with {param.name!r:.80} it has more than {MAX_PARAMETERS:.0e} elements "
                "or 16 dimensions, so it is no model"
            )


def ranks_in_levels(ranks: int, ranks_per_host: int) -> int:
    """How many of a sharding group's ranks add up their gradients before one of them sends: those
    of a host, if the group lies on several whole hosts; else 1."""
    return ranks_per_host if ranks % ranks_per_host == 0 and ranks > ranks_per_host else 1


def _sharded(param: ParamShape, world_size: int) -> UnitParam:
    # FSDP splits the first dimension, and pads what does not divide.
    first, *rest = param.shape or (1,)
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
    """The outermost block that holds what has this name; empty if none does."""
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


# Of the published sizes of decoder-only models between 1e9 and 1e11 parameters, width over layers
# lies between 64 and 150.
_ASPECT = 120
_LEAST = 100_000


def synthetic(numel: int) -> ModelShapes:
    """A Llama-like decoder of about ``numel`` parameters.

    Gated mlp of 8/3 the width, vocabulary of 32000 or less in small models, head not tied. The
    mlp takes up what rounding of width and layers leaves, so the sum is within 3%.

    Raises:
        ModelError: if that is too few for a transformer, or more than any model has.
    """
    if numel > MAX_PARAMETERS // 2:  # what comes out may be a little more
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
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for i in range(layers):
        block = f"model.layers.{i}"
        for name in "qkvo":
            shapes[f"{block}.self_attn.{name}_proj.weight"] = (width, width)
        shapes[f"{block}.mlp.gate_proj.weight"] = (inner, width)
        shapes[f"{block}.mlp.up_proj.weight"] = (inner, width)
        shapes[f"{block}.mlp.down_proj.weight"] = (width, inner)
        shapes[f"{block}.input_layernorm.weight"] = (width,)
        shapes[f"{block}.post_attention_layernorm.weight"] = (width,)
    shapes["model.norm.weight"] = (width,)
    shapes["lm_head.weight"] = (vocabulary, width)
    return ModelShapes.of(shapes)

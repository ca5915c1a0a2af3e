"""The operators whose output is a message: their input, and the contenders on both ends.

A codec is how to write a message and how to add messages up; :mod:`.codecs` has them. Whoever
sends is right if what the message says and the residual are the gradient, and if both have the bits
of the reference's; whoever receives, if the shard has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tagc.ops import Ops, reference

from ..case import Case
from ..registry import Contender, Problem
from .inputs import difference, ours

# Ranks whose messages the owner adds up.
RANKS = 2
_NO_REFERENCE = {"compared": "with nothing: the reference failed"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One destination's segment on the device: ``grad`` and ``residual`` ``[1, n]``, ``x`` ``[n]``
    float32, their sum."""

    grad: Tensor
    residual: Tensor
    x: Tensor


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How a row becomes a message, and messages a shard.

    Attributes:
        words: int32 words of a message.
        send: of an implementation, a residual ``[1, n]`` that it updates, and the message
            ``[1, words]`` that it writes.
        read: of an implementation, messages ``[R, words]`` and the shard ``[n]`` that it writes:
            their sum, divided by ``R``.
        exact: whether a float32 residual has all that the message does not say.
        facts: further entries for the result.
    """

    words: int
    send: Callable[[Ops, Tensor, Tensor], object]
    read: Callable[[Ops, Tensor, Tensor], object]
    exact: bool = True
    facts: dict[str, Any] = field(default_factory=dict)


def make_row(case: Case, device: torch.device, residual: torch.dtype) -> Row:
    """Normal gradients, and a residual half as large."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(dtype: torch.dtype, scale: float) -> Tensor:
        shape = (1, case.numel)
        return torch.randn(shape, generator=generator, device=device).mul_(scale).to(dtype)

    grad, left = normal(case.gradient_dtype, 1.0), normal(residual, 0.5)
    return Row(grad=grad, residual=left, x=grad[0].float() + left[0].float())


def sending(row: Row, codec: Codec) -> Problem:
    """All contenders on one row; each writes a residual and a message of its own.

    The floor is reading gradient and residual and writing the residual and the message.
    """
    ops, note = ours(row.grad.device)
    expected = _new_message(row, codec), torch.empty_like(row.residual)
    size = row.grad.element_size() + 2 * row.residual.element_size()
    return Problem(
        floor_bytes=row.x.numel() * size + 4 * codec.words,
        contenders={
            "reference": lambda: _sender(reference, "eager torch", row, codec, *expected),
            "tagc": lambda: _sender(
                ops, note, row, codec, _new_message(row, codec), row.residual.clone(), expected
            ),
            "clone": lambda: Contender(run=row.grad.clone, note="the gradient"),
        },
        facts=codec.facts,
    )


def receiving(row: Row, codec: Codec) -> Problem:
    """All contenders on the same messages; the shard has the gradient's dtype.

    The floor is reading the messages and writing the shard.
    """
    ops, note = ours(row.grad.device)
    sent = _new_message(row, codec)
    codec.send(reference, row.residual.clone(), sent)
    messages = sent.expand(RANKS, -1).clone()
    expected = torch.full_like(row.grad[0], torch.nan)
    size = row.grad.element_size()
    return Problem(
        floor_bytes=row.x.numel() * size + 4 * RANKS * codec.words,
        contenders={
            "reference": lambda: _receiver(reference, "eager torch", codec, messages, expected),
            "tagc": lambda: _receiver(
                ops, note, codec, messages, torch.empty_like(expected), expected
            ),
            "clone": lambda: Contender(run=row.grad.clone, note="the gradient"),
        },
        facts=codec.facts,
    )


def tolerance(row: Row, residual: Tensor, exact: bool = True) -> Tensor:
    """How far sent plus ``residual`` may be from ``x``, ``[n]``: what their dtypes round."""
    unit = 0.0 if exact else 2.0**-23
    if residual.dtype != torch.float32:
        unit = 2.0**-8
    return (row.x.abs() + residual[0].float().abs()) * unit


def _new_message(row: Row, codec: Codec) -> Tensor:
    """``[1, words]``, all -1, which no codec says of normal gradients."""
    return torch.full((1, codec.words), -1, dtype=torch.int32, device=row.grad.device)


def _sender(
    ops: Ops,
    note: str,
    row: Row,
    codec: Codec,
    message: Tensor,
    residual: Tensor,
    expected: tuple[Tensor, Tensor] | None = None,
) -> Contender:
    details: dict[str, str] = {}

    def check() -> str | None:
        out = torch.empty_like(row.x)
        codec.read(reference, message, out)
        whole = out + residual[0].float()
        allowed = tolerance(row, residual, codec.exact)
        wrong = difference(whole, row.x, allowed, "sent plus residual is not the gradient")
        if wrong or expected is None:
            return wrong
        if (expected[0] == -1).all():
            details.update(_NO_REFERENCE)
            return None
        for name, mine, its in zip(
            ("message", "residual"), (message, residual), expected, strict=True
        ):
            if not torch.equal(mine, its):
                return f"the {name} differs from the reference's"
        return None

    return Contender(
        run=lambda: codec.send(ops, residual, message),
        before=lambda: residual.copy_(row.residual),
        check=check,
        note=note,
        details=details,
    )


def _receiver(
    ops: Ops,
    note: str,
    codec: Codec,
    messages: Tensor,
    out: Tensor,
    expected: Tensor | None = None,
) -> Contender:
    details: dict[str, str] = {}

    def check() -> str | None:
        if expected is None:
            return None
        if expected.isnan().any():
            details.update(_NO_REFERENCE)
            return None
        return None if torch.equal(out, expected) else "the shard differs from the reference's"

    return Contender(
        run=lambda: codec.read(ops, messages, out), check=check, note=note, details=details
    )

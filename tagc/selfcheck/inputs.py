"""What the tensors of a case hold: random numbers, zeros, large ones and what is not finite.

The check before training takes the usual inputs; tests take others, too (:class:`Inputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tagc.ops import Ops, get_ops
from tagc.ops.bitmap import to_bitmap
from tagc.ops.blocks import BlockLayout
from tagc.ops.matrix import MatrixLayout
from tagc.ops.packed import PackedLayout
from tagc.ops.sketch import SketchLayout
from tagc.selfcheck.calls import Call
from tagc.selfcheck.placement import GARBAGE, is_intact
from tagc.selfcheck.small import small_blocks, small_packed, small_sketch

# What gradients have here and there: beyond sums, next to zero, and not finite.
_ROUGH = (torch.nan, torch.inf, -torch.inf, 3.4028234e38, -3.4028234e38, 1e-45, -0.0)
# A threshold that nothing reaches.
_OUT_OF_REACH = 2.0**100


@dataclass(frozen=True)
class Inputs:
    """What is in the tensors of a case.

    Attributes:
        kind: ``usual``, or ``rough`` with magnitudes of all sizes and whatever is not finite, or
            ``ties`` of few different numbers, all finite.
        above: share of a row's groups that reach the threshold; default: a fifth more than fit.
        destinations: rows of an encoding; what depends on them is a row's stride, but for matrices.
        elements: of a row, where no layout says it; default: those of a few programs.
        small: whether layouts are made small, see :mod:`tagc.selfcheck.small`.
        share: part of the gradient that is sent at once, of which the lag is undone.
        seed: other numbers for another one.
    """

    kind: str = "usual"
    above: float | None = None
    destinations: int = 2
    elements: int | None = None
    small: bool = True
    share: float = 0.35
    seed: int = 0


USUAL = Inputs()


@dataclass(frozen=True)
class Case:
    """Arguments of one call.

    Attributes:
        call: with layouts that are small.
        tensors: by argument, on the CPU; those written hold garbage, or what is updated.
        written: names of those.
        scratch: names of those that may hold anything afterwards.
    """

    call: Call
    tensors: dict[str, Tensor | None]
    written: tuple[str, ...]
    scratch: tuple[str, ...] = ()

    def run(self, ops: Ops, place: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """What the operator of ``ops`` returns, and its arguments afterwards, on the CPU.

        Args:
            place: copies a tensor to where it is to be.

        Raises:
            RuntimeError: if the operator wrote beside a tensor.
        """
        placed = {name: None if x is None else place(x) for name, x in self.tensors.items()}
        returned = getattr(ops, self.call.operator)(**placed, **dict(self.call.options))
        results = {name: x for name, x in placed.items() if x is not None}
        for name, x in results.items():
            if not is_intact(x):
                raise RuntimeError(f"it wrote beside {name!r}")
        results |= {f"result {i}": x for i, x in enumerate(returned or ())}
        return {name: x.cpu() for name, x in results.items() if name not in self.scratch}


class Maker:
    """Makes the tensors of one call."""

    def __init__(self, call: Call, inputs: Inputs, generator: torch.Generator) -> None:
        self.call, self.inputs, self._generator = call, inputs, generator
        self.reference = get_ops("cpu", "reference")

    def blocks(self) -> BlockLayout:
        """The layout of the call, made small if it is to be; and so on."""
        layout = self.call.option("layout")
        return small_blocks(layout) if self.inputs.small else layout

    def packed(self) -> PackedLayout:
        layout = self.call.option("layout")
        return small_packed(layout) if self.inputs.small else layout

    def sketch(self, capacity: int) -> tuple[SketchLayout, int]:
        layout = self.call.option("layout")
        return small_sketch(layout, capacity) if self.inputs.small else (layout, capacity)

    def case(
        self, tensors: dict[str, Tensor | None], written: Iterable[str], **options: object
    ) -> Case:
        """A case of the call, with these options instead of its own."""
        merged = tuple((dict(self.call.options) | options).items())
        return Case(replace(self.call, options=merged), tensors, tuple(written))

    def values(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Normal numbers of very different sizes with a few zeros; all finite."""
        x = self._normal(*shape)
        x *= torch.exp(2 * self._normal(*shape[:-1], 1))
        if self.inputs.kind == "rough":
            x *= torch.exp2(120 * self.uniform(*shape) - 60)
        if self.inputs.kind == "ties":
            x = (2 * x).round().clamp(-8, 8) / 2
        x[self.uniform(*shape) < 0.05] = 0
        largest = torch.finfo(dtype).max
        return x.clamp(-largest, largest).to(dtype)

    def matrices(self, D: int, layout: MatrixLayout, dtype: torch.dtype) -> Tensor:
        """Likewise, ``[D, numel]``; rows and columns have sizes of their own."""
        shape = D, layout.count, layout.rows, layout.columns
        x = self.values(*shape, dtype=torch.float32)
        if self.inputs.kind != "ties":
            x *= torch.exp(self._normal(*shape[:2], 1, shape[3]))
        largest = torch.finfo(dtype).max
        return x.flatten(1).clamp(-largest, largest).to(dtype)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float32, device="cpu", generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        """Float32 in ``[0, 1)``."""
        return torch.rand(*shape, dtype=torch.float32, generator=self._generator, device="cpu")

    def optional(self, *shape: int, dtype: torch.dtype | None) -> Tensor | None:
        """:meth:`values`, or None without a dtype."""
        return None if dtype is None else self.values(*shape, dtype=dtype)

    def spoilt(self, x: Tensor) -> Tensor:
        """``x`` ``[R, n]`` with one element of the last row that is not finite, or with what rough
        inputs have, or as it is where all are to be finite."""
        if x.numel() and self.inputs.kind == "usual":
            x[-1, x.shape[-1] // 3] = torch.inf
        if x.numel() and self.inputs.kind == "rough":
            places = (x.numel() * self.uniform(len(_ROUGH))).long()
            x.view(-1)[places] = torch.tensor(_ROUGH, dtype=torch.float32, device="cpu").to(x.dtype)
        return x

    def bits(self, rows: int, groups: int, marked: int) -> Tensor:
        """Bitmaps ``[rows, ...]`` with ``marked`` of ``groups`` bits each."""
        order = self.uniform(rows, groups).argsort(-1)
        return to_bitmap(order < marked)

    def support(self, rows: int, groups: int, marked: int) -> Tensor:
        """Likewise, and the bits past the last group, which mean nothing."""
        bitmap = self.bits(rows, groups, marked)
        if groups % 32:
            bitmap[:, -1] |= torch.tensor(-1 << groups % 32, dtype=torch.int32, device="cpu")
        return bitmap

    def garbage(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """What an output holds before."""
        if dtype.is_floating_point:
            return torch.full(shape, torch.nan, dtype=dtype, device="cpu")
        return torch.full(shape, GARBAGE, dtype=dtype, device="cpu")

    def put(self, case: Case, first: Tensor) -> None:
        """Make ``first`` ``[R]`` the sums of the rows' first gradients and residuals."""
        grad, residual = case.tensors["grad"], case.tensors["residual"]
        assert grad is not None
        grad[:, 0] = first
        if residual is not None:
            residual[:, 0] = 0

    def threshold(self, x: Tensor, share: float, lanes: int) -> Tensor:
        """``[R]``, which about ``share`` of a row's groups of ``lanes`` reach, or the share that
        the inputs ask for."""
        if self.inputs.above is not None:
            share = self.inputs.above
        size = x.float().abs().nan_to_num(0, 0, 0)
        n = size.shape[-1]
        if share == 0:
            return torch.full((len(x),), _OUT_OF_REACH, dtype=torch.float32, device="cpu")
        share /= lanes
        place = max(1, n - round(share * n))
        if not n:
            return torch.ones(len(x), dtype=torch.float32, device="cpu")
        return size.kthvalue(place, -1).values.clamp(min=2.0**-20)

"""Makes the tensors of a case: random numbers, zeros, large and non-finite values.

The check before training uses the usual inputs. Tests also use others (:class:`Inputs`).
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
from tagc.ops.sketch import SketchLayout
from tagc.selfcheck.calls import Call
from tagc.selfcheck.placement import GARBAGE, is_intact
from tagc.selfcheck.small import small_blocks, small_sketch

# Values that a few elements get: too large to add, next to zero, and not finite.
_ROUGH = (torch.nan, torch.inf, -torch.inf, 3.4028234e38, -3.4028234e38, 1e-45, -0.0)
# A threshold that nothing reaches.
_OUT_OF_REACH = 2.0**100


@dataclass(frozen=True)
class Inputs:
    """The inputs of a case.

    Attributes:
        kind: ``usual``; ``rough``, with magnitudes of all sizes and non-finite values; or ``ties``,
            with few different numbers, all finite.
        above: share of a row's groups that reach the threshold; default: a fifth more than fit.
        destinations: rows of an encoding. Except for matrices, they change only a row's stride.
        elements: elements of a row, if no layout gives them; default: enough for a few programs.
        small: whether layouts are made small, see :mod:`tagc.selfcheck.small`.
        share: share of the gradient that a message carries, for the operator that undoes the lag.
        seed: changes the random numbers.
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
        call: the call, with small layouts.
        tensors: its tensors by argument, on the CPU; outputs hold garbage, or values to update.
        written: names of the outputs.
        scratch: names of the tensors that may hold anything after the call.
    """

    call: Call
    tensors: dict[str, Tensor | None]
    written: tuple[str, ...]
    scratch: tuple[str, ...] = ()

    def run(self, ops: Ops, place: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Run the operator of ``ops``. Returns its results and its arguments after the call, on the
        CPU.

        Args:
            place: copies a tensor to its device and placement.

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
        """The layout of the call, made small if the inputs say so."""
        layout = self.call.option("layout")
        return small_blocks(layout) if self.inputs.small else layout

    def sketch(self, capacity: int) -> tuple[SketchLayout, int]:
        """See :meth:`blocks`; the capacity shrinks with the layout."""
        layout = self.call.option("layout")
        return small_sketch(layout, capacity) if self.inputs.small else (layout, capacity)

    def case(
        self, tensors: dict[str, Tensor | None], written: Iterable[str], **options: object
    ) -> Case:
        """A case of the call, with these options instead of its own."""
        merged = tuple((dict(self.call.options) | options).items())
        return Case(replace(self.call, options=merged), tensors, tuple(written))

    def values(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Normal numbers, whose scale differs widely between rows, with a few zeros; all finite."""
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
        """:meth:`values` ``[D, numel]``, whose scale also differs between columns."""
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
        """``x`` ``[R, n]``. Usual inputs get an infinity in the last row, and rough inputs the
        rough values. Ties stay as they are."""
        if x.numel() and self.inputs.kind == "usual":
            x[-1, x.shape[-1] // 3] = torch.inf
        if x.numel() and self.inputs.kind == "rough":
            places = (x.numel() * self.uniform(len(_ROUGH))).long()
            x.view(-1)[places] = torch.tensor(_ROUGH, dtype=torch.float32, device="cpu").to(x.dtype)
        return x

    def bits(self, rows: int, groups: int, marked: int) -> Tensor:
        """Bitmaps ``[rows, ...]`` in which ``marked`` of ``groups`` bits are set."""
        order = self.uniform(rows, groups).argsort(-1)
        return to_bitmap(order < marked)

    def support(self, rows: int, groups: int, marked: int) -> Tensor:
        """:meth:`bits`, with the bits past the last group set, which operators must ignore."""
        bitmap = self.bits(rows, groups, marked)
        if groups % 32:
            bitmap[:, -1] |= torch.tensor(-1 << groups % 32, dtype=torch.int32, device="cpu")
        return bitmap

    def garbage(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """An output's content before the call."""
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
        """Thresholds ``[R]``, which about ``share`` of a row's groups of ``lanes`` reach, or the
        share that the inputs ask for."""
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

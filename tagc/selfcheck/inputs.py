"""Makes the tensors of a case, small ones, and places them in memory as in training.

The check before training uses the usual inputs. Tests also use others (:class:`Inputs`). A model's
layouts are made small, so that the reference takes no time, but the same kernels run: Triton
compiles a kernel anew if a number is a multiple of 16, so the numbers of blocks, rows and words
keep their remainders.

Kernels also differ by whether rows are aligned to 16 bytes. In training, gradients and residuals
are aligned if the parameters' sizes are. Messages lie beside those of other segments at any word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from tagc.ops import Ops, get_ops
from tagc.ops.bitmap import to_bitmap
from tagc.ops.blocks import BlockLayout
from tagc.ops.dense import STAMP_WORDS, DenseLayout, Piece
from tagc.ops.exact import ExactLayout
from tagc.ops.exponents import BLOCK, CHUNK, ExponentLayout
from tagc.ops.matrix import AnyMatrices, Matrices
from tagc.ops.sketch import SketchLayout
from tagc.selfcheck.calls import Call

# Values that a few elements get: too large to add, next to zero, and not finite.
_ROUGH = (torch.nan, torch.inf, -torch.inf, 3.4028234e38, -3.4028234e38, 1e-45, -0.0)
# A threshold that nothing reaches.
_OUT_OF_REACH = 2.0**100
# What outputs hold before a call, and what lies beside rows; NaN for floats.
GARBAGE = 0x5A5A5A5A
# Elements before and after a row that is not aligned to 16 bytes.
_BEFORE, _AFTER = 3, 5
# Blocks, rows and words of a bitmap for a few programs.
_BLOCKS, _ROWS, _WORDS = 5, 16, 70
# From this many columns of all matrices and destinations, kernels process more columns at a time.
_COLUMNS = 67_584
# From this many cells of a partition, kernels pack their facts about a cell; words of a bitmap with
# enough keys for such a table.
_PARTITION, _WORDS_OF_LARGE = 65_600, 1000


@dataclass(frozen=True)
class Inputs:
    """The inputs of a case. They are ``usual``, with an infinity; ``finite``; ``rough``, with
    magnitudes of all sizes and non-finite values; or ``ties``, with few different numbers, all
    finite."""

    kind: str = "usual"
    above: float | None = None  # share of a row's groups that reach the threshold
    destinations: int = 2  # rows of an encoding; except for matrices, only a row's stride
    elements: int | None = None  # of a row, if no layout gives them
    small: bool = True  # whether layouts are made small
    seed: int = 0


USUAL = Inputs()


@dataclass(frozen=True)
class Case:
    """Arguments of one call, with small layouts. Outputs hold garbage, or values to update;
    ``scratch`` tensors may hold anything after the call."""

    call: Call
    tensors: dict[str, Tensor | None]
    scratch: tuple[str, ...] = ()

    def run(self, ops: Ops, place: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Run the operator of ``ops`` on tensors that ``place`` copies. Returns its results and its
        arguments after the call, on the CPU. Raises RuntimeError if it wrote beside a tensor."""
        placed = {name: None if x is None else place(x) for name, x in self.tensors.items()}
        returned = getattr(ops, self.call.operator)(**placed, **dict(self.call.options))
        results = {name: x for name, x in placed.items() if x is not None}
        for name, x in results.items():
            if not is_intact(x):
                raise RuntimeError(f"it wrote beside {name!r}")
        results |= {f"result {i}": x for i, x in enumerate(returned or ())}
        return {name: x.cpu() for name, x in results.items() if name not in self.scratch}


class Tensors:
    """Makes tensors for a call."""

    def __init__(self, call: Call, inputs: Inputs, generator: torch.Generator) -> None:
        self.call, self.inputs, self._generator = call, inputs, generator
        self.reference = get_ops("cpu", "reference")
        layout = dict(call.options).get("layout")
        self.layout: Any = small(layout) if inputs.small and layout is not None else layout

    def part(self, operator: str, layout: object) -> Self:
        """Makes the tensors of an operator that is a part of the call's."""
        options = tuple((dict(self.call.options) | {"layout": layout}).items())
        call = replace(self.call, operator=operator, options=options)
        return type(self)(call, self.inputs, self._generator)

    def with_one_row(self) -> Self:
        """Makes the tensors of one destination."""
        return type(self)(self.call, replace(self.inputs, destinations=1), self._generator)

    @property
    def numel(self) -> int:
        """Elements of a row, for an operator without a layout."""
        given = self.inputs.elements
        return 4 * 1024 + 16 + self.call.rest if given is None else given

    def capacity(self) -> int:
        """How many groups a rank may keep: as large a share of all as in the call."""
        whole = self.call["layout"].groups
        return _share(self.call["capacity"], whole, self.layout.groups)

    def columns_and_words(self) -> tuple[int, int]:
        """Sizes of rows for pieces and of messages: a few more than they need, so that all rows are
        aligned if the first one is."""
        layout = self.layout
        columns, words = 0, layout.tail + STAMP_WORDS
        for piece in layout.pieces:
            columns = max(columns, piece.column + piece.numel)
            words = max(words, piece.word + piece.numel * layout.wire.itemsize // 4 + 1)
        return columns + 16 - columns % 16, words + 16 - words % 16

    def case(self, tensors: Mapping[str, Tensor | None], **options: object) -> Case:
        """A case of the call, with these options instead of its own."""
        if self.layout is not None:
            options["layout"] = self.layout
        merged = tuple((dict(self.call.options) | options).items())
        return Case(replace(self.call, options=merged), dict(tensors))

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

    def elements(self, rows: int, dtype: torch.dtype) -> Tensor:
        """:meth:`values` ``[rows, numel]`` for the layout: of a matrix, the scale also differs
        between columns."""
        if isinstance(self.layout, BlockLayout):
            return self.values(rows, self.layout.numel, dtype=dtype)
        found = []
        for run in self.layout.runs:
            shape = rows, run.count, run.rows, run.columns
            x = self.values(*shape, dtype=torch.float32)
            if self.inputs.kind != "ties":
                x *= torch.exp(self._normal(*shape[:2], 1, shape[3]))
            found.append(x.flatten(1))
        largest = torch.finfo(dtype).max
        return torch.cat(found, 1).clamp(-largest, largest).to(dtype)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float32, device="cpu", generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        """Float32 in ``[0, 1)``."""
        return torch.rand(*shape, dtype=torch.float32, generator=self._generator, device="cpu")

    def spoilt(self, x: Tensor) -> Tensor:
        """``x`` ``[R, n]``. Usual inputs get an infinity in the last row, and rough inputs the
        rough values. Others stay as they are."""
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

    def threshold(self, x: Tensor, capacity: int, times: float = 1.0) -> Tensor:
        """Thresholds ``[R]``, which the share of a row's groups reaches that the inputs ask for, or
        ``times`` a share that exceeds the capacity, so that some are dropped."""
        share = self.inputs.above
        if share is None:
            share = times * min(1.0, 1.2 * capacity / max(1, self.layout.groups))
        size = x.float().abs().nan_to_num(0, 0, 0)
        n = size.shape[-1]
        if share == 0:
            return torch.full((len(x),), _OUT_OF_REACH, dtype=torch.float32, device="cpu")
        share /= self.layout.symbol.lanes
        place = max(1, n - round(share * n))
        if not n:
            return torch.ones(len(x), dtype=torch.float32, device="cpu")
        return size.kthvalue(place, -1).values.clamp(min=2.0**-20)


def shortened(numel: int, unit: int, units: int, rest: int = 16) -> int:
    """``units * unit`` elements or a few more, at most ``numel``. The number of units has the same
    remainder modulo ``rest`` as in ``numel``, and the elements the same remainder modulo ``unit``.
    """
    units += (numel // unit - units) % rest
    return min(numel, units * unit + numel % unit)


def small(layout: Any) -> Any:
    """A layout of the same kind with a few blocks, rows or words. The last one is as full as in the
    model."""
    match layout:
        case BlockLayout():  # two scales share a word
            units = max(_BLOCKS, 2048 // layout.block)
            return replace(layout, numel=shortened(layout.numel, layout.block, units, rest=32))
        case DenseLayout():
            return _small_dense(layout)
        case ExactLayout():
            spans = [shortened(size, layout.block, 2, rest=1) for size in layout.spans[:4]]
            return replace(layout, spans=tuple(spans))
        case ExponentLayout():  # two chunks
            return ExponentLayout(numel=shortened(layout.numel, BLOCK * CHUNK, 2, rest=1))
        case SketchLayout():
            return _small_sketch(layout)
    return _small_matrices(layout)


def _small_dense(layout: DenseLayout) -> DenseLayout:
    """Short pieces, in the same order; columns and lengths have the same remainders modulo 16."""
    pieces, column, word = [], 0, 0
    for piece in layout.pieces:
        numel = shortened(piece.numel, 16, _BLOCKS)
        column += (piece.column - column) % 16
        pieces.append(Piece(column, numel, word))
        column += numel
        word += -(-numel * layout.wire.itemsize // 16) * 4
    return replace(layout, pieces=tuple(pieces), tail=word)


def _small_matrices(layout: AnyMatrices) -> Matrices:
    """A few rows of at most two matrices of each shape, with all columns, because kernels treat
    long and short rows differently."""
    runs = [
        replace(run, rows=min(run.rows, _ROWS + run.rows % 16), count=min(run.count, 2))
        for run in layout.runs
    ]
    return Matrices(tuple(runs))


def small_encoder(layout: AnyMatrices, destinations: int) -> tuple[Matrices, int]:
    """:func:`small` matrices with at most two destinations; more matrices of the last shape, and
    more destinations, if kernels treat many columns differently."""
    few = _small_matrices(layout)
    columns = min(_COLUMNS, destinations * _columns(layout))
    destinations = min(destinations, max(2, -(-columns // _columns(few))))
    *others, last = few.runs
    missing = -(-columns // destinations) - _columns(Matrices(tuple(others)))
    count = max(last.count, -(-missing // last.columns))
    return Matrices((*others, replace(last, count=count))), destinations


def _columns(layout: AnyMatrices) -> int:
    return sum(run.count * run.columns for run in layout.runs)


def _small_sketch(layout: SketchLayout) -> SketchLayout:
    """A few words of a bitmap, and a table for the same share of the groups. A large table stays
    large enough for the kernels of large tables. Small layouts stay as they are."""
    lanes = layout.symbol.lanes
    large = not layout.direct and layout.partition >= _PARTITION
    numel = shortened(layout.numel, 32 * lanes, _WORDS_OF_LARGE if large else _WORDS)
    if numel == layout.numel and not large:
        return layout
    groups = -(-numel // lanes)
    partition = groups
    if large:
        partition = _PARTITION + layout.partition % 16
    elif not layout.direct:  # small tables need more room for each key
        partition = max(32, 2 * _share(layout.partition, layout.groups, groups))
    keys = _share(layout.keys, layout.groups, groups)
    return replace(layout, numel=numel, keys=keys, partition=partition)


def _share(part: int, whole: int, of: int) -> int:
    """``part / whole`` of ``of``, rounded down, but at least 1 if ``part`` is. It is all of ``of``
    only if ``part`` is all of ``whole``."""
    if part >= whole:
        return of
    return min(max(part * of // whole, min(part, 1)), max(0, of - 1))


def copied(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device, copy=True).contiguous()


def shifted(x: Tensor, device: torch.device) -> Tensor:
    """A copy within a wider buffer; a plain copy if the tensor holds only a few numbers."""
    if x.shape[-1] < 2 or (x.dtype == torch.float32 and x.ndim == 1 and x.shape[-1] <= 16):
        return copied(x, device)
    return _within(x, device, _BEFORE, _BEFORE + x.shape[-1] + _AFTER)


def beside_others(x: Tensor, device: torch.device, *, before: int) -> Tensor:
    """A copy of a message within wider rows, after ``before`` words; of others, a plain copy."""
    if x.dtype != torch.int32 or x.ndim < 2:
        return copied(x, device)
    # The distance between rows is a multiple of 2 words, but not of 4 words (16 bytes).
    width = before + x.shape[-1]
    return _within(x, device, before, width + (2 - width) % 4)


def _within(x: Tensor, device: torch.device, before: int, width: int) -> Tensor:
    garbage = torch.nan if x.dtype.is_floating_point else GARBAGE
    wide = torch.full((*x.shape[:-1], width), garbage, dtype=x.dtype, device=device)
    view = wide[..., before : before + x.shape[-1]]
    view.copy_(x)
    return view


def is_intact(x: Tensor) -> bool:
    """Whether the elements beside a placed tensor are unchanged."""
    wide, before = x._base, x.storage_offset()
    if wide is None:
        return True
    beside = torch.cat([wide[..., :before], wide[..., before + x.shape[-1] :]], dim=-1)
    return bool((beside.isnan() if x.dtype.is_floating_point else beside == GARBAGE).all())


# Functions of a tensor and its device.
PLACEMENTS = {
    "aligned": copied,
    "not aligned": shifted,
    "messages in wider rows": partial(beside_others, before=4),
    "messages in wider rows, not aligned": partial(beside_others, before=5),
}

"""The count sketch on its own: encode, add and decode without a process group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tagc.ops import Ops, compiles_ahead, get_ops
from tagc.ops.bitmap import to_bitmap
from tagc.ops.sketch import SketchLayout, plan_layout
from tagc.ops.symbols import SYMBOLS, pack, unpack
from tagc.selfcheck import check, sketch_calls


@dataclass(frozen=True, eq=False)
class Sketch:
    """An encoded vector, or a sum of encoded vectors.

    Attributes:
        cells: ``[cells]`` int32.
        index: ``[words]`` int32 bitmap of the groups present in any summand.
        layout: the layout of both.
        seed: hash seed.
        step: quantization step; None for encoded integers.
    """

    cells: Tensor
    index: Tensor
    layout: SketchLayout
    seed: int
    step: float | None

    def __add__(self, other: Sketch) -> Sketch:
        """Sum without decoding: cells add (modulo 2**32), indexes OR."""
        if not isinstance(other, Sketch):
            return NotImplemented
        for name in ("layout", "seed", "step"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(f"cannot add sketches of different {name}: {mine} and {theirs}")
        return Sketch(
            self.cells + other.cells, self.index | other.index, self.layout, self.seed, self.step
        )


@dataclass(frozen=True, eq=False)
class Decoded:
    """A decoded sum.

    Attributes:
        values: ``[numel]``; int32 if integers were encoded, else float32. Zero where unresolved.
        unresolved: number of groups present that peeling could not recover.
    """

    values: Tensor
    unresolved: int


class CountSketch:
    """Homomorphic, lossless codec for sparse vectors of one length.

    The sum of sketches decodes to exactly the sum of the vectors, whatever the order of additions,
    if each element's final sum fits the symbol's bits and peeling recovers every group.

    Args:
        numel: elements of a vector.
        keys: distinct groups (of ``symbol`` lanes) that the *sum* may hold. With more, peeling
            fails, which ``Decoded.unresolved`` reports.
        symbol: ``int8x4``, ``int16x2`` or ``int32x1``.
        seed: hash seed; only sketches with the same seed can be added.
        ops: implementation; see :func:`tagc.ops.get_ops`.

    Example:
        >>> codec = CountSketch(1000, keys=50, symbol="int8x4")
        >>> x = torch.zeros(1000, dtype=torch.int32)
        >>> x[7] = 3
        >>> (codec.encode(x) + codec.encode(x)).index.numel()
        8
        >>> codec.decode(codec.encode(x) + codec.encode(x)).values[7].item()
        6

    Source: lossless homomorphic compression (arXiv 2402.07529), with an element hash, integer
    symbols and a one-bit index.
    """

    def __init__(
        self,
        numel: int,
        *,
        keys: int,
        symbol: str = "int8x4",
        seed: int = 0,
        ops: str | None = None,
    ) -> None:
        if symbol not in SYMBOLS:
            raise ValueError(f"unknown symbol {symbol!r}; choose from {', '.join(SYMBOLS)}")
        if not -(2**31) <= seed < 2**31:
            raise ValueError(f"seed must fit 32 bits, got {seed}")
        self.symbol = SYMBOLS[symbol]
        self.layout = plan_layout(numel, self.symbol, keys)
        self.seed = seed
        self._ops = ops

    def encode(self, x: Tensor, step: float | None = None) -> Sketch:
        """Sketch the non-zero groups of ``x``.

        Args:
            x: ``[numel]``, encoded unchanged if integer, as ``round(x / step)`` if float.
            step: quantization step, for float input only.

        Raises:
            ValueError: if shape, dtype or step do not fit, or a value does not fit its lane.
            tagc.KernelError: if the kernels do not work on this device.
        """
        if x.shape != (self.layout.numel,):
            raise ValueError(f"expected shape ({self.layout.numel},), got {tuple(x.shape)}")
        symbols, present = self._symbols(x, step)
        ops, seed = self._ops_and_seed(x.device)
        index = to_bitmap(present)
        cells = torch.empty(self.layout.cells, dtype=torch.int32, device=x.device)
        ops.insert(symbols, index, seed, cells, layout=self.layout)
        return Sketch(cells, index, self.layout, self.seed, step)

    def decode(self, sketch: Sketch) -> Decoded:
        """Recover the sum that ``sketch`` holds.

        Raises:
            ValueError: if the sketch was made with another layout or seed.
        """
        if sketch.layout != self.layout or sketch.seed != self.seed:
            raise ValueError("the sketch was encoded by a CountSketch with other arguments")
        ops, seed = self._ops_and_seed(sketch.cells.device)
        symbols, stuck = ops.peel(sketch.cells, sketch.index, seed, layout=self.layout)
        values = unpack(symbols, self.symbol).flatten()[: self.layout.numel]
        if sketch.step is not None:
            values = values.float() * sketch.step
        return Decoded(values, int(stuck.sum()))

    def _ops_and_seed(self, device: torch.device) -> tuple[Ops, Tensor]:
        """Kernels for GPUs are compared with the reference before their first use."""
        ops = get_ops(device, self._ops)
        if compiles_ahead(ops):
            check(ops, device, sketch_calls(self.layout))
        return ops, torch.tensor([self.seed], dtype=torch.int32, device=device)

    def _symbols(self, x: Tensor, step: float | None) -> tuple[Tensor, Tensor]:
        """The symbols, ``[groups]`` int32, and whether each is present, ``[groups]`` bool."""
        symbol = self.symbol
        if x.is_floating_point():
            if step is None or not 0 < step < float("inf"):
                raise ValueError(
                    f"float input to {symbol.name} needs a positive quantization step, got {step}"
                )
            q = (x.double() / step).round()
        elif step is not None:
            raise ValueError("integer input is encoded unchanged: leave out step")
        else:
            q = x.to(torch.int64)
        low, high = -symbol.qmax - 1, symbol.qmax
        if q.numel() and not bool(((q >= low) & (q <= high)).all()):
            raise ValueError(
                f"values must lie in [{low}, {high}] (in steps) for {symbol.name}; "
                "use a larger step or a wider symbol"
            )
        pad = self.layout.groups * symbol.lanes - q.numel()
        lanes = torch.nn.functional.pad(q.to(torch.int64), (0, pad)).view(-1, symbol.lanes)
        return pack(lanes, symbol), (lanes != 0).any(1)

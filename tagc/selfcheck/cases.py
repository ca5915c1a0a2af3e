"""Makes small inputs for a call of an operator. The reference makes the messages to be decoded."""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
from torch import Tensor

from tagc.ops import ABOVE, COUNTS, SATURATED
from tagc.ops.blocks import BlockLayout
from tagc.ops.dense import STAMP_WORDS
from tagc.ops.thresholds import BIAS, BOOST, EXPONENT, SIDE, STATES, STEP, THRESHOLD
from tagc.selfcheck.calls import Call
from tagc.selfcheck.inputs import GARBAGE, USUAL, Case, Inputs, Tensors, small_encoder

# What a merged operator calls the arguments of its second part.
_RENAMED = {"message": "whole", "out": "rows"}


def case_of(call: Call, inputs: Inputs = USUAL) -> Case:
    """The same inputs every time."""
    name = str(call) if inputs == USUAL else f"{call} {inputs}"
    generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(name.encode()))
    made: Case = getattr(Maker(call, inputs, generator), call.operator)()
    return made


class Maker(Tensors):
    """A method makes the inputs for the operator of its name."""

    def quantize(self) -> Case:
        R = self.inputs.destinations
        case = self._elementwise(R)
        if self.inputs.kind == "ties" and self.layout.numel:
            self.put(case, _halfway(self.layout.levels).expand(R))
        if self.call["dither"] is not None:
            # Both signs, and a different one for each row.
            signs = [GARBAGE, ~GARBAGE][:R]
            case.tensors["dither"] = torch.tensor(signs, dtype=torch.int32, device="cpu")
        return case

    def quantize_matrix(self) -> Case:
        (D,) = self.call.rows
        if self.inputs.small:
            self.layout, D = small_encoder(self.call["layout"], D)
        return self._elementwise(D)

    def _elementwise(self, destinations: int) -> Case:
        residual = self.call["residual"]
        return self.case(
            {
                "grad": self.spoilt(self.elements(destinations, self.call["grad"])),
                "residual": None if residual is None else self.elements(destinations, residual),
                "message": self.garbage(destinations, self.layout.words),
            }
        )

    def dequantize(self) -> Case:
        """Messages for at most two results, of blocks or of matrices."""
        K, R = min(self.call.rows[0], 2), self.call.rows[1]
        message = self.garbage(K * R, self.layout.words)
        quantize = getattr(self.reference, self.call.operator.removeprefix("de"))
        sent = self.spoilt(self.elements(K * R, torch.float32))
        quantize(sent, None, message, layout=self.layout, average=0.0)
        made = self.values if self.call["add"] else self.garbage
        out = made(K, self.layout.numel, dtype=self.call["out"])
        return self.case({"message": message.view(K, R, -1), "out": out})

    dequantize_matrix = dequantize

    def _changed(self, rows: int) -> tuple[Tensor, Tensor]:
        """Old rows, and new ones, of which no two have the same share of changes."""
        shape = rows, self.layout.numel
        old = self.spoilt(self.values(*shape, dtype=self.layout.dtype))
        by = self.values(*shape, dtype=torch.float32)
        step = torch.exp2(self.uniform(rows, 1) * -16)
        if self.inputs.kind == "ties":
            step = (self.uniform(*shape) < step).float()  # some elements change
        new = (old.float() + step * by).to(self.layout.dtype)
        if self.inputs.kind == "rough":
            self.spoilt(new)
        return old, new

    def _measured(self, rows: int) -> list[dict[str, Tensor]]:
        """Rows, each with a plan."""
        found = []
        for old, new in zip(*(x.split(1) for x in self._changed(rows)), strict=True):
            plan = self.garbage(1, self.layout.plan_words)
            self.reference.measure_exact(new, old, plan, layout=self.layout)
            found.append({"new": new, "old": old, "plan": plan})
        return found

    def measure_exact(self) -> Case:
        old, new = self._changed(1)
        return self.case({"new": new, "old": old, "plan": self.garbage(1, self.layout.plan_words)})

    def encode_exact(self) -> Case:
        (row,) = self._measured(1)
        return self.case({**row, "message": self.garbage(1, self.layout.words)})

    def decode_exact(self) -> Case:
        rows = self._measured(min(self.call.rows[0], 4))
        message = self.garbage(len(rows), self.layout.words)
        for words, row in zip(message, rows, strict=True):
            self.reference.encode_exact(**row, message=words[None], layout=self.layout)
        return self.case({"message": message, "rows": torch.cat([row["old"] for row in rows])})

    def select(self) -> Case:
        layout, capacity, R = self.layout, self.capacity(), self.inputs.destinations
        x = self.values(R, layout.numel, dtype=self.call["x"])
        tensors = {
            "x": self.spoilt(x),
            "threshold": self.threshold(x, capacity),
            "bitmap": self.garbage(R, layout.words),
            "counts": self.garbage(R, COUNTS),
        }
        return self.case(tensors, capacity=capacity)

    def encode(self) -> Case:
        layout, capacity, W = self.layout, self.capacity(), self.inputs.destinations
        shape = (W, layout.numel)
        grad = self.values(*shape, dtype=self.call["grad"])
        residual = self.call["residual"]
        threshold = self.threshold(grad, capacity)
        step = torch.exp2(torch.log2(threshold).floor() - 2)
        seed = zlib.crc32(str(self.call).encode()) % 2**31
        tensors = {
            "grad": self.spoilt(grad),
            "residual": None if residual is None else self.values(*shape, dtype=residual),
            "threshold": threshold,
            "step": step,
            "seed": torch.tensor([seed], dtype=torch.int32, device="cpu"),
            "index": self.garbage(W, layout.index_words),
            "cells": self.garbage(W, layout.cells),
            "counts": self.garbage(W, COUNTS),
            "support": None,
        }
        if self.call["support"] is not None:
            tensors["support"] = self.support(W, layout.groups, capacity)
        case = self.case(tensors, capacity=capacity)
        if self.inputs.kind == "ties" and layout.numel:
            # The largest that is not clipped.
            self.put(case, self.call["levels"] * step)
        return case

    def decode(self) -> Case:
        layout, out, residual = self.layout, self.call["out"], self.call["residual"]
        # The messages of W ranks, encoded as rows for W destinations.
        W, symbol = max(2, self.call.rows[0]), layout.symbol
        capacity = layout.keys // W
        x = self.values(W, layout.numel, dtype=torch.float32)
        threshold = self.threshold(x, capacity, times=0.5)
        index = self.garbage(W, layout.index_words)
        cells = self.garbage(W, layout.cells)
        step = torch.exp2(torch.log2(threshold.mean()).floor() - 2).expand(W).contiguous()
        seed = torch.tensor([12345], dtype=torch.int32, device="cpu")
        self.reference.encode(
            x, None, threshold, step, seed, index, cells, self.garbage(W, COUNTS),
            layout=layout, levels=symbol.levels(W), capacity=capacity,
        )  # fmt: skip
        tensors = {
            "index": index,
            "cells": cells.sum(0, dtype=cells.dtype),
            "step": step[:1].clone(),
            "seed": seed,
            "out": self.garbage(layout.numel, dtype=out),
            "residual": None if residual is None else self.values(layout.numel, dtype=residual),
            "stats": self.garbage(2),
        }
        return replace(self.case(tensors), scratch=("cells",))

    def _inserted(self) -> dict[str, Tensor]:
        symbols = 4 * self.values(1, self.layout.groups, dtype=torch.float32)[0]
        return {
            "symbols": symbols.to(torch.int32),
            "index": self.bits(1, self.layout.groups, self.layout.keys)[0],
            "seed": torch.tensor([54321], dtype=torch.int32, device="cpu"),
            "cells": self.garbage(self.layout.cells),
        }

    def insert(self) -> Case:
        return self.case(self._inserted())

    def peel(self) -> Case:
        tensors = self._inserted()
        self.reference.insert(**tensors, layout=self.layout)
        return self.case({name: tensors[name] for name in ("cells", "index", "seed")})

    def pack_exponents(self) -> Case:
        rows = self.inputs.destinations
        x = self._of_exponents(rows)
        return self.case({"rows": x, "message": self.garbage(rows, self.layout.raw_words)})

    def _of_exponents(self, rows: int) -> Tensor:
        """Rows with exceptions, of which the last one's do not all fit, unless inputs are usual."""
        x = self.spoilt(self.values(rows, self.layout.numel, dtype=torch.bfloat16))
        if self.inputs.kind == "ties":
            x[-1, ::21] *= 2.0**40
            x[:-1, ::101] *= 2.0**-40
        return x

    def unpack_exponents(self) -> Case:
        x = self._of_exponents(min(self.call.rows[0], 4))
        message = self.garbage(len(x), self.layout.raw_words)
        self.reference.pack_exponents(x, message, layout=self.layout)
        if self.inputs.kind == "usual":
            message = message[:, : self.layout.words].contiguous()
        return self.case({"message": message, "rows": self.garbage(*x.shape, dtype=x.dtype)})

    def undo_lag(self) -> Case:
        n = self.numel
        tensors: dict[str, Tensor | None] = {
            "decoded": self.spoilt(self.values(1, n, dtype=torch.float32))[0],
            "sent": self.values(n, dtype=torch.float32),
            "out": self.garbage(n, dtype=self.call["out"]),
        }
        return self.case(tensors)

    def fingerprint(self) -> Case:
        x = self.values(self.numel, dtype=self.call["x"])
        tensors = {"x": x, **_no_fingerprint(), "changed": None}
        if self.call["changed"] is not None:
            self.reference.fingerprint(x, tensors["sums"], tensors["before"])
            tensors["changed"] = torch.zeros(1, dtype=torch.bool, device="cpu")
            x[-1:].neg_()
        return self.case(tensors)

    def _stamp(self) -> Tensor | None:
        if self.call["stamp"] is None:
            return None
        return torch.tensor([GARBAGE + 1, 41], dtype=torch.int32, device="cpu")

    def put_dense(self) -> Case:
        columns, words = self.columns_and_words()
        D = self.inputs.destinations
        x = self.spoilt(self.values(D, columns, dtype=self.call["x"]))
        return self.case({"x": x, "message": self.garbage(D, words), "stamp": self._stamp()})

    def sum_dense(self) -> Case:
        columns, words = self.columns_and_words()
        K, R = min(self.call.rows[0], 2), self.call.rows[1]
        stamp = self._stamp()
        message = self.garbage(K * R, words)
        x = self.spoilt(self.values(K * R, columns, dtype=self.layout.wire))
        self.reference.put_dense(x, message, stamp, layout=self.layout)
        wrong, spoils = None, self.inputs.kind == "ties"
        if self.call["wrong"] is not None:
            wrong = torch.tensor([stamp is None and spoils], dtype=torch.bool, device="cpu")
        if stamp is not None and spoils:
            message[-1, self.layout.tail + self.inputs.seed % STAMP_WORDS] += 1
        out = self.values(K, columns, dtype=self.call["out"])
        return self.case(
            {"message": message.view(K, R, words), "out": out, "stamp": stamp, "wrong": wrong}
        )

    def quantize_and_put(self) -> Case:
        if self.call["sums"] is None:
            return self._merged("quantize", "put_dense")
        case = self.with_one_row()._merged("quantize", "put_dense")
        case.tensors.update(_no_fingerprint())
        return case

    def dequantize_and_sum(self) -> Case:
        case = self._merged("dequantize", "sum_dense")
        if self.call["sent"] is None:
            return case
        n = self.layout.numel
        case.tensors["sent"] = self.values(n, dtype=torch.float32)
        case.tensors["ahead"] = self.garbage(n, dtype=self.call["ahead"])
        return replace(case, scratch=("out",))

    def _merged(self, codes: str, pieces: str) -> Case:
        """The tensors of two operators' cases. The second one's messages and rows contain the first
        one's in training; here they are beside them."""
        layout = self.call["layout"]
        if not isinstance(layout, BlockLayout):
            codes += "_matrix"
        part = self.part(codes, layout)
        first = getattr(part, codes)()
        self.layout = part.layout
        message = first.tensors["message"]
        assert message is not None
        if message.dim() == 2:
            self.inputs = replace(self.inputs, destinations=len(message))
        second = getattr(self.part(pieces, self.call["dense"]), pieces)()
        given = {name: None for name, _ in self.call.dtypes} | first.tensors
        given |= {_RENAMED.get(name, name): x for name, x in second.tensors.items()}
        return self.case(given, dense=second.call["layout"])

    def steer(self) -> Case:
        segments, destinations = self.call.rows
        # More than one program has threads for.
        segments += 128 // destinations
        shape = segments, destinations
        # Counts near the target, far from it, and zero; few or many saturated.
        counts = self.uniform(*shape, COUNTS) * torch.exp2(11 * self.uniform(*shape, 1))
        counts[..., SATURATED] *= torch.exp2(-12 * self.uniform(*shape))
        counts[self.uniform(*shape) < 0.1] = 0
        counts[self.uniform(*shape) < 0.1, ABOVE] = 0
        scale = torch.exp2((4 * self.uniform(segments)).floor())
        scale[::7] = 0
        state = torch.empty(STATES, *shape, dtype=torch.float32, device="cpu")
        state[THRESHOLD] = torch.exp2(20 * self.uniform(*shape) - 15)
        state[BOOST] = torch.exp2((3 * self.uniform(*shape)).floor())
        state[BIAS], state[EXPONENT] = 1 + self.uniform(*shape), 1 / 32 + self.uniform(*shape) / 3
        state[SIDE] = (3 * self.uniform(*shape)).floor() - 1
        state[STEP] = torch.nan
        tensors = {
            "counts": counts.int(),
            "target": 700 * (0.5 + self.uniform(segments)),
            "max_boost": torch.exp2((3 * self.uniform(segments)).floor()),
            "scale": scale,
            "state": state,
        }
        return self.case(tensors)


def _halfway(levels: int) -> Tensor:
    """A number that has a scale halfway between two bfloat16; larger than those of ties."""
    half = torch.tensor(4 * (1 + 2.0**-8), dtype=torch.float32, device="cpu")
    near = levels * half * (1 + torch.arange(-8, 9, dtype=torch.float32, device="cpu") * 2.0**-24)
    return near[near * torch.tensor(1 / levels, dtype=torch.float32, device="cpu") == half][0]


def _no_fingerprint() -> dict[str, Tensor]:
    sizes = {"sums": 3, "before": 2}
    return {n: torch.zeros(k, dtype=torch.int64, device="cpu") for n, k in sizes.items()}

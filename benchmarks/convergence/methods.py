"""What is compared: a codec and a feedback kind, and the optimizer that goes with them.

Two families of optimizers: ``adam`` has its first momentum, as usual; ``average`` has none, and
gets the moving average of gradients instead. Each has a dense baseline, and learning rates of its
own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

# Rates that a sweep may go on to when the best of those tried is the first or the last.
GRID = (2.5e-4, 5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 4.5e-3, 6e-3, 9e-3, 1.2e-2, 1.8e-2, 2.7e-2)
_MOMENTUM = 0.9
_RATES = {"adam": (3e-3, 4.5e-3, 6e-3), "average": (1.5e-3, 2e-3, 3e-3)}


@dataclass(frozen=True, kw_only=True)
class Method:
    """One line of the tables.

    Attributes:
        codec, feedback: as in a policy's rule; dense where ``codec`` is empty.
        parameters: codec of the all-gather, likewise.
        gathered: dtype of the parameters that are gathered.
        average: ``eta`` of a moving average of the dense gradient; 0 for none.
        start: learning rates to begin with, if not its family's.
        momentum: AdamW's first, where the family has one.
    """

    name: str
    codec: dict[str, Any] = field(default_factory=dict)
    feedback: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    gathered: str = "float32"
    average: float = 0.0
    start: tuple[float, ...] = ()
    momentum: float = _MOMENTUM

    @property
    def family(self) -> str:
        """Whose dense baseline it is compared with."""
        return "average" if self.average else "adam"

    @property
    def betas(self) -> tuple[float, float]:
        """Of AdamW."""
        return (0.0 if self.family == "average" else self.momentum, 0.95)

    def at(self, momentum: float) -> Method:
        """The same with another first momentum, under a name that says so."""
        if self.family == "average" or momentum == self.momentum:
            return self
        return replace(self, name=f"{self.name}, momentum {momentum:g}", momentum=momentum)

    @property
    def rates(self) -> tuple[float, ...]:
        """Learning rates to begin with, neighbours in the grid."""
        return self.start or _RATES[self.family]

    @property
    def policy(self) -> dict[str, Any] | None:
        """Every matrix, however small."""
        if not self.codec and not self.parameters:
            return None
        when = {"min_numel": 1}
        rule = {"when": when, "codec": {"kind": "dense"}}
        if self.codec:
            rule = {"when": when, "codec": self.codec, "feedback": self.feedback}
        policy = {"schema": 1, "gradients": [rule]}
        gathers = {"parameters": [{"when": when, "codec": self.parameters}]}
        return policy | (gathers if self.parameters else {})


BASELINES = {"adam": "dense", "average": "dense, averaged"}


def _quantized(bits: int, kind: str) -> Method:
    return Method(
        name=f"{bits} bits, {kind}",
        codec={"kind": "quantized", "bits": bits},
        feedback={"kind": kind},
    )


def _stateless(bits: int, rounding: str, block: int = 256) -> Method:
    """Nothing is kept of what is rounded away."""
    blocks = "" if block == 256 else f" in blocks of {block}"
    return Method(
        name=f"{bits} bits{blocks}, none, {rounding}",
        codec={"kind": "quantized", "bits": bits, "block": block, "rounding": rounding},
        feedback={"kind": "none"},
    )


def _packed(percent: float, bits: int, kind: str, group: int = 1, **feedback: Any) -> Method:
    groups = f" in groups of {group}" if group > 1 else ""
    extra = "".join(f", {key} {value:g}" for key, value in feedback.items())
    codec = {"kind": "packed", "density": percent / 100, "bits": bits}
    return Method(
        name=f"top {percent:g}%{groups} in {bits} bits, {kind}{extra}",
        codec=codec | ({"group": group} if group > 1 else {}),
        feedback={"kind": kind, **feedback},
        # A lead wants higher rates, see _matrix.
        start=(6e-3, 9e-3, 1.2e-2) if feedback else (),
    )


def _matrix(name: str, codec: dict[str, Any], lead: float | str, *start: float) -> Method:
    """``lead`` is the share of a Gaussian that a message carries: what undoes the lag."""
    return Method(
        name=f"matrix, {name}",
        codec={"kind": "matrix", **codec},
        feedback={"kind": "residual", "lead": lead},
        start=start,
    )


def _stored(method: Method, dtype: str) -> Method:
    """With residuals in another dtype than float32."""
    name = f"{method.name}, {dtype} residual"
    return replace(method, name=name, feedback={**method.feedback, "dtype": dtype})


def _measured(method: Method) -> Method:
    """With a lead that every segment measures, in place of a Gaussian's."""
    feedback = {**method.feedback, "lead": "measured"}
    return replace(method, name=f"{method.name}, measured lead", feedback=feedback)


def _changes(
    bits: int,
    method: Method | None = None,
    gathered: str = "float32",
    *,
    dithered: bool = False,
) -> Method:
    """With parameters sent as changes against a copy."""
    method = method or Method(name=BASELINES["adam"])
    copy = "" if gathered == "float32" else f" of a {gathered} copy"
    rounding = ", stochastic" if dithered else ""
    return replace(
        method,
        name=f"{method.name}, changes{copy} in {bits} bit{'s' if bits > 1 else ''}{rounding}",
        parameters={"kind": "delta", "bits": bits}
        | ({"rounding": "stochastic"} if dithered else {}),
        gathered=gathered,
    )


_BIT = _matrix("1 bit", {"level": 1.3}, 0.83, 4.5e-3, 6e-3, 9e-3)
_EIGHTH = _matrix("1 of 8", {"group": 8}, 0.35, 6e-3, 9e-3, 1.2e-2)
_TWO = _matrix("2 bits", {"bits": 2}, 0.88, 4.5e-3, 6e-3, 9e-3)
_THIRTY_SECOND = _matrix("1 of 32", {"group": 32}, 0.17, 9e-3, 1.2e-2, 1.8e-2)
_ALL = (
    Method(name=BASELINES["adam"]),
    Method(name=BASELINES["average"], average=0.1),
    _quantized(4, "residual"),
    _stored(_quantized(4, "residual"), "bfloat16"),
    _stored(_quantized(4, "residual"), "int8"),
    _stateless(8, "stochastic"),
    _stateless(4, "stochastic"),
    _stateless(4, "stochastic", 32),
    _stateless(4, "nearest"),
    _quantized(4, "average"),
    _TWO,
    _measured(_TWO),
    _BIT,
    _stored(_BIT, "bfloat16"),
    _stored(_BIT, "int8"),
    _measured(_BIT),
    _EIGHTH,
    _measured(_EIGHTH),
    _stored(_EIGHTH, "bfloat16"),
    _stored(_EIGHTH, "int8"),
    _THIRTY_SECOND,
    _measured(_THIRTY_SECOND),
    # TAGC's selection: elements one by one, values not visibly rounded.
    _packed(20, 16, "residual"),
    # Leads: the shares of a Gaussian's energy that its largest 20% and 5% have.
    _packed(20, 16, "residual", lead=0.65),
    # What int8 sketches select.
    _packed(20, 16, "residual", 4),
    _packed(20, 16, "residual", 4, lead=0.65),
    _packed(20, 4, "residual"),
    _packed(20, 4, "residual", lead=0.65),
    _packed(5, 16, "residual"),
    _packed(5, 4, "residual"),
    _packed(5, 4, "residual", lead=0.28),
    *(_changes(bits) for bits in (8, 4, 2)),
    _changes(4, dithered=True),
    _changes(4, gathered="bfloat16"),
    _changes(4, gathered="bfloat16", dithered=True),
    # The policies `hosts` and `thrifty`, and less.
    _changes(4, _stored(_quantized(4, "residual"), "bfloat16")),
    _changes(4, _stored(_quantized(4, "residual"), "bfloat16"), dithered=True),
    _changes(2, _stored(_BIT, "bfloat16")),
    _changes(2, _stored(_EIGHTH, "bfloat16")),
    _changes(2, _stored(_measured(_EIGHTH), "bfloat16")),
)
METHODS = {method.name: method for method in _ALL}
QUICK = ("dense", "4 bits, residual", "matrix, 1 bit")

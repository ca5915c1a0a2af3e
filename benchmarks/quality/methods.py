"""What is compared: rules of a policy for every matrix, and the lines of the paired comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Learning rates that a sweep may go on to when the best so far is the first or the last.
GRID = (2.5e-4, 5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 4.5e-3, 6e-3, 9e-3, 1.2e-2, 1.8e-2, 2.7e-2)
_RATES = (3e-3, 4.5e-3, 6e-3)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One line of the tables.

    Attributes:
        policy: what ``tagc.wrap`` takes; None is dense FSDP2 without tagc.
        rates: learning rates to begin a sweep with, neighbours in ``GRID``.
        ddp: DDP instead of FSDP2.
        powersgd: with DDP, the rank of torch's PowerSGD hook.
    """

    name: str
    policy: str | dict[str, Any] | None = None
    rates: tuple[float, ...] = _RATES
    ddp: bool = False
    powersgd: int | None = None

    @property
    def in_sites(self) -> bool:
        """Whether every rank is a site, and takes the policy to ``tagc.sites``."""
        return isinstance(self.policy, dict) and "sites" in self.policy


Part = tuple[str, dict[str, Any]]
"""A name and what a rule says of the codec and the feedback."""


def _gradients(name: str, codec: dict[str, Any], **feedback: Any) -> Part:
    return name, {"codec": codec, "feedback": {"kind": "residual"} | feedback}


def _quantized(residual: str, name: str = "4 bits, residual") -> Part:
    return _gradients(name, {"kind": "quantized", "bits": 4}, dtype=residual)


def _stateless(name: str, rounding: str, bits: int, block: int = 256) -> Part:
    codec = {"kind": "quantized", "bits": bits, "block": block, "rounding": rounding}
    return name, {"codec": codec, "feedback": {"kind": "none"}}


def _matrix(name: str, lead: float | str, residual: str = "float32", **codec: Any) -> Part:
    """Without ``"measured"``, a lead is the share of a Gaussian that a message carries."""
    return _gradients(name, {"kind": "matrix", **codec}, lead=lead, dtype=residual)


def _method(part: Part | None, *rates: float, changes: int | None = None) -> Method:
    """
    Args:
        changes: bits of the messages about changed parameters; None gathers them as they are.
    """
    name, rule = part or ("dense", {"codec": {"kind": "dense"}})
    # Every matrix, however small.
    when = {"min_numel": 1}
    policy: dict[str, Any] = {"schema": 1, "gradients": [{"when": when, **rule}]}
    if changes is not None:
        name += f", changes in {changes} bits"
        policy["parameters"] = [{"when": when, "codec": {"kind": "delta", "bits": changes}}]
    return Method(name=name, policy=policy, rates=rates or _RATES)


def _in_sites(line: str, part: Part | None, **sites: Any) -> Method:
    """A rank is a site. It exchanges changes with the codec of a part; None as they are."""
    rule = {"codec": {"kind": "dense"}} if part is None else part[1]
    rules = [{"when": {"role": _MATRICES, "min_numel": 1}, **rule}]
    return Method(name=line, policy={"schema": 1, "gradients": rules, "sites": sites})


_MATRICES = ["attention", "mlp", "embedding", "head", "other"]
_BIT: dict[str, Any] = {"level": 1.3}
_EIGHTH: dict[str, Any] = {"group": 8}
_HOSTS = _quantized("bfloat16", "4 bits, residual, bfloat16 residual")
_BIT_RATES, _EIGHTH_RATES = (4.5e-3, 6e-3, 9e-3), (6e-3, 9e-3, 1.2e-2)
_THRIFTY = _matrix("matrix, 1 bit, bfloat16 residual", 0.83, "bfloat16", **_BIT)
_SITE_BITS: dict[str, Part | None] = {
    "32 bits": None,
    "4 bits": _HOSTS,
    "1 bit": _matrix("matrix, 1 bit, bfloat16 residual", 1.0, "bfloat16", bits=1),
}
_TWO_BITS = _matrix("", 1.0, "bfloat16", bits=2)
_MEAN: dict[str, Any] = {"outer": {"rate": 1.0, "momentum": 0.0}}
_SITES = [
    *(
        _in_sites(f"sites, every {every}, {bits}", part, every=every, **_MEAN)
        for every in (16, 32, 64)
        for bits, part in _SITE_BITS.items()
    ),
    *(
        _in_sites(f"sites, every 32, {bits}", part, every=32, **_MEAN)
        for bits, part in {
            "8 bits": _gradients("", {"kind": "quantized", "bits": 8}, dtype="bfloat16"),
            "2 bits": _TWO_BITS,
            "4 bits, no feedback": _stateless("", "nearest", 4),
            "1 bit, no feedback": _gradients("", {"kind": "matrix", "bits": 1}, kind="none"),
        }.items()
    ),
    _in_sites("sites, every 32, 32 bits, outer momentum 0.9", None, every=32),
    _in_sites(
        "sites, every 32, 32 bits, outer momentum 0.5",
        None,
        every=32,
        outer={"rate": 0.7, "momentum": 0.5},
    ),
    *(
        _in_sites(
            f"sites, every {every}, {bits}, outer momentum {momentum:g}",
            part,
            every=every,
            outer={"rate": 0.7, "momentum": momentum},
        )
        for every, momentum, bits, part in (
            (32, 0.9, "4 bits", _HOSTS),
            (32, 0.7, "4 bits", _HOSTS),
            (32, 0.5, "4 bits", _HOSTS),
            (32, 0.5, "2 bits", _TWO_BITS),
            (32, 0.8, "2 bits", _TWO_BITS),
            (16, 0.5, "1 bit", _SITE_BITS["1 bit"]),
            (80, 0.5, "1 bit", _SITE_BITS["1 bit"]),
        )
    ),
    *(
        _in_sites(
            f"sites, every 32, 2 bits, outer momentum 0.5, {more}",
            _TWO_BITS,
            every=32,
            outer={"rate": 0.7, "momentum": 0.5},
            **options,
        )
        for more, options in {
            "together 500": {"together": 500},
            "delay 4": {"delay": 4, "alpha": 0.5},
        }.items()
    ),
    _in_sites("sites, every step, 4 bits", _HOSTS, every=1, **_MEAN),
    *(
        _in_sites(f"sites, every 32, 4 bits, together {n}", _HOSTS, every=32, together=n, **_MEAN)
        for n in (150, 300)
    ),
    _in_sites("sites, every 32, 4 bits, delay 4", _HOSTS, every=32, delay=4, alpha=0.5, **_MEAN),
]
# The TAGC paper's roles and density, with all else as in policy `attn-only`.
_TAGC_ROLES = {"role": ["mlp", "embedding", "head"]}
_TAGC: dict[str, Any] = {
    "schema": 1,
    "gradients": [
        {
            "when": _TAGC_ROLES,
            "codec": {"kind": "sketch", "density": 0.2, "symbol": "auto", "warmup_steps": 40},
            "feedback": {"kind": "residual", "dtype": "float32", "lead": 0.65},
        },
        {"when": {}, "codec": {"kind": "dense", "wire": "bfloat16"}},
    ],
    "parameters": [
        {"when": _TAGC_ROLES, "codec": {"kind": "quantized", "bits": 8, "block": 256}},
    ],
}
_ALL = (
    Method(name="dense"),
    _method(_quantized("float32")),
    _method(_HOSTS),
    _method(("4 bits, average", {"codec": {"kind": "quantized", "bits": 4},
                                 "feedback": {"kind": "average"}})),
    _method(_stateless("8 bits, none, stochastic", "stochastic", 8)),
    _method(_stateless("4 bits, none, stochastic", "stochastic", 4)),
    _method(_stateless("4 bits in blocks of 32, none, stochastic", "stochastic", 4, 32)),
    _method(_stateless("4 bits, none, nearest", "nearest", 4)),
    # A lead makes gradients noisier, so the best rates are higher.
    _method(_matrix("matrix, 2 bits", 0.88, bits=2), *_BIT_RATES),
    _method(_matrix("matrix, 2 bits, measured lead", "measured", bits=2), *_BIT_RATES),
    _method(_matrix("matrix, 1 bit", 0.83, **_BIT), *_BIT_RATES),
    _method(_matrix("matrix, 1 bit, measured lead", "measured", **_BIT), *_BIT_RATES),
    _method(_THRIFTY, *_BIT_RATES),
    _method(_matrix("matrix, 1 of 8", 0.35, **_EIGHTH), *_EIGHTH_RATES),
    _method(_matrix("matrix, 1 of 8, measured lead", "measured", **_EIGHTH), *_EIGHTH_RATES),
    # TAGC's setting: elements one by one, values not visibly rounded.
    _method(_gradients("sketch of 20%, residual",
                       {"kind": "sketch", "density": 0.2, "symbol": "int32x1"})),
    _method(None, changes=8),
    _method(None, changes=4),
    _method(None, changes=2),
    # The policies `hosts` and `thrifty`, and half a bit.
    _method(_HOSTS, changes=4),
    _method(_THRIFTY, *_BIT_RATES, changes=2),
    _method(_matrix("matrix, 1 of 8, measured lead, bfloat16 residual", "measured", "bfloat16",
                    **_EIGHTH), *_EIGHTH_RATES, changes=2),
    Method(name="DDP, loco-4bit", policy="loco-4bit", ddp=True),
    Method(name="DDP, one-bit", policy="one-bit", ddp=True),
    Method(name="DDP, PowerSGD of rank 4", ddp=True, powersgd=4),
    Method(name="DDP, PowerSGD of rank 16", ddp=True, powersgd=16),
    *_SITES,
    Method(name="attn-only", policy="attn-only"),
    Method(name="non-attn", policy=_TAGC),
)  # fmt: skip
METHODS = {method.name: method for method in _ALL}
DENSE = METHODS["dense"]
QUICK = ("dense", "4 bits, residual", "matrix, 1 bit")

# Lines of the paired comparison, by the method that each one runs.
LINES = {
    "4 bits": _HOSTS[0],
    "2 bits": "matrix, 2 bits",
    "1 bit": "matrix, 1 bit",
    "1 of 8": "matrix, 1 of 8",
    "2 bits, measured lead": "matrix, 2 bits, measured lead",
    "1 bit, measured lead": "matrix, 1 bit, measured lead",
    "1 of 8, measured lead": "matrix, 1 of 8, measured lead",
    "changes in 8 bits": "dense, changes in 8 bits",
    "changes in 4 bits": "dense, changes in 4 bits",
    "changes in 2 bits": "dense, changes in 2 bits",
    "4 bits, changes in 4 bits": f"{_HOSTS[0]}, changes in 4 bits",
    "1 bit, changes in 2 bits": f"{_THRIFTY[0]}, changes in 2 bits",
    "1 of 8, measured lead, changes in 2 bits": (
        "matrix, 1 of 8, measured lead, bfloat16 residual, changes in 2 bits"
    ),
    "8 bits, stateless": "8 bits, none, stochastic",
    "4 bits, stateless": "4 bits, none, stochastic",
    "4 bits in blocks of 32, stateless": "4 bits in blocks of 32, none, stochastic",
    "4 bits, stateless, to nearest": "4 bits, none, nearest",
    **{name: name for name in METHODS if name.startswith("DDP")},
    **{method.name: method.name for method in _SITES},
    "attn-only": "attn-only",
    "non-attn": "non-attn",
}

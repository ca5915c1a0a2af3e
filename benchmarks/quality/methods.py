"""What is compared: methods, whose names say what is sent, and how."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tagc.policy.policy import data_parallel_policies

# Learning rates that a sweep may go on to when the best so far is the first or the last.
GRID = (2.5e-4, 5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 4.5e-3, 6e-3, 9e-3, 1.2e-2, 1.8e-2, 2.7e-2)
_RATES = (3e-3, 4.5e-3, 6e-3)
_MATRICES = ["attention", "mlp", "embedding", "head", "other"]
# Of a matrix's code: itself, the share of a Gaussian that a message carries, and the rates to begin
# with. A lead makes gradients noisier, so the best rates are higher.
_CODES: dict[str, tuple[dict[str, Any], float, tuple[float, ...]]] = {
    "2 bits": ({"bits": 2}, 0.88, (4.5e-3, 6e-3, 9e-3)),
    "1 bit": ({"level": 1.3}, 0.83, (4.5e-3, 6e-3, 9e-3)),
}


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


def method_of(name: str) -> Method:
    """The method of a name, of a line of the paired comparison, or of a site.

    Every matrix is sent alike, however small. A name has parts: ``matrix, 1 bit, bfloat16 residual,
    changes in 2 bits``, or ``4 bits, none, stochastic``. A site's has options of the exchange:
    ``sites, every 32, 4 bits, outer momentum 0.5, delay 4``.

    Raises:
        ValueError: if it has a part that is not known.
    """
    name = LINES.get(name, name)
    if name in _OTHERS:
        return _OTHERS[name]
    first, *parts = name.split(", ")
    if first == "sites":
        return _in_sites(name, parts)
    rates = _RATES
    if first == "matrix" and parts and parts[0] in _CODES:
        rates = _CODES[parts[0]][2]
        rule = _matrix(parts.pop(0))
    elif first == "dense":
        rule = {"codec": {"kind": "dense"}}
    elif found := re.fullmatch(r"(\d) bits(?: in blocks of (\d+))?", first):
        rule = _quantized(int(found[1]), parts.pop(0) if parts else "residual")
        if rule["feedback"]["kind"] == "none":
            rule["codec"] |= {"block": int(found[2] or 256), "rounding": "nearest"}
    else:
        raise ValueError(f"unknown: {name}; there are: {'; '.join((*METHODS, *LINES))}")
    policy: dict[str, Any] = {"schema": 1, "gradients": [{"when": {"min_numel": 1}, **rule}]}
    for part in parts:
        if part == "bfloat16 residual":
            rule["feedback"]["dtype"] = "bfloat16"
        elif part in ("stochastic", "nearest"):
            rule["codec"]["rounding"] = part
        elif found := re.fullmatch(r"changes in (\d) bits", part):
            codec = {"kind": "delta", "bits": int(found[1])}
            policy["parameters"] = [{"when": {"min_numel": 1}, "codec": codec}]
        elif part == "exact changes":
            policy["parameters"] = [{"when": {"min_numel": 1}, "codec": {"kind": "exact"}}]
        else:
            raise ValueError(f"unknown: {part!r} in {name}")
    return Method(name=name, policy=policy, rates=rates)


def _quantized(bits: int, feedback: str, dtype: str = "float32") -> dict[str, Any]:
    state = {"kind": feedback} | ({"dtype": dtype} if feedback == "residual" else {})
    return {"codec": {"kind": "quantized", "bits": bits}, "feedback": state}


def _in_sites(name: str, parts: list[str]) -> Method:
    """A rank is a site, which exchanges changes."""
    sites: dict[str, Any] = {"outer": {"rate": 1.0, "momentum": 0.0}}
    rule: dict[str, Any] = {"codec": {"kind": "dense"}}
    for part in parts:
        option, _, value = part.rpartition(" ")
        if part == "every step":
            sites["every"] = 1
        elif option in ("every", "together"):
            sites[option] = int(value)
        elif option == "delay":
            sites |= {"delay": int(value), "alpha": 0.5}
        elif option == "outer momentum":
            sites["outer"] = {"rate": 0.7, "momentum": float(value)}
        elif part in ("4 bits", "8 bits"):
            rule = _quantized(int(option), "residual", "bfloat16")
        elif part in ("1 bit", "2 bits"):
            feedback = {"kind": "residual", "lead": 1.0, "dtype": "bfloat16"}
            rule = {"codec": {"kind": "matrix", "bits": int(option)}, "feedback": feedback}
        elif part == "no feedback":
            rule["feedback"] = {"kind": "none"}
            if rule["codec"]["kind"] == "quantized":
                rule["codec"] |= {"block": 256, "rounding": "nearest"}
        elif part != "32 bits":
            raise ValueError(f"unknown: {part!r} in {name}")
    rules = [{"when": {"role": _MATRICES, "min_numel": 1}, **rule}]
    return Method(name=name, policy={"schema": 1, "gradients": rules, "sites": sites})


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
# TAGC's setting: elements one by one, values not visibly rounded.
_SKETCH = {
    "when": {"min_numel": 1},
    "codec": {"kind": "sketch", "density": 0.2, "symbol": "int32x1"},
    "feedback": {"kind": "residual"},
}


def _matrix(code: str, **when: Any) -> dict[str, Any]:
    """A rule of a code for the matrices that ``when`` selects."""
    codec, lead, _ = _CODES[code]
    return {
        "when": {"min_numel": 1, **when},
        "codec": {"kind": "matrix", **codec},
        "feedback": {"kind": "residual", "lead": lead, "dtype": "float32"},
    }


# Muon has the blocks' matrices, Adam the embedding and the head.
_MUON = [_matrix("2 bits", role=["attention", "mlp"]), _matrix("1 bit")]
DENSE = Method(name="dense")
_OTHERS = {
    method.name: method
    for method in (
        *(Method(name=n, policy=n) for n in data_parallel_policies() if n != "dense"),
        DENSE,
        Method(name="sketch of 20%, residual", policy={"schema": 1, "gradients": [_SKETCH]}),
        Method(name="non-attn", policy=_TAGC),
        Method(name="2 bits, 1 bit outside blocks", policy={"schema": 1, "gradients": _MUON}),
        Method(name="DDP, loco-4bit", policy="loco-4bit", ddp=True),
        Method(name="DDP, one-bit", policy="one-bit", ddp=True),
        Method(name="DDP, PowerSGD of rank 4", ddp=True, powersgd=4),
        Method(name="DDP, PowerSGD of rank 16", ddp=True, powersgd=16),
    )
}

# Lines of the paired comparison, by the method that each one runs.
LINES = {
    "4 bits": "4 bits, residual, bfloat16 residual",
    "2 bits": "matrix, 2 bits",
    "1 bit": "matrix, 1 bit",
    "changes in 8 bits": "dense, changes in 8 bits",
    "changes in 4 bits": "dense, changes in 4 bits",
    "changes in 2 bits": "dense, changes in 2 bits",
    "4 bits, changes in 4 bits": "4 bits, residual, bfloat16 residual, changes in 4 bits",
    "1 bit, changes in 2 bits": "matrix, 1 bit, bfloat16 residual, changes in 2 bits",
    "8 bits, stateless": "8 bits, none, stochastic",
    "4 bits, stateless": "4 bits, none, stochastic",
    "4 bits in blocks of 32, stateless": "4 bits in blocks of 32, none, stochastic",
    "4 bits, stateless, to nearest": "4 bits, none, nearest",
    **{name: name for name in _OTHERS if name.startswith("DDP")},
    "attn-only": "attn-only",
    "non-attn": "non-attn",
}
# What a sweep compares without being asked.
METHODS = tuple(
    dict.fromkeys(
        (
            "dense",
            "4 bits, residual",
            "4 bits, average",
            "matrix, 1 bit, bfloat16 residual",
            "sketch of 20%, residual",
            *LINES.values(),
        )
    )
)
QUICK = ("dense", "4 bits, residual", "matrix, 1 bit")

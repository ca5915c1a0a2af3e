"""What is compared: ways to train the same model, one entry each; and the cells of a run.

A tagc policy needs no entry: its name or the path of its file is a method, and with ``@bf16``
behind it the parameters travel in bf16, too. If the policy itself has rules for parameters, that is
FSDP2's mixed precision, which computes in bf16 as well. With ``@ddp`` the model is not sharded. If
the policy has a section ``sites``, every rank is a site.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import tagc
from tagc.costs.auto import is_automatic

from ..records import Record
from .launch import UNLIMITED


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every method of a run shares: sizes of the byte-level GPT, sequences per rank and
    micro-batch, and backward passes per optimizer step. With a policy on hosts, gradients stay
    inside the host except for those of the last one."""

    width: int = 320
    layers: int = 8
    heads: int = 5
    context: int = 128
    batch: int = 1
    micro_batches: int = 1


@dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes:
        name: how ``--methods`` and the report call it.
        about: one line for the report.
        mixed_precision: FSDP2's ``MixedPrecisionPolicy(bf16, reduce_dtype=bf16)``, which computes
            in bf16, too.
        wire: dtype that travels, by messages whose receives are posted first; ``gloo`` leaves it to
            FSDP and gloo's collectives. With a policy it is for the parameters alone.
        policy: of ``tagc.wrap``: a name, a path or a mapping; None is dense.
        ddp: DDP instead of FSDP2: with torch's hook of this name, or ``plain``.
        apart: every rank trains the whole model on its own. With a policy it is a site.
    """

    name: str
    about: str
    mixed_precision: bool = False
    wire: Literal["gloo", "float32", "bfloat16"] = "gloo"
    policy: str | dict[str, Any] | None = None
    ddp: Literal["plain", "bf16", "PowerSGD"] | None = None
    apart: bool = False

    @property
    def definition(self) -> str:
        """Hash of everything that decides what it does: results of different definitions are not
        mixed."""
        content = asdict(self) | {"name": "", "about": ""}
        # So that it is that of earlier results.
        content = {k: v for k, v in content.items() if v or k not in ("ddp", "apart")}
        if self.policy is not None:
            content["policy"] = tagc.Policy.load(self.policy).hash
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def measures_link(self) -> bool:
        """Whether it chooses by the link that it finds, and so has to be made anew on each."""
        return self.policy is not None and is_automatic(tagc.Policy.load(self.policy))


_TAGC_PAPER = {
    "schema": 1,
    "about": "The TAGC paper's parameters and density, symbols of one element, no warm-up.",
    "gradients": [
        {
            "when": {"role": ["mlp", "embedding", "head"]},
            "codec": {"kind": "sketch", "density": 0.2, "symbol": "int32x1"},
            "feedback": {"kind": "residual", "dtype": "float32"},
        }
    ],
}
_MATRICES = {"role": ["attention", "mlp", "embedding", "head", "other"]}
_FOUR_BITS = {"codec": {"kind": "quantized", "bits": 4}, "feedback": {"kind": "none"}}
_EIGHT_BITS = {"codec": {"kind": "quantized", "bits": 8, "keep_for_backward": True}}
_ZERO_PLUS_PLUS = {
    "schema": 1,
    "about": "In the manner of ZeRO++: parameters in 8 bits, across hosts in forward only, and "
    "gradients in 4 bits without feedback.",
    "gradients": [{"when": _MATRICES, **_FOUR_BITS}],
    "parameters": [{"when": _MATRICES, **_EIGHT_BITS}],
}


def _delayed(name: str, delay: int) -> Method:
    sites = {"every": 32, "delay": delay, "alpha": 0.5}
    policy = {"schema": 1, "extends": "sites", "sites": sites}
    about = f"policy sites, training goes on for {delay} steps, alpha 0.5"
    return Method(name, about, policy=policy, apart=True)


ALONE = Method("alone", "no exchange between ranks", apart=True)
"""What sites are compared with."""

_ALL = (
    Method("fp32-gloo", "dense FSDP2, fp32, gloo's own collectives"),
    Method("fp32-messages", "dense FSDP2, fp32, by messages", wire="float32"),
    Method("bf16-gloo", "FSDP2 with MixedPrecisionPolicy(bf16, bf16), gloo's own collectives",
           mixed_precision=True),
    Method("bf16-wire-messages", wire="bfloat16",
           about="dense FSDP2, compute and sums in fp32, bf16 on the wire, by messages"),
    Method("tagc-paper", "the TAGC paper's parameters and density 0.2, no warm-up",
           policy=_TAGC_PAPER),
    Method("ddp-fp32", "DDP, gloo's own all-reduce", ddp="plain"),
    Method("ddp-bf16", "DDP with torch's hook for bf16", ddp="bf16"),
    Method("ddp-powersgd", "DDP with torch's PowerSGD hook, rank 4, one bucket", ddp="PowerSGD"),
    Method("zero++-like", policy=_ZERO_PLUS_PLUS,
           about="in the manner of ZeRO++ (2306.10209): parameters in 8 bits in each forward, "
           "gradients in 4 bits without feedback"),
    _delayed("sites-delayed", 4),
    _delayed("sites-delayed-8", 8),
)  # fmt: skip
METHODS = {method.name: method for method in _ALL}
# Measured by default, besides all of the above but sites.
_POLICIES = ("loco-4bit@bf16", "hybrid", "hosts", "thrifty", "stateless", "auto")
DEFAULT = (*(name for name, method in METHODS.items() if not method.apart), *_POLICIES)


def resolve(name: str) -> Method:
    """The method of a name: one of ``METHODS``, ``POLICY``, ``POLICY@bf16`` or ``POLICY@ddp``.

    Raises:
        ValueError: if there is neither such a method nor such a policy.
    """
    if name in METHODS:
        return METHODS[name]
    policy, _, gather = name.partition("@")
    if gather not in ("", "bf16", "ddp"):
        raise ValueError(f"{name!r}: after a policy's name only @bf16 and @ddp are known")
    try:
        loaded = tagc.Policy.load(policy)
    except ValueError as error:
        known = ", ".join(METHODS)
        raise ValueError(f"{name!r} is no method ({known}) and no policy: {error}") from None
    apart = loaded.sites is not None
    if gather and apart:
        raise ValueError(f"{name!r}: every rank is a site and has the whole model, so leave out @")
    method = Method(name=name, about=f"tagc policy: {loaded.about}", policy=policy, apart=apart)
    if gather == "ddp":
        return replace(method, ddp="plain", about=f"{method.about} With DDP.")
    if gather and loaded.parameters:
        about = f"{method.about} With MixedPrecisionPolicy(bf16, bf16)."
        return replace(method, mixed_precision=True, about=about)
    half = {"wire": "bfloat16", "about": f"{method.about} Parameters in bf16."}
    return replace(method, **half) if gather else method


def keys(args: argparse.Namespace, ranks: int) -> Iterator[tuple[Record, Method | None]]:
    """The cells of a run with so many ranks: what is measured, and the method; without one, it is
    the link. Sites are not measured on the unlimited one."""
    for rate in args.rates:
        yield cell_key(args, ranks, rate), None
        for method in args.methods:
            if not method.apart or rate != UNLIMITED:
                yield cell_key(args, ranks, rate, method), method


def cell_key(
    args: argparse.Namespace, ranks: int, rate: str, method: Method | None = None
) -> Record:
    """Everything that the numbers of a cell depend on, except the machine."""
    kind = "link" if method is None else "sites" if method.apart else "step"
    settings = asdict(args.settings)
    key: Record = {"kind": kind, "ranks": ranks, "rate": rate, "settings": settings}
    if args.ranks_per_host > 1:
        key["ranks_per_host"] = args.ranks_per_host
    if args.latency:
        key["latency"] = args.latency
    if kind == "sites" and args.step_time is not None:
        key["step_time"] = args.step_time
    if method is not None:
        key |= {"method": method.name, "definition": method.definition}
    return key

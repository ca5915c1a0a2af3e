"""What is compared: a registry of ways to train the same model, one entry each.

A tagc policy needs no entry: its name, or the path of its file, is a method, and with ``@bf16``
behind it the parameters travel in bf16, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import tagc
from tagc.costs import is_automatic

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train.

    Attributes:
        name: how ``--methods`` and the report call it.
        about: one line for the report.
        sharding: ``fsdp2``, or ``fsdp1`` with torch's ``bf16_compress_hook``.
        mixed_precision: FSDP2's ``MixedPrecisionPolicy(bf16, reduce_dtype=bf16)``: computes in
            bf16, too.
        gather: dtype in which parameters travel; ``bfloat16`` here casts on the wire alone and
            leaves the compute in fp32.
        reduce: ``gloo`` for the backend's own reduce-scatter, else the dtype in which gradients
            travel by all-to-all, summed in fp32. A policy replaces it.
        messages: what tagc does not send goes both ways by point-to-point messages with the
            receives posted first, where gloo's collectives use a link half.
        policy: of ``tagc.wrap``: a name, a path or a mapping; None is dense.
        published: whether the report adds what the bytes of the TAGC paper's own formats would
            be, computed on paper.
    """

    name: str
    about: str
    sharding: Literal["fsdp2", "fsdp1"] = "fsdp2"
    mixed_precision: bool = False
    gather: Dtype = "float32"
    reduce: Literal["gloo", "float32", "bfloat16"] = "gloo"
    messages: bool = False
    policy: str | dict[str, Any] | None = None
    published: bool = False

    @property
    def definition(self) -> str:
        """Hash of all that decides what it does: results of another definition are not mixed."""
        content = asdict(self) | {"name": "", "about": ""}
        if self.policy is not None:
            content["policy"] = tagc.Policy.load(self.policy).hash
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def measures_link(self) -> bool:
        """Whether it chooses by the link that it finds, and so has to be made anew on each."""
        if self.policy is None:
            return False
        return is_automatic(tagc.Policy.load(self.policy))


TAGC_PAPER: dict[str, Any] = {
    "schema": 1,
    "about": "The TAGC paper's parameters, density and symbols, without a warm-up.",
    "gradients": [
        {
            "when": {"role": ["mlp", "embedding", "head"]},
            "codec": {"kind": "sketch", "density": 0.2, "symbol": "float32"},
            "feedback": {"kind": "residual", "dtype": "float32"},
        }
    ],
}

_MATRICES = {"role": ["attention", "mlp", "embedding", "head", "other"]}
ZERO_PLUS_PLUS: dict[str, Any] = {
    "schema": 1,
    "about": "In the manner of ZeRO++: parameters in 8 bits, across hosts in forward only, and "
    "gradients in 4 bits without feedback.",
    "gradients": [
        {
            "when": _MATRICES,
            "codec": {"kind": "quantized", "bits": 4},
            "feedback": {"kind": "none"},
        }
    ],
    "parameters": [
        {"when": _MATRICES, "codec": {"kind": "quantized", "bits": 8, "keep_for_backward": True}}
    ],
}

METHODS = {
    method.name: method
    for method in (
        Method(name="fp32-gloo", about="dense FSDP2, fp32, gloo's own reduce-scatter"),
        Method(
            name="fp32", about="dense FSDP2, fp32, all-to-all and a local sum", reduce="float32"
        ),
        Method(
            name="bf16-gloo",
            about="FSDP2 with MixedPrecisionPolicy(bf16, bf16), gloo's own reduce-scatter",
            mixed_precision=True,
        ),
        Method(
            name="bf16",
            about="FSDP2 with MixedPrecisionPolicy(bf16, bf16), all-to-all and a sum in fp32",
            mixed_precision=True,
            reduce="bfloat16",
        ),
        Method(
            name="bf16-wire",
            about="FSDP2, compute in fp32, bf16 on the wire both ways, sums in fp32",
            gather="bfloat16",
            reduce="bfloat16",
        ),
        Method(
            name="fp32-messages",
            about="as fp32, by messages with receives posted first instead of gloo's collectives",
            reduce="float32",
            messages=True,
        ),
        Method(
            name="bf16-wire-messages",
            about="as bf16-wire, by messages with receives posted first",
            gather="bfloat16",
            reduce="bfloat16",
            messages=True,
        ),
        Method(
            name="fsdp1-bf16-hook",
            about="FSDP1 with torch's bf16_compress_hook; parameters in fp32",
            sharding="fsdp1",
        ),
        Method(
            name="tagc-paper",
            about="the TAGC paper's parameters, density 0.2 and float32 symbols, no warm-up",
            policy=TAGC_PAPER,
            published=True,
        ),
        Method(
            name="zero++-like",
            about="in the manner of ZeRO++ (2306.10209): parameters in 8 bits in each forward, "
            "gradients in 4 bits without feedback",
            policy=ZERO_PLUS_PLUS,
        ),
    )
}

# Those of them that this version of tagc ships are measured by default.
POLICIES = (
    "non-attn",
    "non-attn@bf16",
    "packed-20",
    "loco-4bit",
    "loco-4bit@bf16",
    "hybrid",
    "hosts",
    "thrifty",
    "stateless",
)
QUICK = ("fp32", "bf16-wire", "non-attn")


def default_methods() -> list[str]:
    """All registered methods, then the built-in policies worth comparing."""
    shipped = tagc.policies()
    return [*METHODS, *(name for name in POLICIES if name.partition("@")[0] in shipped)]


def resolve(name: str) -> Method:
    """The method of a name: one of ``METHODS``, or ``POLICY``, or ``POLICY@bf16``.

    Raises:
        ValueError: if there is neither such a method nor such a policy.
    """
    if name in METHODS:
        return METHODS[name]
    policy, _, gather = name.partition("@")
    if gather not in ("", "bf16"):
        raise ValueError(f"{name!r}: behind a policy's name only @bf16 is known")
    try:
        loaded = tagc.Policy.load(policy)
    except ValueError as error:
        known = ", ".join(METHODS)
        raise ValueError(f"{name!r} is no method ({known}) and no policy: {error}") from None
    method = Method(name=name, about=f"tagc policy: {loaded.about}", policy=policy)
    if not gather:
        return method
    if loaded.parameters:
        raise ValueError(f"{name!r}: this policy has rules for parameters, so leave @bf16 away")
    about = f"{method.about} Parameters in bf16."
    return replace(method, gather="bfloat16", messages=True, about=about)


def resolve_all(names: Iterable[str]) -> list[Method]:
    """The methods of all names, each once, in this order."""
    return [resolve(name) for name in dict.fromkeys(names)]

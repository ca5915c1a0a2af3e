"""A model and its batches, a recipe that all methods share, and the settings of the paired
comparison."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..records import Record
from .methods import DENSE, LINES, Method

BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model and its batches; the default has 0.86 M parameters.

    Attributes:
        family: ``gpt``, or ``llama``, which reads Python's documentation instead of its sources,
            and whose head is its own.
        vocabulary: 256 is bytes; more is words.
        tied: embedding and head are one parameter, and weights start at 0.02 as in nanoGPT.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64
    ranks: int = 4
    batch: int = 8
    vocabulary: int = BYTES
    tied: bool = False
    family: Literal["gpt", "llama"] = "gpt"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that all methods of a comparison share.

    Attributes:
        optimizer: ``adamw``, ``muon``, ``sgd`` or ``lion``.
        beta2: Adam's second momentum; the first is 0.9.
        clip: limit on the norm of the gradient; None for no limit.
        floor: end of the cosine schedule, as a share of the rate.
        windows: held-out windows of text, evenly spaced, the same for all runs.
        averaged: the loss is the mean of this many evaluations over the last 4% of the steps.
        evaluations: in a run, evenly spaced; those that count come in addition.
        half: FSDP2 computes in bfloat16 and gathers parameters in it; gradients are reduced in
            float32. On a CPU products are computed in float32 and rounded.
        half_reduced: with ``half``, gradients are reduced in bfloat16.
        kept: tagc keeps the optimizer's rates and the limit at what they mean for dense gradients
            (:meth:`tagc.Compressor.keep_rates`).
    """

    optimizer: str = "adamw"
    beta2: float = 0.95
    clip: float | None = 1.0
    floor: float = 0.1
    windows: int = 256
    averaged: int = 1
    evaluations: int = 10
    half: bool = False
    half_reduced: bool = False
    kept: bool = False

    def last_evaluations(self, steps: int) -> list[int]:
        """The steps after which the loss counts."""
        apart = 0.04 * steps / max(1, self.averaged - 1)
        return sorted({max(1, round(steps - i * apart)) for i in range(self.averaged)})


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    method: Method
    shape: Shape
    steps: int
    rate: float
    seed: int = 0
    recipe: Recipe = Recipe()

    @property
    def key(self) -> Record:
        """Everything that the result depends on, except the machine. Defaults of ``vocabulary``,
        ``tied``, ``family`` and the recipe are left out, so a new one does not change old keys."""
        defaults = {**asdict(Recipe()), "vocabulary": BYTES, "tied": False, "family": "gpt"}
        given = asdict(self.shape) | asdict(self.recipe)
        own = {"ddp": True, "powersgd": self.method.powersgd} if self.method.ddp else {}
        return {
            "policy": self.method.policy,
            **own,
            **{k: v for k, v in given.items() if k not in defaults or v != defaults[k]},
            "steps": self.steps,
            "rate": self.rate,
            "seed": self.seed,
        }


NANO = Shape(ranks=2, batch=12, tied=True)
"""nanoGPT's model for CPUs: 4 layers of width 128, 64 tokens."""

NANO_RECIPE = Recipe(beta2=0.99)
"""nanoGPT's optimizer for it."""

PAIRED = Recipe(floor=0.0, windows=2048, averaged=3)
"""For comparisons seed by seed: the rate ends at zero, and the held-out set is large."""

GPT2 = Shape(width=768, layers=12, heads=12, context=1024, batch=8, vocabulary=24_576, tied=True)
"""GPT-2 small with half of its vocabulary, on 4 ranks: 104.7 M parameters."""

GPT2_RECIPE = Recipe(windows=128, averaged=3, evaluations=16, half=True)
"""nanoGPT's for it."""

SMALL = Shape(width=64, layers=2, heads=2)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs of a paired comparison share.

    Attributes:
        rates: dense's first learning rates, neighbours in ``GRID``, times ``unit``.
        max_rates: end the sweep after this many rates, wherever the best is.
        dense: what the lines are compared with. In so small a model DDP is 4 to 6 times as fast as
            FSDP2; the losses differ by rounding.
        lines: what is compared unless the command names others.
    """

    name: str
    shape: Shape = SMALL
    steps: int = 600
    recipe: Recipe = PAIRED
    rates: tuple[float, ...] = (6e-3, 9e-3, 1.2e-2)
    unit: float = 1.0
    max_rates: int = 5
    dense: Method = DENSE
    lines: tuple[str, ...] = tuple(LINES)

    def run(self, method: Method, rate: float, seed: int, *, kept: bool) -> Run:
        """A run in this setting."""
        recipe = replace(self.recipe, kept=kept)
        given = {"shape": self.shape, "steps": self.steps, "rate": rate, "seed": seed}
        return Run(method=method, recipe=recipe, **given)


def _setting(
    name: str, *, shape: Any = (), recipe: Any = (), rate: float | None = None, **given: Any
) -> Setting:
    """Changes of the first setting. ``rate``: dense's, which is not swept then."""
    if rate is not None:
        given |= {"rates": (rate,), "max_rates": 1}
    shapes, recipes = replace(SMALL, **dict(shape)), replace(PAIRED, **dict(recipe))
    return Setting(name=name, shape=shapes, recipe=recipes, **given)


def _sites(name: str, sites: int, batch: int | None = None, **given: Any) -> Setting:
    """At the rate of 2 ranks. Without ``batch``, the sites share the batch of one."""
    muon = "Muon" in name
    return _setting(
        name,
        shape={"ranks": sites, "batch": batch or 32 // sites},
        recipe={"averaged": 1, "optimizer": "muon" if muon else "adamw"},
        **{"rate": 1.8e-2 if muon else 9e-3, **given},
    )


def _whole(name: str, sites: int) -> Setting:
    """Every site has the batch that it would train with alone, at its rate; see DiLoCo's papers."""
    lines = ("sites, every 32, 2 bits, outer momentum 0.5",)
    return _sites(name, sites, batch=32, steps=2000, dense=_DDP, lines=lines)


_DDP = replace(DENSE, ddp=True)
_LLAMA = (
    "attn-only", "thrifty", "one-bit", "hosts", "hybrid", "loco-4bit", "two-bit", "stateless",
)  # fmt: skip
_LARGER = {"width": 128, "layers": 4, "heads": 4}
_HALF = {"half": True, "windows": 1024, "evaluations": 3}
_BF16: dict[str, Any] = {
    "shape": _LARGER | {"batch": 4},
    "steps": 300,
    "rate": 4.5e-3,
    "lines": ("1 bit", "hosts", "attn-only", "thrifty", "4 bits", "2 bits"),
}
_LARGE = {"width": 544, "layers": 6, "heads": 17, "ranks": 2, "batch": 4}

# After the first setting, each one changes one thing.
_ALL = (
    _setting("2 k tokens, 4 ranks, AdamW"),
    # The same tokens a step, on fewer or more ranks.
    _setting("2 ranks", shape={"ranks": 2, "batch": 16}),
    _setting("16 ranks", shape={"ranks": 16, "batch": 2}),
    # Less gradient noise, which could hide the codec's.
    _setting("8 k tokens", shape={"batch": 32}, steps=300),
    _setting("32 k tokens", shape={"batch": 128}, steps=150),
    # An embedding and a head of many rows, most of which no token of a step touches.
    _setting("8 k words", shape={"vocabulary": 8192}, steps=400, max_rates=3),
    _setting("2000 steps", steps=2000),
    _setting("width 128, 4 layers", shape=_LARGER),
    _setting("21.6 M parameters", shape=_LARGE, steps=1000, rate=1e-3),  # hours
    _setting("Muon", recipe={"optimizer": "muon"}),
    _setting("SGD", recipe={"optimizer": "sgd"}, unit=50.0),
    _setting("Lion", recipe={"optimizer": "lion"}, unit=0.1),
    _setting("beta2 0.999", recipe={"beta2": 0.999}),
    _setting("no clipping", recipe={"clip": None}),
    # Shipped policies leave the matrices of a smaller model uncompressed.
    _setting("bf16", recipe=_HALF, **_BF16),
    _setting("bf16, also reduced in it", recipe=_HALF | {"half_reduced": True}, **_BF16),
    _setting("llama", shape={"family": "llama", "width": 192, "heads": 6, "batch": 4},
             recipe={"windows": 1024}, steps=300, rate=3e-3, lines=_LLAMA),
    _sites("2 sites", 2),
    _sites("8 sites", 8),
    _sites("2 sites, 3000 steps", 2, steps=3000),
    _sites("2 sites, 10000 steps", 2, steps=10_000, rate=None, rates=(6e-3, 9e-3), max_rates=2),
    _sites("8 sites, 3000 steps", 8, steps=3000),
    _sites("8 sites, 10000 steps", 8, steps=10_000, dense=_DDP),
    _sites("2 sites, Muon", 2),
    _sites("2 sites, Muon, 3000 steps", 2, steps=3000),
    _sites("2 sites, Muon, 10000 steps", 2, steps=10_000, dense=_DDP),
    _whole("2 sites, full batches", 2),
    _whole("2 sites, full batches, Muon", 2),
    _whole("8 sites, full batches", 8),
    _whole("8 sites, full batches, Muon", 8),
)  # fmt: skip
SETTINGS = {setting.name: setting for setting in _ALL}

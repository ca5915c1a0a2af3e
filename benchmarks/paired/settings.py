"""What all runs of a comparison share; beside the first setting, one thing is changed in each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..convergence.recipe import PAIRED, Recipe
from ..convergence.training import Shape

_SHAPE = Shape(width=64, layers=2, heads=2)
_ADAM = (6e-3, 9e-3, 1.2e-2)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs of a comparison share.

    Attributes:
        rates: of dense, to begin a sweep with; neighbours in ``GRID``, times ``unit``.
        max_rates: end the sweep with so many, wherever the best is.
    """

    name: str
    shape: Shape = _SHAPE
    steps: int = 600
    recipe: Recipe = PAIRED
    rates: tuple[float, ...] = _ADAM
    unit: float = 1.0
    max_rates: int = 5


def _with(name: str, recipe: Recipe = PAIRED, **given: object) -> Setting:
    return Setting(name=name, recipe=recipe, **given)  # pyright: ignore[reportArgumentType]


_ALL = (
    Setting(name="2 k tokens, 4 ranks, AdamW"),
    # The same tokens in a step, from fewer ranks or more.
    Setting(name="2 ranks", shape=replace(_SHAPE, ranks=2, batch=16)),
    Setting(name="16 ranks", shape=replace(_SHAPE, ranks=16, batch=2)),
    # Less noise of gradients to hide that of codecs.
    Setting(name="8 k tokens", shape=replace(_SHAPE, batch=32), steps=300),
    Setting(name="32 k tokens", shape=replace(_SHAPE, batch=128), steps=150),
    # An embedding and a head of many rows, most of which no token of a step touches.
    Setting(name="8 k words", shape=replace(_SHAPE, vocabulary=8192), steps=400, max_rates=3),
    Setting(name="2000 steps", steps=2000),
    Setting(name="width 128, 4 layers", shape=Shape()),
    Setting(
        name="21.6 M parameters",  # hours: its rate is not swept
        shape=Shape(width=544, layers=6, heads=17, ranks=2, batch=4),
        steps=1000,
        rates=(1e-3,),
        max_rates=1,
    ),
    _with("Muon", replace(PAIRED, optimizer="muon")),
    _with("SGD", replace(PAIRED, optimizer="sgd"), unit=50.0),
    _with("Lion", replace(PAIRED, optimizer="lion"), unit=0.1),
    _with("beta2 0.99", replace(PAIRED, beta2=0.99)),
    _with("beta2 0.999", replace(PAIRED, beta2=0.999)),
    _with("no clipping", replace(PAIRED, clip=None)),
)
SETTINGS = {setting.name: setting for setting in _ALL}

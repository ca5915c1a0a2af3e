"""The section `sites` of a policy: when sites exchange changes of parameters, and what they do with
the average."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import Field

from tagc.codecs.config import Strict, unit
from tagc.policy.document import Problem
from tagc.policy.rules import AutoConfig, Rule, check_lead

Steps = Annotated[int, Field(ge=1, le=2**31 - 1), unit("optimizer steps")]


class OuterConfig(Strict):
    """The optimizer that applies the average of the sites' changes: SGD with Nesterov momentum, as
    in DiLoCo (arXiv 2311.08105). `rate: 1` and `momentum: 0` average the parameters."""

    rate: Annotated[float, Field(ge=1e-6, le=100), unit("times the average")] = 0.7
    """Learning rate."""
    momentum: Annotated[float, Field(ge=0, lt=1), unit("share of the momentum")] = 0.9
    """Nesterov momentum. It needs 4 bytes per parameter of the own shard; 0 needs none."""


class SitesConfig(Strict):
    """When sites exchange changes of parameters (`tagc.sites`), and what they do with the average.
    The rules for `gradients` say how the changes are sent.
    """

    every: Steps = 32
    """How many optimizer steps a site takes between two exchanges of the same parameters."""
    together: Annotated[int, Field(ge=0, le=2**31 - 1), unit("optimizer steps")] = 0
    """How many of the first optimizer steps are each followed by an exchange of all parameters,
    averaged, as in post-local SGD (arXiv 1808.07217): while the loss falls steeply, sites that
    train apart fall behind. Each of these steps sends as much as `every` later ones."""
    fragments: Annotated[int, Field(ge=1, le=2**16), unit("parts")] = 1
    """In how many parts the model is exchanged, at staggered steps."""
    delay: Annotated[int, Field(ge=0, le=2**31 - 1), unit("optimizer steps")] = 0
    """How many optimizer steps an exchange may take. Training goes on meanwhile; then the average
    is applied. 0 waits for it. It must be less than `every` / `fragments`."""
    alpha: Annotated[float, Field(ge=0, lt=1), unit("share of the parameter")] = 0.0
    """The share of a site's own parameters that stays when the average is applied; the rest is the
    new common value. With `delay`, more than 0 keeps some of the progress made meanwhile."""
    outer: OuterConfig = OuterConfig()
    """How the average of the changes is applied."""

    @property
    def spacing(self) -> int:
        """The fewest optimizer steps between the exchanges of two fragments."""
        return self.every // self.fragments


def problems_of_sites(
    sites: SitesConfig, rules: Sequence[Rule], others: Mapping[str, object]
) -> Iterator[Problem]:
    """What is wrong with a policy for sites.

    Args:
        rules: its rules for `gradients`.
        others: its other rules, by key.
    """
    if sites.spacing < 1:
        text = f"{sites.fragments} fragments cannot be due at different ones of {sites.every} steps"
        yield Problem(("sites", "fragments"), text)
    elif sites.delay >= sites.spacing:
        text = (
            f"an exchange of {sites.delay} steps ends after the next one begins, {sites.spacing} "
            "steps later (every / fragments): give fewer"
        )
        yield Problem(("sites", "delay"), text)
    for key in (key for key, value in others.items() if value):
        text = (
            "sites exchange changes of parameters by the rules for gradients: leave this out, and "
            "give tagc.wrap a policy of its own for the traffic inside a site"
        )
        yield Problem((key,), text)
    for i, rule in enumerate(rules):
        try:
            check_lead(rule)
        except ValueError as error:
            yield Problem(("gradients", i), str(error))
        if isinstance(rule.codec, AutoConfig):
            text = "codec 'auto' chooses by the time of a step, which sites do not wait for"
            yield Problem(("gradients", i, "codec"), text)

"""The canonical forms of policies and plans say all that they must, and nothing of names in the
code."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest
import torch

from golden.identities import OPTIONS, plans
from tagc.codecs.dense import DenseConfig
from tagc.codecs.quantized import QuantizedPlan
from tagc.plan import Plan
from tagc.policy import Policy, json_schema
from tagc.policy.canonical import _part

# What policies only say; the one schema that there is.
SAID = {
    "policy.schema",
    "policy.about",
    "policy.tuning",
    "Tuning.rate_factor",
    "Tuning.norm_factor",
}
# What changes no number, or follows from the rest on every rank by itself.
LEFT_OUT = {
    "UnitInfo.native",
    *(f"UnitParam.{name}" for name in ("local", "box", "duplicate", "frozen", "special")),
    *(f"MessagePlan.{name}" for name in ("made", "read", "rows", "for_all", "sent")),
}
PLANS = dict(plans())


def changed(value: Any) -> Any:
    """Another value than a leaf of a plan has."""
    if isinstance(value, torch.dtype):
        return torch.float64
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, tuple):
        return (*value, 9)
    return 7 if value is None else value + 1


def leaves(node: Any) -> Iterator[tuple[Any, str]]:
    """Every field of a plan's dataclasses that has none in it, with the object it is of."""
    if isinstance(node, tuple):
        for item in node:
            yield from leaves(item)
    elif is_dataclass(node):
        for field in fields(node):
            value = getattr(node, field.name)
            inner = value if isinstance(value, tuple) else (value,)
            if any(is_dataclass(item) or isinstance(item, tuple) for item in inner):
                yield from leaves(value)
            elif (value is not None and value != ()) or field.name in ("feedback", "start", "rule"):
                yield node, field.name


def test_every_option_of_the_schema_is_here() -> None:
    schema = json.loads(json_schema())
    definitions = {"policy": schema} | schema["definitions"]
    keys = {f"{name}.{key}" for name, of in definitions.items() for key in of["properties"]}
    assert {option.split()[0] for option in OPTIONS} == keys - SAID


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_changes_the_hash(option: str) -> None:
    without, with_it = (Policy.load(policy) for policy in OPTIONS[option])
    assert without.hash != with_it.hash


def test_a_new_option_by_default_does_not() -> None:
    class Later(DenseConfig):
        later: int = 0

    policy = Policy.load("dense")
    (rule,) = policy.gradients
    rules = (rule.model_copy(update={"codec": Later()}),)
    assert policy.model_copy(update={"gradients": rules}).hash == policy.hash


def test_all_that_a_plan_has_changes_the_fingerprint() -> None:
    found: set[str] = set()
    for plan in PLANS.values():
        units = copy.deepcopy(plan.all_units)
        plan = Plan(plan.policy, units)
        before = plan.fingerprint
        for node, name in leaves(units):
            what = f"{type(node).__name__}.{name}"
            if what in found:
                continue
            found.add(what)
            value = getattr(node, name)
            object.__setattr__(node, name, changed(value))
            try:
                after = Plan(plan.policy, units).fingerprint
            except (AssertionError, AttributeError):
                after = "no plan"
            object.__setattr__(node, name, value)
            assert (after == before) == (what in LEFT_OUT), what
    assert {"Cut.length", "LeadFeedback.lead", "SketchLayout.hashes", "FlatBuffer.columns"} <= found


@dataclass(frozen=True, kw_only=True)
class Later(QuantizedPlan):
    """With a field more."""

    later: int = 0


@dataclass(frozen=True, kw_only=True)
class Renamed:
    """A ``BlockLayout`` by other names."""

    elements: int
    width: int
    together: int
    numel = property(lambda self: self.elements)
    bits = property(lambda self: self.width)
    block = property(lambda self: self.together)


def test_names_in_the_code_do_not() -> None:
    plan = PLANS["gradients | quantized 4 average | 2 ranks"]
    (unit,) = copy.deepcopy(plan.all_units)
    segment, *_ = unit.compressed
    codec = segment.codec
    assert isinstance(codec, QuantizedPlan)
    layout = codec.layout
    renamed: Any = Renamed(elements=layout.numel, width=layout.bits, together=layout.block)
    later = Later(layout=renamed, feedback=codec.feedback)
    object.__setattr__(segment, "codec", later)
    assert Plan(plan.policy, (unit,)).fingerprint == plan.fingerprint


class LaterConfig(DenseConfig):
    """A configuration with a key that version 1 of the form does not know."""

    later: int = 3


def test_a_later_key_counts_unless_it_has_its_default() -> None:
    assert _part(LaterConfig()) == _part(DenseConfig())
    assert _part(LaterConfig(later=4)) == _part(DenseConfig()) | {"later": 4}

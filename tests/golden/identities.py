"""Policies and plans whose hashes a checkpoint may have: every option, and every kind of unit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import tagc
from golden.messages import GRADIENTS, PARAMETERS
from tagc.plan import FlatBuffer, Plan, UnitInfo, UnitParam, build_plan
from tagc.policy import Policy

DENSE = {"when": {}, "codec": {"kind": "dense"}}


def _rule(codec: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"schema": 1, "gradients": [{"when": {}, "codec": codec, **more}]}


def _parameters(codec: dict[str, Any]) -> dict[str, Any]:
    return {"schema": 1, "gradients": [DENSE], "parameters": [{"when": {}, "codec": codec}]}


def _owing(feedback: dict[str, Any]) -> dict[str, Any]:
    return _rule({"kind": "quantized"}, feedback=feedback)


def _when(**when: Any) -> dict[str, Any]:
    return {"schema": 1, "gradients": [DENSE | {"when": when}]}


def _dimension(codec: dict[str, Any]) -> dict[str, Any]:
    return {"schema": 1, "gradients": [DENSE], "dimensions": {"tp": {"codec": codec}}}


def _sites(sites: dict[str, Any]) -> dict[str, Any]:
    return {"schema": 1, "gradients": [DENSE], "sites": sites}


def _outer(outer: dict[str, Any]) -> dict[str, Any]:
    return _sites({"outer": outer})


def _in(wrap: Any, base: dict[str, Any], **options: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """For every option, by its name, the document without and with it."""
    for key, value in options.items():
        yield key, (wrap(base), wrap(base | {key: value}))


_AVERAGE = {"kind": "average"}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"{name}.{key}": pair
    for name, found in {
        "AutoConfig": [
            ("kind", (_rule({"kind": "quantized"}), _rule({"kind": "auto"}))),
            *_in(_rule, {"kind": "auto"}, min_bits=8),
        ],
        "AutoParametersConfig": [
            ("kind", (_parameters({"kind": "quantized"}), _parameters({"kind": "auto"}))),
            *_in(_parameters, {"kind": "auto"}, min_bits=16, memory=0.5),
        ],
        "DeltaConfig": [
            ("kind", (_parameters({"kind": "auto"}), _parameters({"kind": "delta"}))),
            *_in(_parameters, {"kind": "delta"}, bits=2, block=64, rounding="stochastic"),
        ],
        "DenseConfig": [
            ("kind", (_rule({"kind": "auto"}), _rule({"kind": "dense"}))),
            *_in(_rule, {"kind": "dense"}, wire="bfloat16"),
        ],
        "FeedbackConfig": [
            ("kind", (_owing({"kind": "residual"}), _owing({"kind": "none"}))),
            *_in(_owing, {"kind": "residual"}, dtype="bfloat16", lead=0.65),
            *_in(_owing, _AVERAGE, beta=0.5, reset_steps=512),
            ("lead measured", (_owing({"lead": 0.65}), _owing({"lead": "measured"}))),
        ],
        "MatrixConfig": [
            ("kind", (_rule({"kind": "auto"}), _rule({"kind": "matrix"}))),
            *_in(_rule, {"kind": "matrix"}, bits=2, group=8, level=1.3, warmup_steps=3),
        ],
        "QuantizedConfig": [
            ("kind", (_rule({"kind": "auto"}), _rule({"kind": "quantized"}))),
            *_in(_rule, {"kind": "quantized"}, bits=8, block=32),
            (
                "rounding",
                (_owing({"kind": "none"}), _rule({"kind": "quantized", "rounding": "stochastic"})),
            ),
        ],
        "QuantizedParametersConfig": [
            ("kind", (_parameters({"kind": "delta"}), _parameters({"kind": "quantized"}))),
            *_in(_parameters, {"kind": "quantized"}, bits=4, block=32, keep_for_backward=True),
        ],
        "QuantizedActivationsConfig": [
            ("kind", (_when(), _dimension({"kind": "quantized"}))),
            *_in(_dimension, {"kind": "quantized"}, bits=4, block=32, rounding="stochastic"),
        ],
        "SketchConfig": [
            ("kind", (_rule({"kind": "auto"}), _rule({"kind": "sketch", "density": 0.2}))),
            *_in(
                _rule,
                {"kind": "sketch", "density": 0.2},
                density=1,
                symbol="int16x2",
                support="shared",
                warmup_steps=40,
            ),
        ],
        "When": [
            (key, (_when(), _when(**{key: value})))
            for key, value in {
                "role": ["mlp", "head"],
                "name": ["b.*", "a.é*"],
                "layers": "4-11",
                "min_numel": 0,
                "max_numel": 2**40,
            }.items()
        ],
        "Rule": [
            ("when", (_when(), _when(role="mlp"))),
            ("codec", (_rule({"kind": "dense"}), _rule({"kind": "matrix"}))),
            ("feedback", (_owing({"kind": "average"}), _owing({"kind": "residual"}))),
        ],
        "DimensionRule": [
            (
                "codec",
                (_dimension({"kind": "quantized"}), _dimension({"kind": "quantized", "bits": 4})),
            )
        ],
        "SitesConfig": [
            *_in(
                _sites, {}, every=16, together=9, fragments=2, delay=3, alpha=0.5, outer={"rate": 1}
            )
        ],
        "OuterConfig": [*_in(_outer, {}, rate=0.5, momentum=0)],
        "ParameterRule": [
            (
                "when",
                (
                    _parameters({"kind": "delta"}),
                    {
                        **_parameters({"kind": "delta"}),
                        "parameters": [{"when": {"role": "mlp"}, "codec": {"kind": "delta"}}],
                    },
                ),
            ),
            ("codec", (_parameters({"kind": "dense"}), _parameters({"kind": "delta"}))),
        ],
        "policy": [
            ("gradients", (_when(), {"schema": 1, "gradients": [DENSE, DENSE]})),
            ("parameters", (_when(), _parameters({"kind": "dense"}))),
            ("replicas", (_when(), _when() | {"replicas": [DENSE]})),
            ("dimensions", (_when(), _dimension({"kind": "quantized"}))),
            ("sites", (_when(), _sites({}))),
            ("inside", (_when(), _when() | {"inside": "int8"})),
            ("roles", (_when(), _when() | {"roles": {"mlp": ["b", "a"], "head": "c"}})),
            ("extends", (_when(), {"schema": 1, "extends": "hybrid"})),
        ],
    }.items()
    for key, pair in found
}
"""By definition and key of the JSON Schema two policies, which differ in this option."""

SHAPES = {"layers.4.attn.wq": (96, 70), "layers.4.mlp.up": (33, 128), "layers.4.norm": (33,)}


def _unit(ranks: int, *, dim: int = 0, **options: Any) -> UnitInfo:
    params = tuple(
        UnitParam(
            name=f"{name}.weight",
            shape=shape,
            dim=dim if len(shape) > 1 else 0,
            columns=-(-shape[d] // ranks) * math.prod(shape) // shape[d],
            local=(*shape[:d], -(-shape[d] // ranks), *shape[d + 1 :]),
        )
        for name, shape in SHAPES.items()
        for d in [dim if len(shape) > 1 else 0]
    )
    return UnitInfo(
        **{"name": "layers.4", "params": params, "world_size": ranks, "dtype": torch.float32}
        | options
    )


def _flat(ranks: int) -> UnitInfo:
    """FSDP1's."""
    start, params = 0, []
    for name, shape in SHAPES.items():
        size = math.prod(shape)
        params.append(UnitParam(name=f"{name}.weight", shape=shape, start=start, columns=size))
        start += size
    columns = -(-start // ranks)
    params = tuple(replace(p, columns=min(p.columns, columns)) for p in params)
    flat = FlatBuffer(columns=columns, whole=True)
    return UnitInfo(name="", params=params, world_size=ranks, dtype=torch.bfloat16, flat=flat)


def plans() -> Iterator[tuple[str, Plan]]:
    """By what is special about them."""
    rules = {"when": {"name": ["*.wq.*", "*.up.*"]}}

    def planned(policy: dict[str, Any], infos: list[UnitInfo], **more: Any) -> Plan:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of units that cost more compressed
            return build_plan(infos, Policy.load({"schema": 1, **policy}), **more)

    for name, (codec, feedback) in GRADIENTS.items():
        of = {
            "gradients": [rules | {"codec": codec} | ({"feedback": feedback} if feedback else {})]
        }
        for ranks in (2, 3):
            yield f"gradients | {name} | {ranks} ranks", planned(of, [_unit(ranks)])
        # What a shard's owner chooses or measures, replicas cannot have.
        if "support" not in codec and (feedback or {}).get("lead") != "measured":
            averaged = {"gradients": [DENSE], "replicas": of["gradients"]}
            for ranks in (2, 3):
                plan = planned(averaged, [_unit(2)], replicas=[_unit(ranks)])
                yield f"replicas | {name} | {ranks} ranks", plan
        for inside in ("native", "bfloat16", "int8"):
            hosts = _unit(4, ranks_per_host=2)
            yield f"hosts | {name} | {inside} inside", planned(of | {"inside": inside}, [hosts])
    for name, codec in PARAMETERS.items():
        of = {"gradients": [DENSE], "parameters": [rules | {"codec": codec}]}
        for per_step in (1, 2):
            gathers = [_unit(2, dtype=torch.bfloat16, per_step=per_step)]
            plan = planned(of, [_unit(2)], gathers=gathers)
            yield f"parameters | {name} | {per_step} a step", plan
    some = {"gradients": [rules | {"codec": {"kind": "sketch", "density": 0.1}}]}
    yield "flat", planned(some, [_flat(3)])
    yield "columns sharded", planned(some, [_unit(2, dim=1)])
    yield "float16", planned(some, [_unit(2, dtype=torch.float16)])
    yield "left native", planned(some, [_unit(2), _unit(2, name="layers.5", native="a reason")])
    ordered = {
        "gradients": [
            rules | {"codec": {"kind": "matrix"}, "when": {"name": "*.up.*"}},
            some["gradients"][0],
        ]
    }
    yield "two rules", planned(ordered, [_unit(2)])


def identities() -> dict[str, str]:
    """Hashes of policies, then fingerprints of plans, by what they are of."""
    found = {f"shipped | {name}": Policy.load(name).hash for name in tagc.policies()}
    for option, pair in OPTIONS.items():
        for policy, which in zip(pair, ("without", "with"), strict=True):
            found[f"option | {option} | {which}"] = Policy.load(policy).hash
    found |= {f"plan | {name}": plan.fingerprint for name, plan in plans()}
    return found

"""The list of all codecs. To add one, write its module and add a line here."""

from __future__ import annotations

from tagc.codecs.config import CodecConfig
from tagc.codecs.delta import DeltaConfig, plan_delta
from tagc.codecs.dense import DenseConfig, DensePlan, plan_dense
from tagc.codecs.exact import ExactChanges, ExactConfig, PackedExponents, plan_exact
from tagc.codecs.matrix import MatrixConfig, MatrixPlan, plan_matrix
from tagc.codecs.plan import CodecKind, CodecPlan, PlanRequest
from tagc.codecs.quantized import (
    QuantizedConfig,
    QuantizedParametersConfig,
    QuantizedPlan,
    plan_quantized,
)
from tagc.codecs.sketch import SketchConfig, SketchPlan, plan_sketch

CODECS: tuple[CodecKind, ...] = (
    CodecKind("sketch", SketchPlan, plan_sketch, SketchConfig),
    CodecKind(
        "quantized", QuantizedPlan, plan_quantized, QuantizedConfig, QuantizedParametersConfig
    ),
    CodecKind("matrix", MatrixPlan, plan_matrix, MatrixConfig),
    CodecKind("delta", QuantizedPlan | MatrixPlan, plan_delta, None, DeltaConfig),
    CodecKind("exact", ExactChanges | PackedExponents, plan_exact, None, ExactConfig),
    CodecKind("dense", DensePlan, plan_dense, DenseConfig, DenseConfig),
)
"""All codecs, in the order of their words in a unit's message."""


def kind_of(codec: CodecConfig | CodecPlan) -> CodecKind:
    """The kind of a configuration or of a plan; of a plan that two kinds share, the first."""
    for kind in CODECS:
        configs = (kind.config, kind.parameter_config)
        if type(codec) in configs or isinstance(codec, kind.plan):
            return kind
    raise ValueError(f"{type(codec).__name__} is of no codec in CODECS")


def plan_codec(config: CodecConfig, request: PlanRequest) -> CodecPlan:
    """The plan of a codec for one segment, with all sizes."""
    if request.columns == 0:
        return plan_dense(DenseConfig(), request)
    return kind_of(config).make_plan(config, request)


def message_order(codec: CodecPlan) -> int:
    """Where the words of a codec stand in a unit's message, by their kind."""
    return CODECS.index(kind_of(codec))

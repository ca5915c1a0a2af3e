"""Codec ``quantized``: every element in a few bits, with a scale per block."""

from tagc.codecs.kind import CodecKind
from tagc.codecs.quantized.codec import QuantizedCodec
from tagc.codecs.quantized.config import QuantizedConfig, QuantizedParametersConfig
from tagc.codecs.quantized.plan import QuantizedPlan, plan_quantized
from tagc.codecs.quantized.sample import sample_quantized

__all__ = [
    "QUANTIZED",
    "QuantizedCodec",
    "QuantizedConfig",
    "QuantizedParametersConfig",
    "QuantizedPlan",
]

QUANTIZED = CodecKind(
    name="quantized",
    config=QuantizedConfig,
    parameter_config=QuantizedParametersConfig,
    plan=QuantizedPlan,
    make_plan=plan_quantized,
    codec=QuantizedCodec,
    sample=sample_quantized,
)

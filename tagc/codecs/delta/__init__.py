"""Codec ``delta``: what changed in parameters since the last message."""

from tagc.codecs.delta.codec import DeltaCodec
from tagc.codecs.delta.config import DeltaConfig
from tagc.codecs.delta.plan import DeltaPlan, plan_delta
from tagc.codecs.delta.sample import sample_delta
from tagc.codecs.kind import CodecKind

__all__ = ["DELTA", "DeltaCodec", "DeltaConfig", "DeltaPlan"]

DELTA = CodecKind(
    name="delta",
    parameter_config=DeltaConfig,
    plan=DeltaPlan,
    make_plan=plan_delta,
    codec=DeltaCodec,
    sample=sample_delta,
)

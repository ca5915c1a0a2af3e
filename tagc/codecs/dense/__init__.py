"""Codec ``dense``: elements as they are, or as bfloat16."""

from tagc.codecs.dense.codec import DenseCodec
from tagc.codecs.dense.config import DenseConfig
from tagc.codecs.dense.plan import DensePlan, plan_dense
from tagc.codecs.dense.sample import sample_dense
from tagc.codecs.kind import CodecKind

__all__ = ["DENSE", "DenseCodec", "DenseConfig", "DensePlan"]

DENSE = CodecKind(
    name="dense",
    config=DenseConfig,
    parameter_config=DenseConfig,
    plan=DensePlan,
    make_plan=plan_dense,
    codec=DenseCodec,
    sample=sample_dense,
)

"""Codec ``matrix``: every element in a few bits, with scales of rows and columns."""

from tagc.codecs.kind import CodecKind
from tagc.codecs.matrix.codec import MatrixCodec
from tagc.codecs.matrix.config import MatrixConfig
from tagc.codecs.matrix.plan import MatrixPlan, plan_matrix
from tagc.codecs.matrix.sample import sample_matrix

__all__ = ["MATRIX", "MatrixCodec", "MatrixConfig", "MatrixPlan"]

MATRIX = CodecKind(
    name="matrix",
    config=MatrixConfig,
    plan=MatrixPlan,
    make_plan=plan_matrix,
    codec=MatrixCodec,
    sample=sample_matrix,
)

"""Codec ``packed``: the largest groups, with their index, in one message."""

from tagc.codecs.kind import CodecKind
from tagc.codecs.packed.codec import PackedCodec
from tagc.codecs.packed.config import PackedConfig
from tagc.codecs.packed.plan import PackedPlan, plan_packed_codec
from tagc.codecs.packed.sample import sample_packed

__all__ = ["PACKED", "PackedCodec", "PackedConfig", "PackedPlan"]

PACKED = CodecKind(
    name="packed",
    config=PackedConfig,
    plan=PackedPlan,
    make_plan=plan_packed_codec,
    codec=PackedCodec,
    sample=sample_packed,
)

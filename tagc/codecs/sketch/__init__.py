"""Codec ``sketch``: the largest groups, in a count sketch that is summed on the way."""

from tagc.codecs.kind import CodecKind
from tagc.codecs.sketch.codec import SketchCodec
from tagc.codecs.sketch.config import SketchConfig
from tagc.codecs.sketch.plan import SketchPlan, plan_sketch
from tagc.codecs.sketch.sample import sample_sketch

__all__ = ["SKETCH", "SketchCodec", "SketchConfig", "SketchPlan"]

SKETCH = CodecKind(
    name="sketch",
    config=SketchConfig,
    plan=SketchPlan,
    make_plan=plan_sketch,
    codec=SketchCodec,
    sample=sample_sketch,
)

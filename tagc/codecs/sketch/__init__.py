"""Codec ``sketch``: the largest groups, in a count sketch that is summed on the way."""

from tagc.codecs.sketch.codec import COUNTING, SelectionCount, Sketches
from tagc.codecs.sketch.plan import SketchConfig, SketchPlan, plan_sketch

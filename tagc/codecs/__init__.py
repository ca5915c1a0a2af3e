"""Codecs: how the segments of a unit are sent. ``CODECS`` lists them all.

A policy's *configuration* becomes a *plan* for one segment, with all sizes and the steps that a
unit's programs take for it.
"""

from tagc.codecs.config import CodecConfig, Special
from tagc.codecs.plan import CodecPlan, Cut, PlanRequest, Span
from tagc.codecs.registry import CODECS, kind_of, message_order, plan_codec

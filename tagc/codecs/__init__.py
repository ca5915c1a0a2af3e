"""Codecs: how the segments of a unit are sent. ``CODECS`` lists them all.

A policy's *configuration* becomes a *plan* for one segment, with all sizes. The plans of a unit's
segments become a *codec*, which keeps their state and takes the steps.
"""

from tagc.codecs.codec import Codec, CodecSegment, CodecSetup, SelectionCount
from tagc.codecs.coder import MESSAGE_FORMAT, STAMP_WORDS, Coder, row_words
from tagc.codecs.config import CodecConfig
from tagc.codecs.exchange import Exchange, Work
from tagc.codecs.plan import CodecPlan, Cut, PlanRequest
from tagc.codecs.registry import CODECS, in_message_order, kind_of, plan_codec
from tagc.codecs.special import Special

__all__ = [
    "CODECS",
    "MESSAGE_FORMAT",
    "STAMP_WORDS",
    "Codec",
    "CodecConfig",
    "CodecPlan",
    "CodecSegment",
    "CodecSetup",
    "Coder",
    "Cut",
    "Exchange",
    "PlanRequest",
    "SelectionCount",
    "Special",
    "Work",
    "in_message_order",
    "kind_of",
    "plan_codec",
    "row_words",
]

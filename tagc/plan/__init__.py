"""Plans: how each column of every unit is sent, and what that costs, known before any step."""

from tagc.plan.alike import merged
from tagc.plan.boxes import Box, span_of
from tagc.plan.build import build_plan
from tagc.plan.choice import AUTO_BITS, Choice, Choose, resolve_auto
from tagc.plan.inside import config_inside
from tagc.plan.memory import Memory, buffers_of
from tagc.plan.messages import MessagePlan, Segment
from tagc.plan.plan import Plan
from tagc.plan.programs import bytes_in_step, bytes_inside, sends_in_step
from tagc.plan.sites import AT_ONCE, fragments_of
from tagc.plan.step import native_units, times_less, total
from tagc.plan.table import aligned, as_list, format_bytes
from tagc.plan.two_shots import in_two_shots, slices_of
from tagc.plan.unit_plan import Direction, TwoShots, UnitPlan
from tagc.plan.units import FlatBuffer, UnitInfo, UnitParam, between_sites

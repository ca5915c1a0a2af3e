"""Plans: how each column of every unit is sent, and what that costs, known before any step."""

from tagc.plan.build import Choice, Choose, build_plan
from tagc.plan.plan import Plan, times_less, total
from tagc.plan.programs import Memory, buffers_of, bytes_in_step, bytes_inside, sends_in_step
from tagc.plan.sites import AT_ONCE, fragments_of
from tagc.plan.table import aligned, as_list, format_bytes, merged
from tagc.plan.two_shots import in_two_shots, slices_of
from tagc.plan.unit_plan import Direction, MessagePlan, Segment, TwoShots, UnitPlan
from tagc.plan.units import Box, FlatBuffer, UnitInfo, UnitParam, between_sites, span_of

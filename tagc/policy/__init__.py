"""What users ask for: rules in YAML, their conditions, and the roles of parameters."""

from tagc.policy.conditions import When
from tagc.policy.document import PolicyError
from tagc.policy.policy import Inside, Policy, data_parallel_policies, policies
from tagc.policy.roles import ROLES, ParamInfo, Role, role_of
from tagc.policy.rules import SMALL, ParameterRule, Rule, first_match, nearest_miss
from tagc.policy.schema import json_schema
from tagc.policy.show import show, with_smaller
from tagc.policy.tuning import Tuning

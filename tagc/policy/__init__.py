"""What users ask for: rules in YAML, their conditions, and the roles of parameters."""

from tagc.policy.document import PolicyError
from tagc.policy.policy import Inside, Policy, Tuning, data_parallel_policies, policies
from tagc.policy.roles import ROLES, ParamInfo, Role, role_of
from tagc.policy.rules import SMALL, ParameterRule, Rule, When, first_match, nearest_miss
from tagc.policy.show import json_schema, show, with_smaller

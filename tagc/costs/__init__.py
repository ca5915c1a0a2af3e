"""Costs of a step with a policy, predicted or measured, and the choices of ``codec: auto``."""

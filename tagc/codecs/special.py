"""Values that a codec for parameters may not carry as they are."""

from enum import Enum


class Special(Enum):
    """What is special about all values of a frozen parameter; its value is for people."""

    NOT_FINITE = "values that are not finite"
    LARGE = "values at the edge of their dtype"
    FEW = "only two values, as masks have, or one"

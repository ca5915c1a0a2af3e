"""Values that codecs for parameters may change."""

from enum import Enum


class Special(Enum):
    """A property of a frozen parameter's values; ``value`` is text for users."""

    NOT_FINITE = "values that are not finite"
    LARGE = "values at the edge of their dtype"
    FEW = "only two values, as masks have, or one"

"""Suggests valid keys and values in place of invalid ones."""

import difflib
import math
import re
from collections.abc import Sequence


def closest(given: object, options: Sequence[object]) -> str | None:
    """The option whose spelling is closest to `given`; None if no option is similar."""
    lowered = {str(option).lower(): str(option) for option in options}
    close = difflib.get_close_matches(short(given).strip("'").lower(), lowered, n=1, cutoff=0.5)
    return lowered[close[0]] if close else None


def nearest(given: object, options: Sequence[object]) -> str:
    """The tail of a message about an invalid choice: `did you mean 'dense'? available: ...`.

    Among numbers, the next ones above and below are near, the closer ratio first: 128 and 64 for
    100.
    """
    numbers = [option for option in options if isinstance(option, int)]
    if numbers:
        meant = _neighbours(given, sorted(numbers))
    else:
        meant = [f"'{found}'" for found in [closest(given, options)] if found]
    hint = f"did you mean {' or '.join(meant)}? " if meant else ""
    return f"{hint}available: {', '.join(map(str, options))}"


def _neighbours(given: object, numbers: Sequence[int]) -> list[str]:
    """At most two of the numbers, the nearer one first; none if `given` is not a number."""
    text = given if isinstance(given, str) else short(given)
    if not re.fullmatch(r"[-+]?[0-9]{1,18}(\.[0-9]{0,18})?", text):
        return []
    number = float(text)
    if number in numbers:
        return [f"{number:g}, without quotes"]
    around = [*[n for n in numbers if n < number][-1:], *[n for n in numbers if n > number][:1]]
    if number < numbers[0]:
        return [str(n) for n in around]  # `number` may have no logarithm
    return [str(n) for n in sorted(around, key=lambda n: abs(math.log(n / number)))]


def short(value: object) -> str:
    """A value as an error message shows it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int with too many digits, or nested too deeply
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."

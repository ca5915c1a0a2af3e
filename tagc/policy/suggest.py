"""What may have been meant by a key or a value that is not valid."""

import difflib
import math
import re
from collections.abc import Sequence


def closest(given: object, options: Sequence[str]) -> str | None:
    """The option that is spelled most like `given`, if any is like it."""
    lowered = {option.lower(): option for option in options}
    close = difflib.get_close_matches(short(given).strip("'").lower(), lowered, n=1, cutoff=0.5)
    return lowered[close[0]] if close else None


def nearest(given: object, options: Sequence[str]) -> str:
    """The tail of a message about an invalid choice: `did you mean 'dense'? available: ...`.

    Among numbers those count as near that are next above and below, by their ratio: of 100, they
    are 128 and 64.
    """
    meant = _neighbours(given, options)
    if meant is None:
        found = closest(given, options)
        meant = [] if found is None else [f"'{found}'"]
    hint = f"did you mean {' or '.join(meant)}? " if meant else ""
    return f"{hint}available: {', '.join(options)}"


def _neighbours(given: object, options: Sequence[str]) -> list[str] | None:
    """At most two numbers, the nearer first; None if `given` or an option is no number."""
    text = given if isinstance(given, str) else short(given)
    of_numbers = all(option.isdecimal() for option in options)
    if not of_numbers or not re.fullmatch(r"[-+]?[0-9]{1,18}(\.[0-9]{0,18})?", text):
        return None
    number, numbers = float(text), sorted(map(int, options))
    if number < numbers[0]:
        return [str(numbers[0])]
    around = [
        *[n for n in numbers if n <= number][-1:],
        *[n for n in numbers if n > number][:1],
    ]
    if around[0] == number:
        return [f"{around[0]}, without quotes"]
    return [str(n) for n in sorted(around, key=lambda n: abs(math.log(n / number)))]


def short(value: object) -> str:
    """A value as an error message shows it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int with too many digits, or nested too deeply
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."

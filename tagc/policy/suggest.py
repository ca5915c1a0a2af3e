"""Suggests valid keys and values in place of invalid and removed ones."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Values that a key no longer takes, by key: what to write instead.
_REMOVED: dict[tuple[object, object], str] = {
    ("dtype", "int8"): "write dtype: bfloat16, which holds twice as many bytes",
    ("kind", "packed"): (
        "write kind: matrix with bits: 1, which is better in bits, loss, time and memory; with "
        "FSDP1 write kind: quantized with bits: 4"
    ),
}
REMOVED_POLICIES = {
    "packed-20": "take 'one-bit', which is better in bits, loss, time and memory; with FSDP1 take "
    "'loco-4bit'",
}
"""What to write instead of a removed built-in policy, by its name."""


def remedy_for(key: object, mapping: Mapping[Any, object]) -> str | None:
    """What to write instead of this key's value; None if the value was never allowed."""
    value = mapping.get(key)
    return _REMOVED.get((key, value)) if isinstance(value, str) else None


def closest(given: object, options: Sequence[object]) -> str | None:
    """The option whose text is closest to `given`; None if no option is similar."""
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

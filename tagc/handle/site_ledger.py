"""Which exchanges a site counts, and which it is in doubt of.

A site that has the averages of an exchange, but not the answers of all others, is *in doubt*:
another site may have all answers and count it. It learns when it meets a site that is ahead: if
that one counts the exchange, the residuals are those of after it, otherwise of before.
"""

from __future__ import annotations

from collections.abc import Sequence

from tagc.handle.site_links import Owed

# How many of the last exchanges a site can name: more than others count while it is in doubt.
_NAMED = 1024


class SiteLedger:
    """The names of exchanges. Every exchange has another one, the same in all sites.

    Attributes:
        counted: the last exchanges that this site counts, the latest at the end; 0 for none.
        doubts: the exchanges that this site is in doubt of, and what it owes if they count.
    """

    def __init__(self) -> None:
        """Start with no exchange."""
        self.counted: list[int] = [0] * _NAMED
        self.doubts: dict[int, Owed] = {}

    def count(self, name: int) -> None:
        """Count an exchange. Its sites have met, so nothing before it is in doubt any more."""
        self.counted = [*self.counted[1:], name]
        self.doubts.clear()

    def learn(self, counted: Sequence[int]) -> Owed | None:
        """Take over what a site that is ahead counts.

        Returns:
            What this site owes, if that site counts an exchange that this one was in doubt of.
        """
        known = [owed for name, owed in self.doubts.items() if name in counted]
        self.counted = list(counted)
        self.doubts.clear()
        return known[-1] if known else None

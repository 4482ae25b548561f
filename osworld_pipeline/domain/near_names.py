"""Suggestions for an unknown name."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'heldout'?`, for the end of a clause; empty if none of `names` is similar."""
    by_folded = {known.casefold(): known for known in names}
    found = get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.7)
    return f"; did you mean '{by_folded[found[0]]}'?" if found else ""

"""Numbers, times and counts, formatted for people; a dash where a value is unknown."""

import math
from datetime import UTC, datetime
from typing import TypeGuard

UNKNOWN = "–"


def is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def percent(share: float | None) -> str:
    return f"{share:.1%}" if is_known(share) else UNKNOWN


def points(difference: float | None) -> str:
    """A difference of two shares, in percentage points."""
    return f"{100 * difference:+.1f}" if is_known(difference) else UNKNOWN


def chance(p_value: float) -> str:
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def figure(value: float | None, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if is_known(value) else UNKNOWN


def number(value: float | None, *, is_share: bool = False) -> str:
    """The number with as many digits as it needs."""
    if not is_known(value):
        return UNKNOWN
    if is_share:
        return percent(value)
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    if not is_known(value):
        return UNKNOWN
    if value < 0.0995:
        return f"{1000 * value:.0f} ms"
    if value < 9.95:
        return f"{value:.1f} s"
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.1f} min"


def when(unix_time: float | None, *, to_seconds: bool = False) -> str:
    """A time in UTC; 0 is unknown too."""
    if not unix_time or not math.isfinite(unix_time):
        return UNKNOWN
    try:
        return datetime.fromtimestamp(unix_time, UTC).strftime("%Y-%m-%d %H:%M:%S" if to_seconds else "%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def words(name: str) -> str:
    """A name of the code as words."""
    return str(name).replace("_", " ")


def sentence(clause: str) -> str:
    """The clause with a capital letter; the rest is unchanged."""
    return clause[:1].upper() + clause[1:]


def px(value: float) -> str:
    """A coordinate of an SVG."""
    return f"{value:.1f}".rstrip("0").rstrip(".")

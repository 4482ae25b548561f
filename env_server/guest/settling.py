"""Waits inside the desktop until its screen has settled, so that no client polls it from outside."""

import time
from collections.abc import Callable

from .processes import is_any_at_work
from .stillness import Stillness

LOOK_INTERVAL_S = 0.02
MAX_LIMIT_S = 60.0


def wait_until_still(pixels: Callable[[], bytes], before: bytes, *, width: int, limit_s: float) -> float:
    """Returns the seconds it took, or `limit_s` if the screen did not settle. `pixels` reads the screen; `before` is
    the screen before the last action."""
    start = time.monotonic()
    stillness = Stillness(before, width=width, limit_s=limit_s)
    look_s = 0.0
    while True:
        at_s = time.monotonic() - start
        if at_s + look_s >= limit_s:  # no time for another look
            time.sleep(max(0.0, limit_s - at_s))
            return limit_s
        if stillness.look(pixels(), at_s, is_busy=is_any_at_work()):
            return at_s
        look_s = time.monotonic() - start - at_s
        time.sleep(min(max(LOOK_INTERVAL_S, look_s), max(0.0, limit_s - at_s - look_s)))


def read_limit_s(value: object) -> float:
    """ValueError if it is not a number of seconds in 0..60."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_LIMIT_S:
        raise ValueError(f"settle_s must be 0 to {MAX_LIMIT_S:g} seconds, not {value!r}")
    return float(value)

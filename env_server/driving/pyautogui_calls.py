"""Converts an action's text to calls of the guest. They are parsed, bound and limited here, so the guest never gets a
refused action."""

from functools import lru_cache
from typing import Any

from env_server.guest.calls import bind_call
from env_server.guest_client import GuestCall
from osworld_pipeline.domain.pyautogui import MAX_SLEEP_S, parse_pyautogui
from osworld_pipeline.errors import ActionParseError

MAX_ACTION_S = MAX_SLEEP_S
"""All pauses, durations and intervals of one action together."""


def read_calls(text: str) -> tuple[GuestCall, ...]:
    """
    Raises:
        ActionParseError: an unknown call, wrong arguments, or an action that would take too long.
    """
    calls, total_s = [], 0.0
    for call in parse_pyautogui(text):
        try:
            name, bound = bind_call({"name": call.name, "args": call.args, "kwargs": call.kwargs})
        except (ValueError, TypeError) as error:
            raise ActionParseError(str(error)) from error
        total_s += _duration_s(bound)
        calls.append(GuestCall(name=name, args=call.args, kwargs=call.kwargs))
    if total_s > MAX_ACTION_S:
        raise ActionParseError(f"the action would take {total_s:g} s; the limit is {MAX_ACTION_S:g} s")
    return tuple(calls)


@lru_cache(maxsize=1024)
def action_points(text: str) -> tuple[tuple[float, float], ...]:
    """The positions on the screen that an action names, in its order, for a picture of it; empty if it names none."""
    try:
        calls = [bind_call({"name": one.name, "args": one.args, "kwargs": one.kwargs}) for one in parse_pyautogui(text)]
    except (ActionParseError, ValueError, TypeError):
        return ()
    found = [(bound.get("x"), bound.get("y")) for _, bound in calls]
    return tuple((float(x), float(y)) for x, y in found if isinstance(x, int | float) and isinstance(y, int | float))


def _duration_s(bound: dict[str, Any]) -> float:
    num_repeats = 1
    for key in ("presses", "clicks"):
        num_repeats = max(num_repeats, abs(int(bound.get(key) or 1)))
    for key in ("keys", "message"):
        num_repeats *= max(1, len(bound.get(key) or ()))
    once_s = float(bound.get("interval") or 0.0)
    return num_repeats * once_s + float(bound.get("duration") or 0.0) + float(bound.get("seconds") or 0.0)

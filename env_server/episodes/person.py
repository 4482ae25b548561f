"""Inputs of a person for a live desktop: the limits of those that are executed at once, and the queue of those that the
episode's own client executes, in a demonstration."""

import asyncio
from collections import deque
from contextlib import suppress

from env_server.driving.pyautogui_calls import read_calls
from osworld_pipeline.domain.pyautogui import SPECIAL_ACTIONS
from osworld_pipeline.errors import ActionParseError, EnvServerError

MAX_WAITING = 16
"""Inputs of one episode that wait for their turn."""
ENDINGS = ("DONE", "FAIL")
"""The person's end of a demonstration: it is done, or abandoned."""


class PersonInputError(EnvServerError):
    """The episode takes no input of a person, or not now."""


def check_input(action: str, *, is_demonstration: bool) -> str:
    """The action, stripped. Only a demonstration may be ended by a person.

    Raises:
        ActionParseError: it is no action, or not one that a person may send.
    """
    action = action.strip()
    if is_demonstration and action in ENDINGS:
        return action
    if action in SPECIAL_ACTIONS:
        raise ActionParseError(f"a person can send pyautogui calls, and DONE or FAIL in a demonstration, not {action}")
    read_calls(action)
    return action


def touched_sentence(num_inputs: int) -> str:
    count = "an input" if num_inputs == 1 else f"{num_inputs} inputs"
    return f"a person sent {count} to the desktop of this episode, so its reward is not the policy's own"


class InputQueue:
    """Numbered from 1. Each input is kept until the client asks for the one after it, so a lost answer loses none."""

    def __init__(self) -> None:
        self._inputs: deque[tuple[int, str]] = deque()
        self._num_added = 0
        self._has_changed, self._is_over = asyncio.Event(), False

    def __len__(self) -> int:
        return len(self._inputs)

    def add(self, action: str) -> None:
        """
        Raises:
            PersonInputError: the demonstration has ended, or too many inputs wait.
        """
        if self._inputs and self._inputs[-1][1] in ENDINGS:
            raise PersonInputError("the demonstration has ended already")
        if len(self._inputs) >= MAX_WAITING:
            raise PersonInputError(
                f"{MAX_WAITING} inputs wait for the program that records them; wait, or start it again"
            )
        self._num_added += 1
        self._inputs.append((self._num_added, action))
        self._has_changed.set()

    async def after(self, number: int, *, wait_s: float) -> tuple[int, str] | None:
        """The first input after `number`; None if none comes in time. Drops all inputs up to `number`."""
        while self._inputs and self._inputs[0][0] <= number:
            self._inputs.popleft()
        if not self._inputs and not self._is_over:
            self._has_changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._has_changed.wait()
        return self._inputs[0] if self._inputs else None

    def end(self) -> None:
        """The episode is closed: nothing is waited for any more."""
        self._is_over = True
        self._has_changed.set()

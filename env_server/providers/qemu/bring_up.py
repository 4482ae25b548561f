"""Brings a machine without a guest agent from power-on to a desktop that answers, as a state machine: each stage sends
input and then polls for its expected result, with a limit. It does not wait a fixed time for the result."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from PIL import Image

from env_server.foreign_input import Call
from env_server.providers.files import keep_newest
from env_server.providers.qemu.screen_view import STILL_SHARE, Mark, changed_share, find_mark, is_blank, open_screen
from osworld_pipeline.errors import ReplicaError

log = logging.getLogger(__name__)

POLL_S = 0.5
KEPT_SCREENSHOTS = 20
_FOLDER = "failed-boots"


class Eyes(Protocol):
    async def dump(self) -> bytes:
        """The screen as a PPM file."""
        ...


class Hands(Protocol):
    async def perform(self, calls: Sequence[Call]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Sight:
    """One look at the machine."""

    screen: Image.Image
    before: Image.Image
    """The screen before the stage sent any input."""
    still_s: float
    """Time during which nothing but a caret has changed."""


@dataclass(frozen=True, kw_only=True)
class Sign:
    """The condition that a stage waits for."""

    words: str
    """Name in messages, such as `answer of the file server`."""
    is_there: Callable[[Sight], Awaitable[bool]]


@dataclass(frozen=True, kw_only=True)
class Stage:
    name: str
    """Name in messages, such as `the login`."""
    until: Sign
    limit_s: float
    """Limit of each try."""
    do: tuple[Call, ...] = field(default=(), repr=False)
    """Keys. Never in a message, because a password may be among them."""
    num_tries: int = 1
    """How often `do` is tried before the stage fails."""


@dataclass(frozen=True, kw_only=True)
class BroughtUp:
    """The duration of a stage; for logs and tests."""

    stage: str
    num_tries: int
    seconds: float


def shows_something(*, still_s: float) -> Sign:
    """Firmware, boot loader and spinning dots also show something: a screen counts as up only if it is stable for
    longer than theirs."""

    async def is_there(sight: Sight) -> bool:
        return not is_blank(sight.screen) and sight.still_s >= still_s

    return Sign(words=f"screen that shows something and is stable for {still_s:g} s", is_there=is_there)


def has_changed(*, still_s: float, share: float = STILL_SHARE) -> Sign:
    async def is_there(sight: Sight) -> bool:
        return changed_share(sight.before, sight.screen) > share and sight.still_s >= still_s

    return Sign(words=f"other screen that is stable for {still_s:g} s", is_there=is_there)


def shows_mark(mark: Mark) -> Sign:
    async def is_there(sight: Sight) -> bool:
        return await asyncio.to_thread(find_mark, sight.screen, mark.image) is not None

    return Sign(words=f"mark '{mark.name}'", is_there=is_there)


def is_answered(what: str, ask: Callable[[], Awaitable[bool]]) -> Sign:
    async def is_there(_: Sight) -> bool:
        return await ask()

    return Sign(words=f"answer of {what}", is_there=is_there)


class BringUp:
    """`is_alive` returns whether the machine is running; failures leave a screenshot below `folder`."""

    def __init__(
        self,
        name: str,
        *,
        eyes: Eyes,
        hands: Hands,
        is_alive: Callable[[], bool],
        folder: Path,
        poll_s: float = POLL_S,
    ) -> None:
        self._name, self._eyes, self._hands, self._is_alive = name, eyes, hands, is_alive
        self._folder, self._poll_s = folder, poll_s

    async def run(self, stages: Sequence[Stage]) -> list[BroughtUp]:
        """Runs every stage in order.

        Raises:
            ReplicaError: a stage failed, or the machine ended; names the stage, its condition, the tries, and a
                screenshot.
        """
        done: list[BroughtUp] = []
        for stage in stages:
            started = time.monotonic()
            for number in range(1, stage.num_tries + 1):
                if await self._try(stage):
                    done.append(BroughtUp(stage=stage.name, num_tries=number, seconds=time.monotonic() - started))
                    log.info("%s: %s after %.1f s (try %d)", self._name, stage.name, done[-1].seconds, number)
                    break
                log.warning("%s: %s failed (try %d of %d)", self._name, stage.name, number, stage.num_tries)
            else:
                raise await self._failure(stage)
        return done

    async def _try(self, stage: Stage) -> bool:
        before = await self._look(stage)
        await self._hands.perform(stage.do)
        last, still_since = before, time.monotonic()
        until = time.monotonic() + stage.limit_s
        while True:
            screen = await self._look(stage)
            now = time.monotonic()
            if changed_share(last, screen) > STILL_SHARE:
                last, still_since = screen, now
            sight = Sight(screen=screen, before=before, still_s=now - still_since)
            if await stage.until.is_there(sight):
                return True
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(self._poll_s)

    async def _look(self, stage: Stage) -> Image.Image:
        if not self._is_alive():
            raise ReplicaError(f"{self._name} ended before {stage.name}; check its last output")
        return open_screen(await self._eyes.dump())

    async def _failure(self, stage: Stage) -> ReplicaError:
        where = await self._keep_screenshot(stage)
        tries = "" if stage.num_tries == 1 else f" of each of {stage.num_tries} tries"
        return ReplicaError(
            f"{self._name} did not get past {stage.name}: within {stage.limit_s:g} s{tries} there was no "
            f"{stage.until.words}; its screen is {where}"
        )

    async def _keep_screenshot(self, stage: Stage) -> str:
        """Its path, or why there is none; raises no error."""
        try:
            screen = await self._look(stage)
            folder = self._folder / _FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{time.time_ns()}-{'-'.join(stage.name.split())}.png"
            screen.save(path)
            keep_newest(folder, "*.png", KEPT_SCREENSHOTS)
        except (OSError, ReplicaError) as error:
            return f"not available ({error})"
        return str(path)

"""The host resources of one sandbox and their release: at once if possible, else in a background task of its provider,
which retries. Every step runs even if others fail."""

import asyncio
import contextlib
import logging
import os
import subprocess
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from env_server.providers.bounds import REMOVE_LIMIT_S, Group, OutOfMemory
from env_server.providers.bubblewrap import STOP_LIMIT_S, end_sandbox
from env_server.providers.host_users import HostUsers
from env_server.providers.stderr_tail import StderrTail
from osworld_pipeline.errors import ReplicaError

log = logging.getLogger(__name__)

RETRY_INTERVAL_S, SHORT_INTERVAL_S = 1.0, 0.1
NUM_ATTEMPTS = 60
"""Limit of each sandbox; one attempt takes up to 15 s, or up to 26 s for a machine with an open network."""
MAX_UNFINISHED = 8
"""A provider starts no further sandbox while the release of this many is unfinished."""


@dataclass(frozen=True, kw_only=True)
class EndLimits:
    """Seconds. Slower steps continue in the background; what is left at the end is named."""

    one_s: float = STOP_LIMIT_S
    """Limit until the processes of one sandbox end, at each attempt. Its control group then gets the same time, but at
    most REMOVE_LIMIT_S, to become empty."""
    all_s: float = 20.0
    """Time limit for the remaining releases when the provider closes."""


class Part(Protocol):
    async def close(self) -> None: ...


class HostResources:
    """Filled while a sandbox is created."""

    def __init__(
        self, what: str, users: HostUsers, *, stop_limit_s: float = STOP_LIMIT_S, has_walls: bool = True
    ) -> None:
        self.what = what
        self.process: subprocess.Popen[bytes] | None = None
        self.stderr_tail = StderrTail()
        self.parts: list[Part] = []
        """Closed before the process is ended."""
        self.descriptors: list[int] = []
        self.group: Group | None = None
        self.uid: int | None = None
        self._users, self._stop_limit_s, self._has_walls = users, stop_limit_s, has_walls
        self._out_of_memory: OutOfMemory | None = None

    @property
    def out_of_memory(self) -> OutOfMemory | None:
        """The cause of a lack of memory, as counted by its group; also known after the group is removed."""
        return self._out_of_memory or (None if self.group is None else self.group.out_of_memory())

    async def release(self) -> tuple[str, ...]:
        """Releases everything that can be released now. Returns the names of the rest; call it again for them."""
        while self.descriptors:
            os.close(self.descriptors.pop())
        left = [name for part in tuple(self.parts) for name in await self._left_after(self._close(part))]
        left += await self._left_after(self._end_processes())
        self._out_of_memory = self.out_of_memory
        limit_s = 0.0 if left else min(REMOVE_LIMIT_S, self._stop_limit_s)
        left += await self._left_after(self._remove_group(limit_s=limit_s))
        return tuple(left)

    async def _left_after(self, step: Awaitable[tuple[str, ...]]) -> tuple[str, ...]:
        try:
            return await step
        except Exception as error:  # noqa: BLE001 - the boundary: a failed step must not prevent the others
            return (f"{self.what} ({type(error).__name__}: {error})",)

    async def _close(self, part: Part) -> tuple[str, ...]:
        await part.close()
        self.parts.remove(part)
        return ()

    async def _end_processes(self) -> tuple[str, ...]:
        if self.process is not None:
            with contextlib.suppress(OSError):
                if self.group is not None:
                    self.group.weigh_cpu(1.0)  # ending takes CPU time
            try:
                await end_sandbox(
                    self.process,
                    self.stderr_tail,
                    what=self.what,
                    has_walls=self._has_walls,
                    limit_s=self._stop_limit_s,
                )
            except ReplicaError as error:
                return (f"{error} (process {self.process.pid})",)
        uid, self.uid = self.uid, None
        self._users.release(uid)
        return ()

    async def _remove_group(self, *, limit_s: float) -> tuple[str, ...]:
        if self.group is None:
            return ()
        left = await self.group.remove(limit_s=limit_s)
        if not left:
            self.group = None
        return tuple(f"the control group {folder} of {self.what}" for folder in left)


class Releasable(Protocol):
    @property
    def what(self) -> str: ...

    async def release(self) -> tuple[str, ...]:
        """Does the same as HostResources.release."""
        ...


@dataclass(eq=False)
class _Release:
    left: tuple[str, ...]
    """Names of what the last attempt could not remove."""
    was_tried: asyncio.Event
    task: asyncio.Task[None] | None = None


class Releases:
    """The sandboxes of a provider that are being removed."""

    def __init__(
        self,
        limits: EndLimits | None = None,
        *,
        num_attempts: int = NUM_ATTEMPTS,
        interval_s: float = RETRY_INTERVAL_S,
    ) -> None:
        self.limits = limits or EndLimits()
        self._num_attempts, self._interval_s = num_attempts, interval_s
        self._open: dict[Releasable, _Release] = {}
        self._hurry = asyncio.Event()

    def check_room(self) -> None:
        """
        Raises:
            ReplicaError: too many sandboxes have not ended yet.
        """
        if sum(release.was_tried.is_set() for release in self._open.values()) >= MAX_UNFINISHED:
            raise ReplicaError(
                f"no further desktop is started while parts of others remain: {self._names()}; look for processes that "
                "do not exit"
            )

    async def release(self, held: Releasable) -> None:
        """Returns after the first attempt; the rest is done in the background. Idempotent, and continues if the caller
        is cancelled."""
        if held not in self._open:
            self._begin(held)
        await self._open[held].was_tried.wait()

    async def close(self) -> None:
        """Retries the remaining releases immediately. May be called again.

        Raises:
            ReplicaError: names what could not be removed within `limits.all_s`.
        """
        self._hurry.set()
        for held, release in list(self._open.items()):
            if release.task is None or release.task.done():
                self._begin(held)
        tasks = [release.task for release in self._open.values() if release.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.limits.all_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._hurry.clear()
        if self._open:
            raise ReplicaError(f"these could not be removed: {self._names()}; look for processes that do not exit")

    def _begin(self, held: Releasable) -> None:
        release = self._open[held] = _Release(left=(held.what,), was_tried=asyncio.Event())
        release.task = asyncio.create_task(self._try(held, release))

    async def _try(self, held: Releasable, release: _Release) -> None:
        try:
            for attempt in range(1, self._num_attempts + 1):
                release.left = await held.release()
                if not release.left:
                    del self._open[held]
                    if attempt > 1:
                        log.info("%s is gone after attempt %d", held.what, attempt)
                    return
                release.was_tried.set()
                if attempt == 1:
                    log.warning("not removed yet, retried in the background: %s", ", ".join(release.left))
                await self._pause()
            log.error("not removed in %d attempts: %s", self._num_attempts, ", ".join(release.left))
        finally:
            release.was_tried.set()

    async def _pause(self) -> None:
        """Uses a short interval once the provider closes."""
        try:
            async with asyncio.timeout(self._interval_s):
                await self._hurry.wait()
            await asyncio.sleep(SHORT_INTERVAL_S)
        except TimeoutError:
            pass

    def _names(self) -> str:
        return ", ".join(name for release in self._open.values() for name in release.left)

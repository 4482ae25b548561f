"""Locks and leases by which independent programs share an sglang server: one program loads weights at a time, and
weights that another program samples from are not replaced.

Both are sessions of the server: opening a session that is open fails, and a session that is not closed expires. They
therefore hold between processes and hosts, end with the server, and outlive a killed program by a limited time.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.engines.http_calls import TransientError, shown
from osworld_pipeline.rollout.engines.sglang_server import LOAD_TIMEOUT_S, SglangServer

LOAD_LOCK = "osworld-loading"
LOAD_LOCK_LIMIT_S = 120.0
"""The lock of a killed program expires after this time."""
POLL_S = 0.5
"""Mean pause between attempts to get a lock."""
RENEWAL_S = 20.0
LEASE_LIMIT_S = 90.0
"""The lease of a killed program expires after this time."""
VISION_CHECKED = "osworld-vision-checked"
"""A session without expiry: marks a server process that was found to keep no stale image features."""
PROBE_LIMIT_S = 5.0


async def _never() -> bool:
    return False


@asynccontextmanager
async def exclusive(
    server: SglangServer,
    session: str,
    *,
    expires_s: float,
    limit_s: float,
    is_needless: Callable[[], Awaitable[bool]] = _never,
) -> AsyncIterator[bool]:
    """Yields True with the exclusive right of the session; False if `is_needless` returned True while another program
    held it. The right expires after `expires_s` if its holder is killed.

    Raises:
        TransientError: other programs held it for `limit_s`.
        EngineError: the server has no sessions.
    """
    deadline = time.monotonic() + limit_s
    while not await _open(server, session, expires_s):
        if await is_needless():
            yield False
            return
        if time.monotonic() >= deadline:
            raise TransientError(f"other programs have held {session} at {shown(server.url)} for {limit_s:.0f} s")
        await asyncio.sleep(random.uniform(0.5, 1.5) * POLL_S)
    try:
        yield True
    finally:
        await asyncio.shield(_close(server, session))


def load_lock(
    server: SglangServer, is_needless: Callable[[], Awaitable[bool]], *, expires_s: float
) -> AbstractAsyncContextManager[bool]:
    """The right to load weights into the server, held as `exclusive` describes."""
    limit_s = max(LOAD_TIMEOUT_S, 2 * expires_s)
    return exclusive(server, LOAD_LOCK, expires_s=expires_s, limit_s=limit_s, is_needless=is_needless)


async def end_pause(server: SglangServer) -> None:
    """Resumes a server that a killed loader left paused, unless a load is in progress. Never raises."""
    with suppress(EngineError):
        if await _open(server, LOAD_LOCK, LOAD_LOCK_LIMIT_S):
            try:
                await server.continue_generation()
            finally:
                await asyncio.shield(_close(server, LOAD_LOCK))


async def renew_lease(server: SglangServer, owner: str, *, turn: int) -> None:
    """Records that `owner` uses the weights that it loaded. `turn` counts the renewals: they alternate between two
    sessions, so that one of them is always open."""
    session = _lease(owner, turn)
    if turn:
        await server.close_session(session)
    await server.open_session(session, limit_s=LEASE_LIMIT_S)


async def release_lease(server: SglangServer, owner: str) -> None:
    """Never raises."""
    for turn in range(2):
        await _close(server, _lease(owner, turn))


async def is_leased(server: SglangServer, owner: str) -> bool:
    """Whether `owner` uses the weights that it loaded. Checks twice: a renewal may have waited for a long load."""
    for attempt in range(2):
        if attempt:
            await asyncio.sleep(POLL_S)
        for turn in range(2):
            if not await _open(server, _lease(owner, turn), LOAD_LOCK_LIMIT_S):
                return True
            await _close(server, _lease(owner, turn))
    return False


async def is_marked(server: SglangServer, mark: str) -> bool:
    """Whether any engine has left this mark on this server process. Opens the session briefly; if a wrong "yes" is
    harmful, only one engine at a time may call this."""
    if not await _open(server, mark, PROBE_LIMIT_S):
        return True
    await _close(server, mark)
    return False


async def leave_mark(server: SglangServer, mark: str, *, limit_s: float | None = None) -> None:
    """Leaves a mark that ends with the server process, or after `limit_s`."""
    await _open(server, mark, limit_s)


async def _open(server: SglangServer, session: str, limit_s: float | None) -> bool:
    """Does the same as `open_session`; a session that opens after its caller was cancelled is closed again."""
    opening = asyncio.create_task(server.open_session(session, limit_s=limit_s))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        _ABANDONED.add(task := asyncio.create_task(_close_once_open(server, session, opening)))
        task.add_done_callback(_ABANDONED.discard)
        raise


async def _close_once_open(server: SglangServer, session: str, opening: "asyncio.Task[bool]") -> None:
    with suppress(EngineError):
        if await opening:
            await _close(server, session)


async def _close(server: SglangServer, session: str) -> None:
    with suppress(EngineError):
        await server.close_session(session)


def _lease(owner: str, turn: int) -> str:
    return f"osworld-use-{owner}-{turn % 2}"


_ABANDONED: set["asyncio.Task[None]"] = set()
"""References that keep the tasks from being collected before they end."""

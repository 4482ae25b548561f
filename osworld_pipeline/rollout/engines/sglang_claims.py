"""How programs that know nothing of each other share an sglang server: one loads weights at a time, and weights that
somebody samples from are not replaced by a stranger.

Both are sessions of the server itself: opening one that is open fails, and one that is not closed ends by itself. So a
claim holds between processes and hosts, goes with the server, and outlives whoever made it by a limited time.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.engines.http_calls import TransientError, shown
from osworld_pipeline.rollout.engines.sglang_server import LOAD_TIMEOUT_S, SglangServer

LOADING = "osworld-loading"
LOADING_LIMIT_S = 120.0
"""After which the claim of a loader that was killed ends."""
PAUSE_S = 0.5
"""Between two looks at a claim that another has, on average."""
RENEWAL_S = 20.0
USE_LIMIT_S = 90.0
"""After which the use of a program that was killed ends."""
CLOSING_TIMEOUT_S = 5.0
VISION_CHECKED = "osworld-vision-checked"


@asynccontextmanager
async def loading(
    server: SglangServer, is_needless: Callable[[], Awaitable[bool]], *, limit_s: float = LOAD_TIMEOUT_S
) -> AsyncIterator[bool]:
    """Whether the server is the caller's to load weights into, until the block ends. It is not where `is_needless` says
    so, asked while another loads.

    Raises:
        TransientError: others did for all of `limit_s`.
        EngineError: the server knows no sessions.
    """
    deadline = time.monotonic() + limit_s
    while not await _opened(server, LOADING, LOADING_LIMIT_S):
        if await is_needless():
            yield False
            return
        if time.monotonic() >= deadline:
            raise TransientError(f"others have been loading weights into {shown(server.url)} for {limit_s:.0f} s")
        await asyncio.sleep(random.uniform(0.5, 1.5) * PAUSE_S)
    try:
        yield True
    finally:
        await asyncio.shield(_close(server, LOADING))


async def end_pause(server: SglangServer) -> None:
    """A loader that was killed leaves a server paused: it goes on, unless somebody loads just now. Never raises."""
    with suppress(EngineError):
        if await _opened(server, LOADING, LOADING_LIMIT_S):
            try:
                await server.continue_generation()
            finally:
                await asyncio.shield(_close(server, LOADING))


async def renew_use(server: SglangServer, owner: str, *, turn: int) -> None:
    """Somebody samples what `owner` loaded. `turn`: counts the renewals; one of two sessions is always open."""
    session = _use(owner, turn)
    if turn:
        await server.close_session(session)
    await server.open_session(session, limit_s=USE_LIMIT_S)


async def end_use(server: SglangServer, owner: str) -> None:
    """Never raises."""
    for turn in range(2):
        await _close(server, _use(owner, turn))


async def is_used(server: SglangServer, owner: str) -> bool:
    """Whether somebody samples what `owner` loaded: asked by one who would replace it. A use whose renewal waited for a
    long load to end has another moment to come."""
    for attempt in range(2):
        if attempt:
            await asyncio.sleep(PAUSE_S)
        for turn in range(2):
            if not await _opened(server, _use(owner, turn), LOADING_LIMIT_S):
                return True
            await _close(server, _use(owner, turn))
    return False


async def is_vision_checked(server: SglangServer) -> bool:
    """Whether anybody has found this very process to keep no stale images."""
    if not await _opened(server, VISION_CHECKED, CLOSING_TIMEOUT_S):
        return True
    await _close(server, VISION_CHECKED)
    return False


async def note_vision_checked(server: SglangServer) -> None:
    await _opened(server, VISION_CHECKED, None)


async def _opened(server: SglangServer, session: str, limit_s: float | None) -> bool:
    """As `open_session`; a session that opens for one who has been cancelled meanwhile is closed again."""
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


def _use(owner: str, turn: int) -> str:
    return f"osworld-use-{owner}-{turn % 2}"


_ABANDONED: set["asyncio.Task[None]"] = set()
"""Held, so that they are not collected before they are done."""

"""Work for a connected client: the work of a client that disconnects is cancelled."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

Result = TypeVar("Result")


async def while_connected(
    request: Request, work: Coroutine[Any, Any, Result], *, undo: Callable[[Result], Awaitable[None]] | None = None
) -> Result | None:
    """The result of `work`, or None if the client disconnected: the work is then cancelled, or undone if it has just
    finished. The request's body must have been read."""
    working, hanging_up = asyncio.create_task(work), asyncio.create_task(_hang_up(request))
    try:
        await asyncio.wait({working, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
        is_gone = hanging_up.done()
        hanging_up.cancel()
    if working.cancelled():
        return None
    result = working.result()
    if is_gone:
        if undo is not None:
            await undo(result)
        return None
    return result


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue

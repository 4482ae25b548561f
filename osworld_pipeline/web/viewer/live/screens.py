"""One stream of pictures for a page, made of the streams of the env servers whose desktops it shows. A page that reads
slowly gets the newest picture of each desktop, so nothing accumulates."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from osworld_pipeline.errors import PipelineError
from osworld_pipeline.web.viewer.live.servers import LiveServers
from osworld_pipeline.web.viewer.settings import BadQuestionError, TooBusyError
from osworld_pipeline.wire.live_screens import END_GRACE_S, STREAM_S, read_screen_records, screen_record

MAX_STREAMS = 12
"""A page uses one stream, and a second one for an enlarged desktop. Each uses one stream of every env server whose
desktops it shows; an env server allows 16."""
MAX_DESKTOPS = 64
"""Desktops of one stream. A page shows single pictures of the other desktops."""
LOOK_INTERVAL_S = 1.0
RETRY_S = 2.0
_SEPARATOR = "#"


def desktop_key(url: str, replica_id: str) -> str:
    return f"{url}{_SEPARATOR}{replica_id}"


def split_key(key: str) -> tuple[str, str]:
    """URL and replica. Raises BadQuestionError."""
    url, separator, replica_id = key.partition(_SEPARATOR)
    if not separator:
        raise BadQuestionError("a desktop is named by the address of its env server, # and its replica")
    return url, replica_id


class LiveScreens:
    def __init__(self, servers: LiveServers, is_ending: Callable[[], bool] = lambda: False) -> None:
        """`is_ending`: whether the viewer is asked to stop."""
        self._servers, self._is_ending = servers, is_ending
        self._num_streams = 0
        self._ending = set[asyncio.Task[None]]()
        """Readers that close their connections."""

    def need_room(self) -> None:
        """
        Raises:
            TooBusyError: too many pages watch.
        """
        if self._num_streams >= MAX_STREAMS:
            raise TooBusyError(f"{MAX_STREAMS} streams of live desktops are open already; close a page that shows some")

    async def stream(self, keys: Sequence[str], width: int) -> AsyncGenerator[bytes, None]:
        """Records (wire/live_screens.py) with the key of each desktop as its replica.

        Raises:
            BadQuestionError: a key is not valid.
        """
        wanted: dict[str, list[str]] = {}
        for url, replica_id in map(split_key, keys[:MAX_DESKTOPS]):
            wanted.setdefault(url, []).append(replica_id)
        page, readers, end = _Page(), dict[str, asyncio.Task[None]](), time.monotonic() + STREAM_S
        self._num_streams += 1
        try:
            while not self._is_ending() and time.monotonic() < end:
                self._servers.watch()
                self._start_and_stop(readers, wanted, page, width)
                page.has_changed.clear()
                for key in tuple(page.newest):
                    yield screen_record(key, page.newest.pop(key))
                try:
                    async with asyncio.timeout(LOOK_INTERVAL_S):
                        await page.has_changed.wait()
                except TimeoutError:
                    continue
        finally:
            self._num_streams -= 1
            for reader in readers.values():
                self._stop(reader)

    def _start_and_stop(
        self, readers: dict[str, asyncio.Task[None]], wanted: dict[str, list[str]], page: "_Page", width: int
    ) -> None:
        """Reads from the wanted servers that answer, and stops reading from the others, because the connection to a
        lost server stays open."""
        for url, replica_ids in wanted.items():
            server = self._servers.servers.get(url)
            is_answering = server is not None and server.is_answering
            reader = readers.get(url)
            if reader is not None and reader.done():
                reader.result()
            if is_answering and reader is None:
                readers[url] = asyncio.create_task(self._read(url, replica_ids, page, width))
            elif not is_answering and reader is not None:
                self._stop(readers.pop(url))

    def _stop(self, reader: asyncio.Task[None]) -> None:
        """Does not wait until the reader has ended: when a page disconnects, its task is cancelled repeatedly, which
        would interrupt the closing of the connection and leave the connection open."""
        self._ending.add(reader)
        reader.add_done_callback(self._ending.discard)
        reader.cancel()

    async def _read(self, url: str, replica_ids: list[str], page: "_Page", width: int) -> None:
        """Reads pictures until it is cancelled. A server that refuses is asked again: the figures show why it does not
        answer."""
        query = [("width", str(width)), *(("replica", replica_id) for replica_id in replica_ids)]
        while True:
            try:
                async with (
                    self._servers.get(url, "/status/live", query, silence_s=STREAM_S + END_GRACE_S) as answer,
                    aclosing(read_screen_records(answer.aiter_bytes())) as records,
                ):
                    async for replica_id, picture in records:
                        page.newest[desktop_key(url, replica_id)] = picture
                        page.has_changed.set()
            except PipelineError:
                pass
            await asyncio.sleep(RETRY_S)


class _Page:
    def __init__(self) -> None:
        self.newest: dict[str, bytes] = {}
        """The picture of each desktop that the page does not have yet."""
        self.has_changed = asyncio.Event()

"""Addresses of the live page: its figures, its stream, and single pictures."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import quote

import duckdb
import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from osworld_pipeline.errors import EnvServerError, PipelineError
from osworld_pipeline.rollout.own_servers import own_servers
from osworld_pipeline.web.viewer.index import EpisodeIndex
from osworld_pipeline.web.viewer.live.screens import LiveScreens, split_key
from osworld_pipeline.web.viewer.live.servers import LiveServers, answer_of
from osworld_pipeline.web.viewer.settings import BadQuestionError, NotFoundError, TooBusyError, ViewerSettings
from osworld_pipeline.wire.live_screens import LARGE_WIDTH, SMALL_WIDTH, LiveResponse
from osworld_pipeline.wire.waiting import while_connected

WIDTHS = (SMALL_WIDTH, LARGE_WIDTH)
MAX_PICTURES = 8
"""Single pictures that are fetched at once."""
MAX_WAITING_PICTURES = 64
STORE_INTERVAL_S = 3.0
NO_CONTENT = 204


class LivePages:
    def __init__(self, settings: ViewerSettings, index: EpisodeIndex, is_ending: Callable[[], bool]) -> None:
        """Raises PipelineError: an address of env servers is not valid."""
        self.servers = LiveServers(
            settings.env_server_urls, settings.env_server_token, own=partial(own_servers, settings.state.own_servers)
        )
        self._screens = LiveScreens(self.servers, is_ending)
        self._stored = _Stored(index)
        self._fetching = asyncio.Semaphore(MAX_PICTURES)
        self._num_pictures = 0

    def routes(self) -> Mapping[str, Callable[[Request], Awaitable[Response]]]:
        return {"/live/figures": self.figures, "/live/screens": self.screens, "/live/picture": self.picture}

    async def figures(self, _: Request) -> Response:
        """Every server with its desktops, and which of their episodes are stored."""
        self.servers.watch()
        servers = [answer_of(server) for server in self.servers.servers.values()]
        stored = await self._stored.among(_record_ids(servers))
        names = [{"address": address, "problem": problem} for address, problem in self.servers.name_problems.items()]
        return Response(
            orjson.dumps({"servers": servers, "names": names, "stored": stored}), media_type="application/json"
        )

    async def screens(self, request: Request) -> Response:
        keys = request.query_params.getlist("desktop")
        if not keys:
            raise BadQuestionError("name desktops: /live/screens?desktop=ADDRESS%23REPLICA")
        for key in keys:
            split_key(key)
        self._screens.need_room()
        return LiveResponse(self._screens.stream(keys, _width(request)))

    async def picture(self, request: Request) -> Response:
        url, replica_id = split_key(request.query_params.get("desktop", ""))
        width = _width(request)
        if url not in self.servers.servers:
            raise NotFoundError("there is no such env server")
        if self._num_pictures >= MAX_WAITING_PICTURES:
            raise TooBusyError("too many pictures are fetched at this time; ask again")
        self._num_pictures += 1
        try:
            made = await while_connected(request, self._picture(url, replica_id, width))
        finally:
            self._num_pictures -= 1
        return Response(status_code=NO_CONTENT) if made is None else made

    async def _picture(self, url: str, replica_id: str, width: int) -> Response:
        known = {replica.id for replica in status.replicas} if (status := self.servers.servers[url].status) else set()
        if replica_id not in known:
            raise NotFoundError("there is no such desktop")
        async with self._fetching:
            path, query = f"/status/replicas/{quote(replica_id, safe='')}/picture", [("width", str(width))]
            try:
                status_code, body = await self.servers.read(url, path, query)
            except EnvServerError:
                return Response(status_code=NO_CONTENT)
        if status_code == NO_CONTENT or not body.startswith(b"\xff\xd8\xff"):
            return Response(status_code=NO_CONTENT)
        return Response(body, media_type="image/jpeg")


class _Stored:
    """Which episodes are in the store; it is asked at intervals, however many pages are open."""

    def __init__(self, index: EpisodeIndex) -> None:
        self._index = index
        self._known = frozenset[str]()
        self._asking = asyncio.Lock()
        self._asked_at = -STORE_INTERVAL_S

    async def among(self, record_ids: list[str]) -> list[str]:
        async with self._asking:
            if time.monotonic() - self._asked_at >= STORE_INTERVAL_S:
                # A store that cannot be read is reported by the other pages.
                with suppress(PipelineError, duckdb.Error):
                    self._known = await run_in_threadpool(self._find, record_ids)
                self._asked_at = time.monotonic()
        return [record_id for record_id in record_ids if record_id in self._known]

    def _find(self, record_ids: list[str]) -> frozenset[str]:
        self._index.refresh()
        with self._index.reading() as reader:
            found = reader.rows("SELECT episode_id FROM facts WHERE episode_id IN (SELECT unnest(?))", [record_ids])
        return frozenset(row[0] for row in found)


def _width(request: Request) -> int:
    given = request.query_params.get("width", str(SMALL_WIDTH))
    if given not in map(str, WIDTHS):
        raise BadQuestionError(f"the width of a picture is {SMALL_WIDTH} or {LARGE_WIDTH}")
    return int(given)


def _record_ids(servers: list[dict[str, Any]]) -> list[str]:
    """Ids under which the present and the last episodes of the desktops are stored."""
    replicas = [replica for server in servers if server["status"] for replica in server["status"]["replicas"]]
    episodes = [replica[name] for replica in replicas for name in ("episode", "last") if replica[name]]
    return list(dict.fromkeys(episode["record_id"] for episode in episodes if episode["record_id"]))

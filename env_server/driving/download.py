"""Downloads files for a task's set-up: only from allowed hosts (redirects included), within limits of size and time, to
disk, and once for all concurrent requests."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urljoin, urlsplit

import httpx

from env_server.driving.download_cache import DEFAULT_MAX_BYTES, DownloadCache
from env_server.settings import TaskLimits
from osworld_pipeline.errors import SetupError
from osworld_pipeline.wire.certificates import trusted_certificates

MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_PIECE_BYTES = 1024 * 1024
_MAX_ROUNDS = 3
"""Fetches of one file in all: a file that is evicted before it is read, for example by another server, is fetched
again."""


class Downloader:
    def __init__(
        self,
        limits: TaskLimits,
        *,
        folder: Path | None = None,
        cache_max_bytes: int = DEFAULT_MAX_BYTES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Files are kept in `folder`, or if it is None in a temporary folder until `close`. `transport` replaces the
        network in tests."""
        self.limits = limits
        self._folder, self._cache_max_bytes = folder, cache_max_bytes
        self._temporary: Path | None = None
        self._cache: DownloadCache | None = None
        self._fetching: dict[str, asyncio.Task[None]] = {}
        # A site without direct internet access configures a proxy in the environment, so httpx reads it from there.
        self._http = httpx.AsyncClient(
            transport=transport, timeout=limits.download_timeout_s, verify=trusted_certificates()
        )

    async def fetch(self, url: str) -> bytes:
        """
        Raises:
            SetupError: the host is not allowed, or the file could not be downloaded within the limits.
        """
        check_address(url, self.limits)
        try:
            cache = self._open_cache()
            for _ in range(_MAX_ROUNDS):
                data = await asyncio.to_thread(cache.read, url)
                if data is not None:
                    return data
                await self._fetch_once(url, cache)
        except OSError as error:
            raise SetupError(f"{url} cannot be kept on this server: {error.strerror}") from error
        raise SetupError(
            f"{url} was evicted from the download cache before it could be read; try again, or give each server a "
            "--state-dir of its own"
        )

    async def close(self) -> None:
        fetching = list(self._fetching.values())
        for task in fetching:
            task.cancel()
        await asyncio.gather(*fetching, return_exceptions=True)
        await self._http.aclose()
        if self._temporary is not None:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)
            self._temporary = self._cache = None

    def _open_cache(self) -> DownloadCache:
        if self._cache is None:
            folder = self._folder
            if folder is None:
                folder = self._temporary = Path(tempfile.mkdtemp(prefix="desktop-downloads-"))
            self._cache = DownloadCache(folder, max_bytes=self._cache_max_bytes)
        return self._cache

    async def _fetch_once(self, url: str, cache: DownloadCache) -> None:
        """Joins a running fetch of the same URL. The fetch continues when one of its waiters is cancelled."""
        task = self._fetching.get(url)
        if task is None:
            task = self._fetching[url] = asyncio.create_task(self._fetch_to_cache(url, cache))
            task.add_done_callback(lambda done: self._forget(url, done))
        await asyncio.shield(task)

    def _forget(self, url: str, task: asyncio.Task[None]) -> None:
        self._fetching.pop(url, None)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved if no caller waits any more

    async def _fetch_to_cache(self, url: str, cache: DownloadCache) -> None:
        part = await asyncio.to_thread(cache.begin)
        try:
            async with asyncio.timeout(self.limits.download_timeout_s):
                await self._follow(url, part.file)
            await asyncio.to_thread(cache.keep, part, url)
        except TimeoutError as error:
            raise SetupError(f"{url} took more than {self.limits.download_timeout_s:g} s to download") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SetupError(f"{url} cannot be downloaded: {error or type(error).__name__}") from error
        finally:
            part.discard()

    async def _follow(self, url: str, file: BinaryIO) -> None:
        for _ in range(MAX_REDIRECTS + 1):
            check_address(url, self.limits)
            async with self._http.stream("GET", url) as answer:
                if answer.status_code in _REDIRECTS:
                    url = urljoin(url, answer.headers.get("location", ""))
                    continue
                if answer.status_code != httpx.codes.OK:
                    raise SetupError(f"{url} answered {answer.status_code}")
                return await self._read(answer, url, file)
        raise SetupError(f"more than {MAX_REDIRECTS} redirects, the last to {url}")

    async def _read(self, answer: httpx.Response, url: str, file: BinaryIO) -> None:
        num_bytes = 0
        async for piece in answer.aiter_bytes(_PIECE_BYTES):
            num_bytes += len(piece)
            if num_bytes > self.limits.download_max_bytes:
                raise SetupError(f"{url} is larger than {self.limits.download_max_bytes} bytes")
            await asyncio.to_thread(file.write, piece)


def check_address(url: object, limits: TaskLimits) -> None:
    """
    Raises:
        SetupError: the URL is not a web address, or its host is not allowed.
    """
    try:
        parts = urlsplit(str(url))
    except ValueError as error:
        raise SetupError(f"{url!r} is not a web address") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SetupError(f"{url!r} is not a web address")
    if not any(_matches_host(parts.hostname, host) for host in limits.download_hosts):
        raise SetupError(
            f"downloads from {parts.hostname} are not allowed; add --download-host {parts.hostname} to allow them"
        )


def _matches_host(hostname: str, allowed: str) -> bool:
    """`*.example.org` allows every host below example.org."""
    if allowed.startswith("*."):
        return hostname.endswith(allowed[1:])
    return hostname == allowed

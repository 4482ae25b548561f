"""Fetches what a task's set-up downloads: from allowed hosts only, every redirect included, within size and time."""

import asyncio
from urllib.parse import urljoin, urlsplit

import httpx

from env_server.settings import TaskLimits
from osworld_pipeline.errors import SetupError

MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)


class Downloader:
    def __init__(self, limits: TaskLimits, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` replaces the network in tests."""
        self._limits = limits
        # A proxy from the environment is how a closed site reaches the world, so the environment is trusted here.
        self._http = httpx.AsyncClient(transport=transport, timeout=limits.download_timeout_s)

    async def fetch(self, url: str) -> bytes:
        """
        Raises:
            SetupError: the host is not allowed, or the file could not be had within the limits.
        """
        try:
            async with asyncio.timeout(self._limits.download_timeout_s):
                return await self._follow(url)
        except TimeoutError as error:
            raise SetupError(f"{url} took more than {self._limits.download_timeout_s:g} s to download") from error
        except httpx.HTTPError as error:
            raise SetupError(f"{url} cannot be downloaded: {error or type(error).__name__}") from error

    async def close(self) -> None:
        await self._http.aclose()

    async def _follow(self, url: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            self._check(url)
            async with self._http.stream("GET", url) as answer:
                if answer.status_code in _REDIRECTS:
                    url = urljoin(url, answer.headers.get("location", ""))
                    continue
                if answer.status_code != httpx.codes.OK:
                    raise SetupError(f"{url} answered {answer.status_code}")
                return await self._read(answer, url)
        raise SetupError(f"more than {MAX_REDIRECTS} redirects, the last to {url}")

    async def _read(self, answer: httpx.Response, url: str) -> bytes:
        parts, num_bytes = [], 0
        async for part in answer.aiter_bytes():
            num_bytes += len(part)
            if num_bytes > self._limits.download_max_bytes:
                raise SetupError(f"{url} is larger than {self._limits.download_max_bytes} bytes")
            parts.append(part)
        return b"".join(parts)

    def _check(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SetupError(f"{url!r} is no web address")
        if not any(_matches(parts.hostname, host) for host in self._limits.download_hosts):
            raise SetupError(
                f"downloads from {parts.hostname} are not allowed; add it with --download-host if it is to be trusted"
            )


def _matches(hostname: str, allowed: str) -> bool:
    """`*.example.org` allows every host below example.org."""
    if allowed.startswith("*."):
        return hostname.endswith(allowed[1:])
    return hostname == allowed

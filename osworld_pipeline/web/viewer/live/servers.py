"""The env servers of a run and what they report, asked every second or less often, and only while a page shows them:
those at the addresses of the settings, and those that programs of the state have started for themselves."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import SecretStr, ValidationError

from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.rollout.env_addresses import Lookup, Resolve, is_final, lookup_of, resolve_name, split_addresses
from osworld_pipeline.rollout.env_answers import error_of, unreachable
from osworld_pipeline.web.viewer.settings import ViewerError
from osworld_pipeline.wire.http_pools import PooledTransport
from osworld_pipeline.wire.status import ServerStatus

log = logging.getLogger(__name__)

ASK_INTERVAL_S = 1.0
MAX_QUESTIONS_PER_S = 20
"""With more servers than this, each is asked less often than every ASK_INTERVAL_S."""
NAME_INTERVAL_S = 3.0
OWN_INTERVAL_S = 1.0
LIMIT_S = 5.0
"""Time limit of one answer, and of resolving a name."""
KEEP_S = 15.0
"""The last figures of a server without an answer are shown for this time."""
WATCH_S = 15.0
"""How long the servers are still asked after the last request of a page."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
_OWN = "servers of this state"
"""A task's key, next to URLs and names."""


class WatchedServer:
    """One env server and what it last reported."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.status: ServerStatus | None = None
        self.problem = ""
        """Why it does not answer; empty while it answers, and until the first request ends."""
        self.answered_at = time.monotonic()
        """Time of the last answer, or of the discovery before the first one, in seconds of the monotonic clock."""

    @property
    def state(self) -> str:
        if self.problem:
            return "lost"
        if self.status is None:
            return "connecting"
        return "draining" if self.status.server.is_draining else "serving"

    @property
    def is_answering(self) -> bool:
        return self.status is not None and not self.problem

    def take(self, status: ServerStatus) -> None:
        self.status, self.problem, self.answered_at = status, "", time.monotonic()

    def fail(self, problem: str) -> None:
        self.problem = problem
        if time.monotonic() - self.answered_at >= KEEP_S:
            self.status = None


class LiveServers:
    def __init__(
        self,
        addresses: Sequence[str],
        token: SecretStr | None,
        *,
        own: Callable[[], Mapping[str, SecretStr]] = dict,
        resolve: Resolve = resolve_name,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`own`: the tokens of the servers of this state's programs, by URL; it may read files. `transport` replaces
        the network in tests.

        Raises:
            PipelineError: an address is not valid.
        """
        found = {
            address: None if is_final(address) else lookup_of(address, resolve)  # the viewer is in no Ray cluster
            for address in split_addresses(addresses)
        }
        self._names = {address: lookup for address, lookup in found.items() if lookup is not None}
        self._fixed = tuple(_checked(address) for address in found if address not in self._names)
        self._found: dict[str, tuple[str, ...]] = {}
        """The servers of each name, as last resolved."""
        self.name_problems: dict[str, str] = {}
        self._servers = {url: WatchedServer(url) for url in self._fixed}
        self._token, self._read_own, self._transport = token, own, transport
        self._own: Mapping[str, SecretStr] = {}
        self._http: httpx.AsyncClient | None = None
        self._asked_at = 0.0
        self._watching: asyncio.Task[None] | None = None

    @property
    def servers(self) -> Mapping[str, WatchedServer]:
        """By URL."""
        return self._servers

    def watch(self) -> None:
        """The servers are asked from now on, for WATCH_S after the last call."""
        self._asked_at = time.monotonic()
        if self._watching is None or self._watching.done():
            # In a context of its own: it outlives the request that starts it.
            self._watching = asyncio.create_task(self._watch(), name="live servers", context=Context())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._http is not None:
            await self._http.aclose()

    @asynccontextmanager
    async def get(
        self, url: str, path: str, query: Iterable[tuple[str, str]] = (), *, silence_s: float = LIMIT_S
    ) -> AsyncGenerator[httpx.Response, None]:
        """The answer of a server, to be read in the block. `silence_s`: limit between two parts of it.

        Raises:
            EnvServerError: it does not answer, or refuses.
        """
        if self._http is None:
            self._http = httpx.AsyncClient(
                transport=self._transport or PooledTransport(),
                trust_env=False,  # a server has an explicit address; a proxy from the environment would be wrong
            )
        timeout = httpx.Timeout(LIMIT_S, read=silence_s)
        token = self._token if url in self._configured() else self._own.get(url)
        headers = {"Authorization": f"Bearer {token.get_secret_value()}"} if token else {}
        request = self._http.stream("GET", f"{url}{path}", params=list(query), headers=headers, timeout=timeout)
        try:
            async with request as response:
                if response.status_code >= httpx.codes.MULTIPLE_CHOICES:
                    await response.aread()
                    raise error_of(path, url, response)
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EnvServerError(unreachable(url)) from error
        except httpx.TimeoutException as error:
            raise EnvServerError(f"{url}{path} did not answer in time") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EnvServerError(f"the connection to {url} broke: {error or type(error).__name__}") from error

    async def read(self, url: str, path: str, query: Iterable[tuple[str, str]] = ()) -> tuple[int, bytes]:
        """Status and body of an answer, within LIMIT_S. Raises EnvServerError, as `get`."""
        try:
            async with asyncio.timeout(LIMIT_S), self.get(url, path, query) as response:
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > MAX_ANSWER_BYTES:
                        raise EnvServerError(f"{url}{path} answered with more than {MAX_ANSWER_BYTES:,} bytes")
                return response.status_code, bytes(body)
        except TimeoutError as error:
            raise EnvServerError(f"{url}{path} did not answer within {LIMIT_S:g} s") from error

    async def _watch(self) -> None:
        """Asks the servers until there was no request of a page for WATCH_S."""
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            tasks[_OWN] = asyncio.create_task(self._follow_own())
            for address, look_up in self._names.items():
                tasks[address] = asyncio.create_task(self._follow_name(address, look_up))
            while time.monotonic() - self._asked_at < WATCH_S:
                self._join_and_leave(tasks)
                for task in tasks.values():
                    if task.done():
                        task.result()
                await asyncio.sleep(ASK_INTERVAL_S / 4)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _join_and_leave(self, tasks: dict[str, asyncio.Task[None]]) -> None:
        """Starts to ask new servers, and stops asking servers that are no longer listed."""
        present = dict.fromkeys((*self._configured(), *self._own))
        for url in [url for url in self._servers if url not in present]:
            log.info("the env server at %s is no longer listed", url)
            del self._servers[url]
            if (task := tasks.pop(url, None)) is not None:
                task.cancel()
        for url in present:
            server = self._servers.setdefault(url, WatchedServer(url))
            if url not in tasks:
                tasks[url] = asyncio.create_task(self._follow(server))

    def _configured(self) -> tuple[str, ...]:
        """The servers that have the token of the settings."""
        return (*self._fixed, *(url for urls in self._found.values() for url in urls))

    async def _follow_own(self) -> None:
        while True:
            self._own = await asyncio.to_thread(self._read_own)
            await asyncio.sleep(OWN_INTERVAL_S)

    async def _follow_name(self, address: str, look_up: Lookup) -> None:
        """If the name cannot be resolved at present, its servers stay as they were."""
        while True:
            try:
                async with asyncio.timeout(LIMIT_S):
                    self._found[address] = tuple(sorted(await look_up()))
                self.name_problems.pop(address, None)
            except (EnvServerError, TimeoutError) as error:
                self.name_problems[address] = str(error) or f"it did not resolve within {LIMIT_S:g} s"
            await asyncio.sleep(NAME_INTERVAL_S)

    async def _follow(self, server: WatchedServer) -> None:
        while True:
            try:
                _, body = await self.read(server.url, "/status.json")
                server.take(ServerStatus.model_validate_json(body))
            except ValidationError as error:
                first = error.errors()[0]["msg"]
                server.fail(f"{server.url}/status.json did not answer like an env server: {first}")
            except EnvServerError as error:
                server.fail(str(error))
            await asyncio.sleep(max(ASK_INTERVAL_S, len(self._servers) / MAX_QUESTIONS_PER_S))


def _checked(address: str) -> str:
    """The URL of one server. Raises ViewerError."""
    try:
        parts = urlsplit(address)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        is_valid = is_valid and parts.username is None and not parts.query and not parts.fragment
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ViewerError(
            "the address of an env server must be http://HOST:PORT, https://HOST or dns+http://NAME:PORT, "
            f"not {address!r}; its token goes into ENV_SERVER_TOKEN"
        )
    return address


def name_of(url: str) -> str:
    """A server's name on the page: its address without the scheme."""
    return url.partition("://")[2]


def answer_of(server: WatchedServer) -> dict[str, Any]:
    """What a page shows of a server."""
    return {
        "url": server.url,
        "name": name_of(server.url),
        "state": server.state,
        "problem": server.problem,
        "silent_s": round(time.monotonic() - server.answered_at),
        "status": None if server.status is None else server.status.model_dump(mode="json"),
    }

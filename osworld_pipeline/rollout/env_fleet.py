"""The env servers of a run: which of them answer, what they have free, and which one gets the next episode.

Servers may come, drain and go while the run uses them. Each is looked at every few seconds, and an address that stands
for several servers is resolved again as often; one that does not answer delays no other.
"""

import asyncio
import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

from osworld_pipeline.domain.grounds import Grounds
from osworld_pipeline.domain.version import installed_version
from osworld_pipeline.errors import EnvServerError, PipelineError
from osworld_pipeline.rollout.env_addresses import Lookup, Resolve, is_final, lookup_of, resolve_name
from osworld_pipeline.rollout.env_answers import UnreachableError
from osworld_pipeline.wire import HealthAnswer
from osworld_pipeline.wire.protocol import PROTOCOL

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 3.0
NAME_LIMIT_S = 60.0
LOOK_LIMIT_S = 10.0
"""A server that does not answer /health within this time gets no episode until it does."""
RETURN_CONNECT_S = 2.0
"""Limit of connecting to a server that is down. TCP doubles the pause between its attempts to connect, so a new
connection reaches a host whose network has returned sooner than an old one."""
SILENT_S = 30.0
"""If a server answers nothing for this time, the calls that wait for it are abandoned: its machine or its network is
lost."""


class ServerState(StrEnum):
    UNKNOWN = "unknown"
    """The server has not been examined yet."""
    UP = "up"
    DRAINING = "draining"
    """It finishes its episodes and takes no new ones."""
    DOWN = "down"
    REFUSED = "refused"
    """Its protocol, its desktops or its grader differ from those of the run."""


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """What a server reports of itself."""

    version: str
    protocol: int
    grounds: Grounds


@dataclass(eq=False)
class EnvServer:
    url: str
    state: ServerState = ServerState.UNKNOWN
    free: int | None = None
    """Estimate of the free desktops; below 0 if more resets of this client wait there than desktops are free. None if
    not reported."""
    num_replicas: int = 0
    num_in_use: int = 0
    """Desktops there that this client has."""
    num_waiting: int = 0
    """Resets of this client that wait there."""
    report: ServerReport | None = None
    """None if the server makes none, or has not been asked since it was down."""
    last_turn: int = 0
    complaint: str = ""
    """Why it gets no episode."""
    last_answer: float = field(default_factory=time.monotonic)
    """Time of the last answer in seconds of the monotonic clock; its discovery counts as an answer."""
    is_silent: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while calls that wait for it are abandoned."""


class ServerQuestions(Protocol):
    """What the fleet asks a server. Both raise EnvServerError if it does not answer."""

    async def health_of(self, base_url: str, *, connect_s: float | None = None) -> HealthAnswer:
        """`connect_s`: limit of connecting; None: the usual one."""
        ...

    async def report_of(self, base_url: str) -> ServerReport | None:
        """None if the server makes none."""
        ...


class EnvFleet:
    def __init__(
        self,
        addresses: Sequence[str],
        questions: ServerQuestions,
        *,
        may_mix: bool = False,
        resolve: Resolve = resolve_name,
    ) -> None:
        """`may_mix`: servers may differ in desktop image and grader.

        Raises:
            EnvServerError: an address is not valid.
        """
        self._questions, self._may_mix = questions, may_mix
        lookups = {address: lookup_of(address, resolve) for address in addresses}
        self._names = {address: lookup for address, lookup in lookups.items() if lookup is not None}
        self._servers = {address: EnvServer(address) for address in addresses if address not in self._names}
        self._left: dict[str, EnvServer] = {}
        """Servers that have left a name, and may still have episodes."""
        self._found: dict[str, frozenset[str]] = {}
        """The servers of each name that was resolved."""
        self._grounds: Grounds | None = None
        """Desktop image and grader of the run: those of the first server that reported its own."""
        self._turns = itertools.count(1)
        self.last_release = -math.inf
        """Time of the last end of an episode of this client, in seconds of the monotonic clock."""
        self._watching: asyncio.Task[None] | None = None
        self._looks: dict[EnvServer | str, asyncio.Task[None]] = {}
        """In progress, by server or name."""

    @property
    def servers(self) -> tuple[EnvServer, ...]:
        return tuple(self._servers.values())

    @property
    def has_several(self) -> bool:
        return len(self._servers) > 1 or bool(self._names)

    @property
    def has_free(self) -> bool:
        """Whether a server seems to have a free desktop."""
        return any(_capacity(server) > 0 for server in self._eligible())

    async def until_free(self, limit_s: float) -> None:
        """Returns as soon as a server seems to have a free desktop, or after this time."""
        end = time.monotonic() + limit_s
        while not self.has_free and (left_s := end - time.monotonic()) > 0:  # noqa: ASYNC110 - hundreds wait for one look
            await asyncio.sleep(min(left_s, random.uniform(0.25, 0.75)))

    async def open(self) -> None:
        """Looks at every server. Those that do not answer are named in the log, and used as soon as they answer. If
        there is no server yet, waits at most NAME_LIMIT_S until a name has an address.

        Raises:
            EnvServerError: no server answers, one has another protocol, or two of them differ in desktop image or
                grader; names them.
        """
        await self.look()
        deadline = time.monotonic() + NAME_LIMIT_S
        while not self._servers and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await self.look()
        differing = next((server for server in self.servers if server.state is ServerState.REFUSED), None)
        if differing is not None:
            raise EnvServerError(differing.complaint)
        if not any(server.state in (ServerState.UP, ServerState.DRAINING) for server in self.servers):
            raise EnvServerError(self._complaints() or self._nameless())
        self.watch()

    def grounds(self) -> frozenset[Grounds] | None:
        """The images and graders of the servers that are in use, as of the last look; None if one does not report its
        own."""
        found = {one.report for one in self.servers if one.state in (ServerState.UP, ServerState.DRAINING)}
        return None if None in found else frozenset(one.grounds for one in found if one is not None)

    def watch(self) -> None:
        """Looks at the servers every few seconds from now on, until `close`; also at a single one, which may come back
        with another image."""
        if self._watching is None:
            # Runs in a new context, because these looks belong to no trace, even if an episode's reset starts them.
            self._watching = asyncio.create_task(self._watch(), name="env servers", context=Context())

    async def close(self) -> None:
        watching, self._watching = self._watching, None
        tasks = [*([watching] if watching is not None else []), *self._looks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S * random.uniform(0.75, 1.25))
            for of in [one for one, look in self._looks.items() if look.done()]:
                self._looks.pop(of).result()
            for name in self._names:
                self._begin(name, partial(self._find, name))
            for server in self.servers:
                self._begin(server, partial(self._look_again, server))

    def _begin(self, of: EnvServer | str, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begins a look unless one is in progress."""
        if of not in self._looks:
            self._looks[of] = asyncio.create_task(look())

    async def _find(self, name: str) -> None:
        """Resolves a name, and begins a look at each server that has joined."""
        known = set(self._servers)
        await self._resolve_one(name, self._names[name])
        for url, server in self._servers.items():
            if url not in known:
                self._begin(server, partial(self._look_again, server))

    async def _look_again(self, server: EnvServer) -> None:
        await self._look_at(server)
        self._compare(server)

    def choose(self) -> EnvServer:
        """The server with the most free desktops, in turn among equals. If none answers, one of those that may come
        back.

        Raises:
            UnreachableError: no name has an address at present.
            EnvServerError: every server was refused.
            Exception: a defect of this program ended the looks at the servers.
        """
        if self._watching is not None and self._watching.done():
            self._watching.result()
        candidates = self._eligible() or [one for one in self.servers if one.state is not ServerState.REFUSED]
        if not candidates:
            raise EnvServerError(self._complaints()) if self._servers else UnreachableError(self._nameless())
        server = max(candidates, key=lambda one: (_capacity(one), -one.last_turn))
        server.last_turn = next(self._turns)
        if server.free is not None:
            server.free -= 1
        return server

    def is_full(self, server: EnvServer) -> None:
        server.free = min(0, server.free or 0)

    def is_unreachable(self, server: EnvServer, error: PipelineError) -> None:
        self._set_down(server, str(error))

    def has_answered(self, url: str) -> None:
        server = self._server_at(url)
        if server is not None:
            server.last_answer = time.monotonic()
            server.is_silent.clear()

    def silence_of(self, url: str) -> asyncio.Event | None:
        """Set while calls that wait for the server are abandoned; None if the server is not one of this run."""
        server = self._server_at(url)
        return None if server is None else server.is_silent

    def _server_at(self, url: str) -> EnvServer | None:
        return self._servers.get(url) or self._left.get(url)

    def released(self, url: str) -> None:
        """Records that an episode of this client on this server has ended."""
        self.last_release = time.monotonic()
        server = self._servers.get(url)
        if server is not None and server.free is not None:
            server.free = min(server.free + 1, server.num_replicas)

    async def look(self) -> None:
        """Looks at every server; returns when each has answered or its time is over."""
        for address, look_up in self._names.items():
            await self._resolve_one(address, look_up)
        await asyncio.gather(*map(self._look_at, self.servers))
        for server in self.servers:
            self._compare(server)

    async def _resolve_one(self, address: str, look_up: Lookup) -> None:
        """If the name cannot be resolved at present, its servers stay as they were."""
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                found = frozenset(await look_up())
        except (EnvServerError, TimeoutError) as error:
            log.warning("%s does not resolve: %s", address, error or type(error).__name__)
            return
        old = self._found.get(address, frozenset())
        self._found[address] = found
        for url in sorted(found - old):
            log.info("the env server at %s joins (%s)", url, address)
            self._servers.setdefault(url, self._left.pop(url, EnvServer(url)))
        for url in sorted(old - found):
            log.info("the env server at %s has left (%s)", url, address)
            server = self._servers.pop(url, None)
            if server is not None:
                self._left[url] = server
                if is_final(address):
                    server.is_silent.set()

    async def _look_at(self, server: EnvServer) -> None:
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                connect_s = RETURN_CONNECT_S if server.state is ServerState.DOWN else None
                health = await self._questions.health_of(server.url, connect_s=connect_s)
                self.has_answered(server.url)
                # Set at once, because the client now closes the episodes that it could not close while the server was
                # down, and each of them raises `free`.
                server.num_replicas = health.replicas
                server.free = health.free if health.replicas else None
                if server.report is None or server.state is ServerState.REFUSED:
                    server.report = await self._questions.report_of(server.url)
        except TimeoutError:
            self._set_down(server, f"{server.url}/health did not answer within {LOOK_LIMIT_S:g} s")
        except EnvServerError as error:
            self._set_down(server, str(error))
        else:
            if server.state is ServerState.DOWN:
                log.warning("the env server at %s answers again", server.url)
            server.state = ServerState.DRAINING if health.status == "draining" else ServerState.UP

    def _set_down(self, server: EnvServer, complaint: str) -> None:
        if server.state is not ServerState.DOWN and self.has_several:
            log.warning("%s; new episodes go to the other env servers", complaint)
        server.state, server.complaint = ServerState.DOWN, complaint
        if time.monotonic() - server.last_answer >= SILENT_S:
            server.is_silent.set()
        # It may come back with another image or version.
        server.free = server.report = None

    def _compare(self, server: EnvServer) -> None:
        if server.report is None or server.state is ServerState.DOWN:
            return
        complaint = self._difference(server.url, server.report)
        if complaint is None:
            return
        if server.complaint != complaint:
            log.warning("%s; it gets no episode", complaint)
        server.state, server.complaint = ServerState.REFUSED, complaint

    def _difference(self, url: str, report: ServerReport) -> str | None:
        """Why the run cannot use this server; None if it can."""
        if report.protocol != PROTOCOL:
            return (
                f"the env server at {url} (version {report.version}) has protocol {report.protocol}, and this program "
                f"(version {installed_version()}) has protocol {PROTOCOL}; install the same version on both sides"
            )
        self._grounds = self._grounds or report.grounds
        if self._may_mix or report.grounds == self._grounds:
            return None
        return (
            f"the env server at {url} has other desktops or another grader ({report.grounds}) than the run "
            f"({self._grounds}); give all servers the same version and image, or set desktop.may_mix_servers=true"
        )

    def _eligible(self) -> list[EnvServer]:
        return [one for one in self.servers if one.state in (ServerState.UP, ServerState.UNKNOWN)]

    def _complaints(self) -> str:
        return "; ".join(server.complaint for server in self.servers if server.complaint)

    def _nameless(self) -> str:
        names = ", ".join(self._names)
        return f"found no env server at {names}: check that each name resolves and that its servers run"


def _capacity(server: EnvServer) -> int:
    return 1 if server.free is None else server.free

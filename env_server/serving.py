"""Runs the server: one pool, one table of episodes, one port or several; on a signal or a request to drain it lets
episodes end and removes everything it created."""

import asyncio
import logging
import math
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from env_server.app import create_app
from env_server.driving.driver import Drivers
from env_server.episodes.table import EpisodeTable
from env_server.protocols import Provider
from env_server.replicas.pool import Pool
from env_server.settings import Settings, SettingsError
from osworld_pipeline.programs.addresses import ready_message
from osworld_pipeline.programs.answers import print_json
from osworld_pipeline.wire.connections import ConnectionLimits, bounded_config
from osworld_pipeline.wire.listening import listen_on, url_of, write_ready_file

log = logging.getLogger("env_server")

SHUTDOWN_GRACE_S = 3
"""How long answers may still take to be sent after every episode has been closed."""
DRAIN_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class ExtraListener:
    """One more port, with its own API over the same episodes. Its application has its own guard."""

    listener: socket.socket
    make_app: Callable[[EpisodeTable], ASGIApp]


class _Stop:
    """The request to end the server, by SIGTERM, SIGINT or the API. The first signal starts to drain, like a request to
    the API; the second one ends the server at once."""

    def __init__(self, drain_episodes_s: float) -> None:
        self.asked, self.hurried = asyncio.Event(), asyncio.Event()
        self.episodes_end_at = math.inf
        """Until when live episodes may go on, in seconds of the monotonic clock."""
        self._drain_episodes_s, self._is_signalled = drain_episodes_s, False

    def on_signal(self) -> None:
        if self._is_signalled:
            self.hurried.set()
        self._is_signalled = True
        self.drain(self._drain_episodes_s)

    def drain(self, limit_s: float) -> float:
        """Starts to drain. Returns the seconds until the earliest deadline of live episodes."""
        now = time.monotonic()
        self.episodes_end_at = min(self.episodes_end_at, now + limit_s)
        self.asked.set()
        return max(0.0, self.episodes_end_at - now)


def run_server(
    settings: Settings,
    provider: Provider,
    drivers: Drivers,
    listener: socket.socket,
    extra_listeners: Sequence[ExtraListener] = (),
    *,
    as_json: bool = False,
) -> None:
    """Runs `serve` on uvloop if it is installed, else on asyncio's event loop."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        from asyncio import new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve(settings, provider, drivers, listener, extra_listeners, as_json=as_json))


async def serve(
    settings: Settings,
    provider: Provider,
    drivers: Drivers,
    listener: socket.socket,
    extra_listeners: Sequence[ExtraListener] = (),
    *,
    as_json: bool = False,
) -> None:
    """Serves until SIGTERM, SIGINT or a request to drain; then live episodes get `drain_episodes_s` or the request's
    limit, calls in progress `drain_timeout_s`, and every replica is stopped. `as_json`: the line that says it is ready
    is JSON.

    Raises:
        DependencyError, ReplicaError: the desktops cannot be started; they have been removed.
    """
    loop, stop = asyncio.get_running_loop(), _Stop(settings.drain_episodes_s)
    # Enough threads for blocking work of every replica and as many answers; the default allows only a few.
    loop.set_default_executor(ThreadPoolExecutor(2 * settings.num_replicas + 16, thread_name_prefix="env-server"))
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.on_signal)
    pool = Pool(
        provider,
        num_replicas=settings.num_replicas,
        queue_timeout_s=settings.queue_timeout_s,
        start_timeout_s=settings.start_timeout_s,
    )
    try:
        if await _finishes_before(stop.asked, pool.start()):
            await _serve_pool(settings, pool, drivers, listener, extra_listeners, stop, as_json=as_json)
    finally:
        await pool.close()
        for number in signals:
            loop.remove_signal_handler(number)


async def _serve_pool(
    settings: Settings,
    pool: Pool,
    drivers: Drivers,
    listener: socket.socket,
    extra_listeners: Sequence[ExtraListener],
    stop: _Stop,
    *,
    as_json: bool,
) -> None:
    app = create_app(pool, settings, drivers, drain=stop.drain)
    episodes: EpisodeTable = app.state.episodes
    limits = connection_limits(settings)
    servers = {_server(app, limits): listener}
    servers |= {_server(extra.make_app(episodes), limits): extra.listener for extra in extra_listeners}
    serving = [asyncio.create_task(server.serve(sockets=[bound])) for server, bound in servers.items()]
    try:
        # uvicorn reports that it has started only by a flag.
        while not all(server.started for server in servers) and not any(task.done() for task in serving):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        url = url_of(settings.host, listener)
        if settings.ready_file is not None:
            write_ready_file(settings.ready_file, url)
        _announce(settings, pool, url, as_json=as_json)
        if await _finishes_before(stop.asked, _first_of(serving)):
            stop.drain(settings.drain_episodes_s)  # a port has ended by itself
        await _drain(settings, episodes, stop)
    finally:
        pool.drain()
        for server in servers:
            if stop.hurried.is_set():
                server.config.timeout_graceful_shutdown = 0
            server.should_exit = True
        await asyncio.gather(*serving)


def _announce(settings: Settings, pool: Pool, url: str, *, as_json: bool) -> None:
    states, wanted = pool.count_states(), settings.num_replicas
    up = wanted - states["starting"] - states["failed"]
    if as_json:
        facts = {"num_replicas": wanted, "num_ready": up, "provider": settings.provider}
        print_json({**ready_message(url), **facts}, on_one_line=True)
        return
    counts = f"{wanted} replicas" if up == wanted else f"{up} of {wanted} replicas"
    print(f"env-server ready: {url} ({counts}, provider {settings.provider})", flush=True)


async def _drain(settings: Settings, episodes: EpisodeTable, stop: _Stop) -> None:
    """New episodes are refused; live ones may end, then calls in progress; then every remaining episode is closed."""
    episodes.pool.drain()
    log.info("draining: %d episodes, %d calls in progress", len(episodes), episodes.num_calls)
    if not await _are_none_left(lambda: episodes.num_open, lambda: stop.episodes_end_at, stop):
        log.info("%d episodes did not end in time", episodes.num_open)
    calls_end_at = time.monotonic() + settings.drain_timeout_s
    if not await _are_none_left(lambda: episodes.num_calls, lambda: calls_end_at, stop):
        log.warning("%d calls did not finish within %g s", episodes.num_calls, settings.drain_timeout_s)
    await episodes.close_all("the env server is shutting down")


async def _are_none_left(count: Callable[[], int], end: Callable[[], float], stop: _Stop) -> bool:
    """Whether the count reaches 0 before `end()`, which may become earlier meanwhile, and before a second signal."""

    async def none_left() -> None:
        while count() and time.monotonic() < end():  # noqa: ASYNC110 - a program that ends polls
            await asyncio.sleep(DRAIN_POLL_S)

    return await _finishes_before(stop.hurried, none_left()) and not count()


def _server(app: ASGIApp, limits: ConnectionLimits) -> "_Server":
    return _Server(bounded_config(app, limits, shutdown_grace_s=SHUTDOWN_GRACE_S))


def connection_limits(settings: Settings) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=settings.max_connections,
        slow_client_s=settings.slow_client_s,
        keep_alive_s=settings.keep_alive_s,
    )


class _Server(uvicorn.Server):
    """uvicorn's own signal handlers would raise the signal again after the shutdown, before the pool is closed."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _first_of(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raises the error of the first one to end; cancels none."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _finishes_before(stop: asyncio.Event, work: Awaitable[None]) -> bool:
    """False if `stop` came first; the work is cancelled then. Raises the error of the work."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        await working
        return True
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def bind(settings: Settings, port: int | None = None) -> socket.socket:
    """Binds the port before the desktops start, so that a port in use is detected at once; the server listens on it
    only after the pool has started.

    Raises:
        SettingsError: the port is in use, or may not be bound.
    """
    remedy = "choose another --port, or 0 for any" if port is None else "choose other --osgym-ports"
    port = settings.port if port is None else port
    try:
        return listen_on(settings.host, port)
    except OSError as error:
        raise SettingsError(f"cannot listen on {settings.host}:{port} ({error.strerror}); {remedy}") from error

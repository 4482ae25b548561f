"""The FastAPI application over a running pool: routes, guard, error answers and the idle reaper."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

from fastapi import FastAPI

from env_server.api.areal import areal_router
from env_server.api.faults import add_fault_answers
from env_server.api.guard import OPEN_PATHS, Guard, log_access
from env_server.api.osgym.routes import osgym_app
from env_server.api.probes import probes_router
from env_server.api.slime import slime_router
from env_server.api.status import status_router
from env_server.api.v1.routes import own_router
from env_server.driving.driver import Drivers
from env_server.episodes.table import EpisodeTable
from env_server.metrics import Metrics, Passed
from env_server.replicas.pool import Pool
from env_server.settings import Settings
from osworld_pipeline.wire.bodies import BodyLimits
from osworld_pipeline.wire.tracing import add_past_span

DESCRIPTION = """Desktops for OSWorld tasks, as episodes: open, step, evaluate, close. A failure is a 4xx or 5xx with a
message and its `fault`; a fault is never a reward."""


def create_app(pool: Pool, settings: Settings, drivers: Drivers, *, drain: Callable[[float], float]) -> FastAPI:
    """The caller starts and closes the pool; the drivers are closed with the application. The application's state holds
    the table of `episodes` and the `metrics`, for callers that serve more ports over them. `drain` ends the server as
    SIGTERM does, but live episodes get the given seconds. It returns the seconds that they have: fewer if an earlier
    deadline is set."""
    metrics = Metrics()

    def on_timing(part: str, seconds: float) -> None:
        metrics.timed(part, seconds)
        add_past_span(part, seconds)

    episodes = EpisodeTable(pool, settings, drivers, on_end=metrics.ended, on_timing=on_timing)
    pool.on_wait = partial(on_timing, "queue")
    metrics.watch(episodes)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reaper = asyncio.create_task(episodes.run_reaper())
        try:
            yield
        finally:
            reaper.cancel()
            with suppress(asyncio.CancelledError):
                await reaper
            await episodes.close_all("the env server is shutting down")
            await drivers.close()

    app = FastAPI(title="OSWorld env server", description=DESCRIPTION, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.episodes, app.state.metrics = episodes, metrics
    app.include_router(own_router(episodes, settings, drain))
    app.include_router(slime_router(episodes))
    app.include_router(areal_router(episodes, idle_ttl_s=settings.idle_ttl_s))
    app.include_router(status_router(episodes, settings))
    app.include_router(probes_router(episodes, metrics))
    app.mount("/osgym", osgym_app(episodes, settings, on_fault=metrics.failed))
    add_fault_answers(app, retry_after_s=pool.retry_after_s, on_fault=metrics.failed)

    def on_pass(passed: Passed) -> None:
        metrics.passed(passed)
        if settings.access_log:
            log_access(passed)

    app.add_middleware(
        Guard,
        token=settings.token.get_secret_value() if settings.token else None,
        body=BodyLimits(max_bytes=settings.max_body_bytes, slow_client_s=settings.slow_client_s),
        open_paths=(*OPEN_PATHS, "/metrics") if settings.open_metrics else OPEN_PATHS,
        on_pass=on_pass,
    )
    return app

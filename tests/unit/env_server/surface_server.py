"""The surfaces over desktops in memory, for clients of several addresses and OSGym workers of several ports."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
from fake_desktops import FakeDesktop, FakeProvider, fake_pool
from starlette.types import ASGIApp

from env_server.api.osgym.routes import create_osgym_app
from env_server.api.osgym.worker import OsgymWorker
from env_server.app import create_app
from env_server.episodes.table import EpisodeTable
from env_server.main import make_drivers
from env_server.replicas.pool import Pool
from env_server.server_settings import ServerSettings

COMMAND = "cat /tmp/answer"
TASK: dict[str, Any] = {
    "id": "t1",
    "instruction": "Write yes.",
    "config": [],
    "evaluator": {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": COMMAND, "shell": True},
        "expected": {"type": "rule", "rules": {"expected": "yes\n"}},
    },
}
INFEASIBLE: dict[str, Any] = {**TASK, "evaluator": {"func": "infeasible"}}
CRASHING: dict[str, Any] = {
    **TASK,
    "evaluator": {"func": "check_text_enlarged", "result": TASK["evaluator"]["result"]},
}


def write_yes(desktop: FakeDesktop) -> None:
    desktop.commands[COMMAND] = (200, {"status": "success", "output": "yes\n", "error": "", "returncode": 0})


class Surfaces:
    def __init__(self, pool: Pool, provider: FakeProvider, episodes: EpisodeTable, app: ASGIApp | None) -> None:
        self.pool, self.provider, self.episodes, self.app = pool, provider, episodes, app
        self._stack = AsyncExitStack()

    @property
    def desktop(self) -> FakeDesktop:
        """The latest desktop."""
        return self.provider.desktops[-1]

    async def client(self, app: ASGIApp | None = None, address: str = "127.0.0.1") -> httpx.AsyncClient:
        """Connects from `address` to the main port, or to another application."""
        app = app or self.app
        assert app is not None, "say has_main_port"
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False, client=(address, 40_000))
        return await self._stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://localhost")
        )

    def worker(self, name: str = "port 1", **options: Any) -> OsgymWorker:
        options = {"pause_s": 0.0, "queue_timeout_s": 0.1, **options}
        return OsgymWorker(self.episodes, name=name, **options)

    def osgym(self, worker: OsgymWorker | None = None, **options: Any) -> ASGIApp:
        options = {"failure_pace_s": 0.0, "retry_after_s": lambda: 2, **options}
        return create_osgym_app(worker or self.worker(), **options)

    async def close(self) -> None:
        await self._stack.aclose()


@asynccontextmanager
async def surfaces(
    num_replicas: int = 1, *, has_main_port: bool = False, environment: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[Surfaces]:
    """The main port's application is optional: creating it takes a tenth of a second, and many tests do not need it."""
    provider = FakeProvider()
    pool = fake_pool(provider, num_replicas, queue_timeout_s=0.3)
    settings = ServerSettings.from_environment(environment or {}, **options)
    drivers = make_drivers(settings)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        await pool.start()
        if has_main_port:
            app = create_app(pool, settings, drivers, drain=lambda limit_s: limit_s)
            await stack.enter_async_context(app.router.lifespan_context(app))
            served = Surfaces(pool, provider, app.state.episodes, app)
        else:
            episodes = EpisodeTable(pool, settings, drivers)
            stack.push_async_callback(drivers.close)
            stack.push_async_callback(episodes.close_all, "the test is over")
            served = Surfaces(pool, provider, episodes, None)
        stack.push_async_callback(served.close)
        yield served

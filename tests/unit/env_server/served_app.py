"""The application over desktops in memory, called through an HTTP client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fake_desktops import FakeProvider, fake_pool
from fastapi import FastAPI
from surface_server import TASK

from env_server.app import create_app
from env_server.main import make_drivers
from env_server.replicas.pool import Pool
from env_server.server_settings import ServerSettings


class Server:
    def __init__(self, http: httpx.AsyncClient, pool: Pool, provider: FakeProvider, app: FastAPI) -> None:
        self.http, self.pool, self.provider, self.app = http, pool, provider, app

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def reset(self, task: dict[str, Any] | None = None, **body: Any) -> str:
        answer = await self.post("/reset", task_config=task or TASK, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["episode_id"]


@asynccontextmanager
async def serving(num_replicas: int = 1, *, queue_timeout_s: float = 0.05, **options: Any) -> AsyncIterator[Server]:
    provider = FakeProvider()
    pool = fake_pool(provider, num_replicas, queue_timeout_s=queue_timeout_s)
    settings = ServerSettings.from_environment(options.pop("environment", {}), **options)
    app = create_app(pool, settings, make_drivers(settings), drain=lambda limit_s: limit_s)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    try:
        await pool.start()
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        ):
            yield Server(http, pool, provider, app)
    finally:
        await pool.close()


def fault(answer: httpx.Response) -> tuple[int, str]:
    assert isinstance(answer.json()["error"], str)
    return answer.status_code, answer.json()["fault"]

"""Both ends of a gateway without a network: accelerated time, the reference gateway over desktops in memory, and a
client that a test scripts."""

import asyncio
import io
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fake_desktops import FakeDesktop, FakeProvider
from PIL import Image

from env_server.gateway_server.app import create_gateway
from env_server.gateway_server.faults import Faults, FaultShares
from env_server.gateway_server.sandboxes import SandboxTable
from env_server.providers.gateway.client import ClientOptions, Sandbox, SandboxAnswer, SandboxRequest
from env_server.providers.gateway.https_client import HttpsSandboxClient
from env_server.providers.gateway.provider import GatewayProvider
from env_server.providers.gateway.retry_policy import RetryPolicy
from env_server.providers.gateway.settings import GatewaySettings

SCREEN = (64, 48)
TOKEN = "a-secret-token"
URL = "https://gateway.test"
HURRY = 200.0
"""Seconds of the tests' clock in one of ours."""


def hurried(**options: Any) -> RetryPolicy:
    return RetryPolicy(
        clock=lambda: HURRY * time.monotonic(), sleep=lambda seconds: asyncio.sleep(seconds / HURRY), **options
    )


def picture(size: tuple[int, int] = SCREEN) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (10, 60, 120)).save(buffer, "PNG")
    return buffer.getvalue()


class Gateway:
    """The reference gateway, and an HTTP client of it that has the token."""

    def __init__(self, desktops: FakeProvider, table: SandboxTable, faults: Faults, transport: Any) -> None:
        self.desktops, self.table, self.faults, self.transport = desktops, table, faults, transport
        self.http = httpx.AsyncClient(
            base_url=URL, transport=transport, headers={"Authorization": f"Bearer {TOKEN}"}
        )  # fmt: skip
        self.seen: list[httpx.Request] = []

    def client(self) -> HttpsSandboxClient:
        return HttpsSandboxClient(ClientOptions(url=URL, token=TOKEN), transport=self.transport)

    def provider(self, retry_policy: RetryPolicy | None = None, **settings: Any) -> GatewayProvider:
        made = GatewaySettings(url=URL, **settings)
        return GatewayProvider(made, screen_size=SCREEN, client=self.client(), retry_policy=retry_policy or hurried())

    @property
    def last(self) -> FakeDesktop:
        return self.desktops.desktops[-1]

    @property
    def num_running(self) -> int:
        return sum(not desktop.is_stopped for desktop in self.desktops.desktops)


@asynccontextmanager
async def gateway(
    *,
    quota: int = 2,
    lifetime_s: float = 300.0,
    retry_after_s: float = 1.0,
    faults: str = "",
    prepare: Callable[[FakeDesktop], None] = lambda desktop: None,
) -> AsyncIterator[Gateway]:
    desktops = FakeProvider()

    def prepared(desktop: FakeDesktop) -> None:
        desktop.pictures["png"] = picture()
        prepare(desktop)

    desktops.prepare = prepared
    made = Faults(FaultShares.read(faults), seed=1)
    table = SandboxTable(desktops, quota=quota, lifetime_s=lifetime_s, connect=lambda guest: guest._http)
    app = create_gateway(table, token=TOKEN, retry_after_s=retry_after_s, faults=made)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app):
        there = Gateway(desktops, table, made, transport)
        try:
            yield there
        finally:
            await there.http.aclose()


class ScriptedClient:
    """`errors` are raised by the next calls, one each; a call whose entry is None succeeds."""

    def __init__(self, *errors: Exception | None, keeps_answers: bool = False) -> None:
        self.errors = list(errors)
        self.keeps_answers = keeps_answers
        self.calls: list[str] = []
        self.request_ids: list[str] = []
        self.stopped: list[str] = []
        self.lifetime_s: float | None = None
        self.on_start: asyncio.Event | None = None
        self.size = SCREEN
        self.limits: dict[str, list[float]] = {}
        """How long each call was allowed to take, by its name."""
        self.answers: dict[str, bytes] = {}
        """What the guest answers at a path; success elsewhere."""

    async def start(self, request_id: str, *, limit_s: float) -> Sandbox:
        self._meet("start", request_id, limit_s)
        if self.on_start is not None:
            await self.on_start.wait()
        return Sandbox(sandbox_id=f"sb-{len(self.calls)}", session_id="s", lifetime_s=self.lifetime_s)

    async def stop(self, sandbox: Sandbox, *, limit_s: float) -> None:
        self._meet("stop", "", limit_s)
        self.stopped.append(sandbox.sandbox_id)

    async def refresh(self, sandbox: Sandbox, *, limit_s: float) -> Sandbox:
        self._meet("refresh", "", limit_s)
        return sandbox

    async def request(self, sandbox: Sandbox, request: SandboxRequest, *, limit_s: float) -> SandboxAnswer:
        self._meet(request.path, request.request_id, limit_s)
        if request.path in self.answers:
            return SandboxAnswer(status=200, content_type="application/octet-stream", body=self.answers[request.path])
        if request.path == "/screenshot":
            return SandboxAnswer(status=200, content_type="image/png", body=picture(self.size))
        return SandboxAnswer(status=200, content_type="application/json", body=b'{"status": "success"}')

    async def close(self) -> None:
        self.calls.append("close")

    def _meet(self, call: str, request_id: str, limit_s: float) -> None:
        self.calls.append(call)
        self.limits.setdefault(call, []).append(limit_s)
        self.request_ids.append(request_id)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error

"""The sandboxes of a gateway: within a quota, each with a lifetime that its client extends, and calls that are executed
once, however often they are sent."""

import asyncio
import hmac
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import httpx

from env_server.guest_client import GuestClient
from env_server.protocols import ProvidedDesktop, Provider
from osworld_pipeline.errors import PipelineError

log = logging.getLogger(__name__)

START_LIMIT_S = 300.0
STOP_LIMIT_S = 30.0
MAX_KEPT_ANSWERS = 64
"""Limit of each sandbox; its client's calls are sequential."""
MAX_KEPT_STARTS = 4096

Connect = Callable[[GuestClient], httpx.AsyncClient]
T = TypeVar("T")


class QuotaError(PipelineError):
    """The quota of sandboxes is used up."""


class GoneError(PipelineError):
    """There is no such sandbox, it died, or it belongs to another session."""


@dataclass(frozen=True, kw_only=True)
class GuestAnswer:
    status: int
    content_type: str
    body: bytes


class OnceOnly(Generic[T]):
    """Runs named work once; a repeated request, even during the work, gets the same result. A failure is not kept."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._work: OrderedDict[str, asyncio.Task[T]] = OrderedDict()

    async def do(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """Cancelling a caller does not cancel the work. Work without a name runs each time."""
        if not name:
            return await work()
        task = self._work.get(name)
        if task is None:
            task = self._work[name] = asyncio.ensure_future(_as_task(work))
            task.add_done_callback(lambda done: self._forget_failure(name, done))
            while len(self._work) > self._max_kept and next(iter(self._work.values())).done():
                self._work.popitem(last=False)
        return await asyncio.shield(task)

    def _forget_failure(self, name: str, done: "asyncio.Task[T]") -> None:
        if done.cancelled() or done.exception() is not None:
            self._work.pop(name, None)

    async def close(self) -> None:
        for task in self._work.values():
            task.cancel()
        await asyncio.gather(*self._work.values(), return_exceptions=True)


async def _as_task(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


class HeldSandbox:
    """A desktop that a client holds."""

    def __init__(self, sandbox_id: str, desktop: ProvidedDesktop, http: httpx.AsyncClient) -> None:
        self.sandbox_id, self.desktop = sandbox_id, desktop
        self.session_id = secrets.token_urlsafe(16)
        self.used_at = time.monotonic()
        self.num_calls = 0
        """Calls in progress."""
        self._old_session_id = self.session_id
        self._http = http
        self._answers: OnceOnly[GuestAnswer] = OnceOnly(MAX_KEPT_ANSWERS)

    def check(self, session_id: str) -> None:
        """GoneError: it does not belong to this session."""
        known = (self.session_id, self._old_session_id)
        if not any(hmac.compare_digest(session_id.encode(), each.encode()) for each in known):
            raise GoneError(
                f"the sandbox {self.sandbox_id} belongs to another session; send its newest session id, "
                "or start another sandbox"
            )

    def renew(self, session_id: str) -> None:
        """Issues another session id. The previous one stays valid, for calls in progress and for a client that did not
        receive the new one."""
        self._old_session_id, self.session_id = session_id, secrets.token_urlsafe(16)
        self.used_at = time.monotonic()

    async def ask(
        self, method: str, target: str, *, body: bytes, content_type: str, request_id: str, limit_s: float
    ) -> GuestAnswer:
        """httpx.HTTPError: the guest did not answer."""

        async def send() -> GuestAnswer:
            headers = {"content-type": content_type} if content_type else {}
            async with asyncio.timeout(limit_s):
                answer = await self._http.request(method, target, content=body, headers=headers, timeout=limit_s)
            kind = answer.headers.get("content-type", "")
            return GuestAnswer(status=answer.status_code, content_type=kind, body=answer.content)

        self.num_calls += 1
        try:
            return await self._answers.do(request_id, send)
        finally:
            self.num_calls -= 1
            self.used_at = time.monotonic()

    async def stop(self) -> None:
        await self._answers.close()
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await self.desktop.stop()
        except (PipelineError, TimeoutError) as error:
            log.error("sandbox %s did not stop cleanly: %s", self.sandbox_id, error or "timeout")
        finally:
            await self._http.aclose()


class SandboxTable:
    """`connect` makes the HTTP client of a guest, which passes every status on."""

    def __init__(self, provider: Provider, *, quota: int, lifetime_s: float, connect: Connect | None = None) -> None:
        self.provider, self.quota, self.lifetime_s = provider, quota, lifetime_s
        self._connect = connect or raw_client
        self._held: dict[str, HeldSandbox] = {}
        self._num_starting = 0
        self._starts: OnceOnly[HeldSandbox] = OnceOnly(MAX_KEPT_STARTS)
        self._stops: set[asyncio.Task[None]] = set()
        self.num_started = self.num_refused = self.num_reaped = 0

    @property
    def num_taken(self) -> int:
        """Number of sandboxes that count towards the quota, including those that are starting or stopping."""
        return len(self._held) + self._num_starting + len(self._stops)

    async def start(self, request_id: str) -> HeldSandbox:
        """
        Raises:
            QuotaError: the quota is used up.
            ReplicaError, DependencyError: the desktop does not start.
            TimeoutError: it does not start within START_LIMIT_S.
        """
        return await self._starts.do(request_id, self._start)

    async def _start(self) -> HeldSandbox:
        if self.num_taken >= self.quota:
            self.num_refused += 1
            raise QuotaError(f"all {self.quota} sandboxes of the quota are in use; stop one, or retry later")
        sandbox_id = f"sb-{secrets.token_hex(8)}"
        self._num_starting += 1
        try:
            async with asyncio.timeout(START_LIMIT_S):
                desktop = await self.provider.start(sandbox_id)
            held = HeldSandbox(sandbox_id, desktop, self._connect(desktop.guest))
            self._held[sandbox_id] = held
            self.num_started += 1
            return held
        finally:
            self._num_starting -= 1

    def find(self, sandbox_id: str, session_id: str) -> HeldSandbox:
        """GoneError: there is no such sandbox, it died, or it belongs to another session."""
        held = self._held.get(sandbox_id)
        if held is None:
            raise GoneError(f"there is no sandbox {sandbox_id[:64]!r}; start another")
        held.check(session_id)
        if not held.desktop.is_alive():
            raise GoneError(f"the desktop of sandbox {sandbox_id} died; start another")
        return held

    async def stop(self, sandbox_id: str, session_id: str) -> None:
        """GoneError: there is no such sandbox, or it belongs to another session."""
        held = self._held.get(sandbox_id)
        if held is None:
            raise GoneError(f"there is no sandbox {sandbox_id[:64]!r}: it was stopped, or its lifetime ended")
        held.check(session_id)
        await asyncio.shield(self._let_go(sandbox_id))

    async def reap(self) -> int:
        """Stops sandboxes that were not refreshed or used for a lifetime, and those that died; returns how many."""
        now = time.monotonic()
        over = [
            held.sandbox_id
            for held in self._held.values()
            if not held.num_calls and (now - held.used_at > self.lifetime_s or not held.desktop.is_alive())
        ]
        for sandbox_id in over:
            log.warning("sandbox %s is stopped: it was not used for %g s, or it died", sandbox_id, self.lifetime_s)
            self.num_reaped += 1
            await self._let_go(sandbox_id)
        return len(over)

    async def run_reaper(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(min(5.0, self.lifetime_s / 4))
            await self.reap()

    async def close(self) -> None:
        """Stops all sandboxes."""
        await self._starts.close()
        await asyncio.gather(*(self._let_go(sandbox_id) for sandbox_id in list(self._held)))
        if self._stops:
            await asyncio.wait(set(self._stops), timeout=STOP_LIMIT_S)

    def _let_go(self, sandbox_id: str) -> "asyncio.Task[None]":
        held = self._held.pop(sandbox_id)
        stopping = asyncio.create_task(held.stop())
        self._stops.add(stopping)
        stopping.add_done_callback(self._stops.discard)
        return stopping


def raw_client(guest: GuestClient) -> httpx.AsyncClient:
    """Connects to a guest at its address, a Unix socket or plain HTTP."""
    if guest.address.startswith("unix:"):
        transport = httpx.AsyncHTTPTransport(uds=guest.address.removeprefix("unix:"), verify=False)
        return httpx.AsyncClient(base_url="http://guest", transport=transport, trust_env=False)
    return httpx.AsyncClient(base_url=guest.address, trust_env=False)

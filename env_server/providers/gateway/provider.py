"""The `gateway` provider: each desktop is a sandbox behind a gateway, new after each episode. A reset stops the old
sandbox before it requests a new one, so a replica that waits for quota has no sandbox."""

import asyncio
import contextlib
import hashlib
import logging
import tempfile
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from env_server.driving.images import size_of
from env_server.guest_client import GuestClient
from env_server.providers.gateway.client import (
    ClientOptions,
    Sandbox,
    SandboxBusyError,
    SandboxClient,
    SandboxFailedError,
    SandboxGoneError,
    SandboxRefusedError,
)
from env_server.providers.gateway.clients import load_client
from env_server.providers.gateway.guest_proxy import GuestProxy
from env_server.providers.gateway.retry_policy import QuotaGate, RetryPolicy
from env_server.providers.gateway.settings import GatewaySettings
from env_server.providers.gateway.transport import SandboxTransport
from osworld_pipeline.errors import DependencyError, ReplicaError

log = logging.getLogger(__name__)

STOP_LIMIT_S = 20.0
CALL_LIMIT_S = 15.0
"""Time limit of one refresh, and of one request for the first screenshot."""
READY_POLL_S = 0.25
REFRESH_S = 20.0
"""Longest interval between two refreshes of a sandbox; a short lifetime makes it shorter."""
UNREACHABLE_S = 90.0
"""If the gateway fails for this long, a sandbox of unknown lifetime counts as dead."""


class GatewayProvider:
    """`client` and `retry_policy` are replaced by tests."""

    name = "gateway"

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        token: str = "",
        screen_size: tuple[int, int] = (1920, 1080),
        client: SandboxClient | None = None,
        retry_policy: RetryPolicy | None = None,
    ) -> None:
        """
        Raises:
            ValueError: no address is configured, or the client rejects its options.
            DependencyError: there is no such client.
        """
        if not settings.url:
            raise ValueError("the provider gateway needs the gateway's address: --gateway-url https://HOST")
        options = ClientOptions(url=settings.url, token=token, ca_file=settings.ca_file, extra=settings.options)
        self.settings, self.screen_size = settings, screen_size
        self.client = client if client is not None else load_client(settings.client, options)
        self.retry_policy = retry_policy or RetryPolicy()
        self.gate = QuotaGate(self.retry_policy)
        self._digest: str | None = None
        self._sandbox_details = ""
        self._desktops: set[GatewayDesktop] = set()
        self._strays: set[asyncio.Task[None]] = set()

    @property
    def reset_timeout_s(self) -> float:
        settings = self.settings
        return STOP_LIMIT_S + settings.quota_wait_s + 2 * settings.start_timeout_s

    @property
    def image_digest(self) -> str:
        """The gateway's digest; if it reports none, a digest of its address."""
        return self._digest or hashlib.sha256(f"gateway {self.settings.client} {self._address}".encode()).hexdigest()

    @property
    def details(self) -> str:
        said = f", {self._sandbox_details}" if self._sandbox_details else ""
        return f"sandboxes of {self._address}, client {self.settings.client}{said}"

    @property
    def _address(self) -> str:
        parts = urlsplit(self.settings.url or "")
        return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)

    async def start(self, replica_id: str) -> "GatewayDesktop":
        desktop = GatewayDesktop(self, replica_id)
        self._desktops.add(desktop)
        try:
            await desktop.reset()
        except BaseException:
            await desktop.stop()
            raise
        return desktop

    async def close(self) -> None:
        desktops, self._desktops = self._desktops, set()
        await asyncio.gather(*(desktop.stop() for desktop in desktops))
        if self._strays:
            await asyncio.wait(set(self._strays), timeout=2 * STOP_LIMIT_S)
        await self.client.close()

    def forget(self, desktop: "GatewayDesktop") -> None:
        self._desktops.discard(desktop)

    async def obtain(self, replica_id: str) -> Sandbox:
        """A sandbox, once the quota has one.

        Raises:
            ReplicaError: none within the wait for quota, or the gateway failed.
            DependencyError: it refused permanently.
        """
        clock = self.retry_policy.clock
        deadline = clock() + self.settings.quota_wait_s
        request_id, attempt = uuid.uuid4().hex, 0
        refusal: SandboxBusyError | None = None
        while True:
            if not await self.gate.wait(deadline=deadline):
                raise ReplicaError(
                    f"no sandbox for {replica_id} within {self.settings.quota_wait_s:g} s"
                    f" ({refusal or 'the quota is used up'}); increase the quota, or start with fewer --replicas"
                ) from refusal
            try:
                sandbox = await self._start_surely(request_id)
            except SandboxBusyError as error:
                refusal = error
                log.info("%s waits for quota: %s", replica_id, error)
                self.gate.refused(error)
                continue
            except SandboxFailedError as error:
                if error.may_have_happened and not self.client.keeps_answers:
                    raise  # a second start could leave the first one's sandbox running
                await self.retry_policy.wait(
                    error, attempt, deadline=max(deadline, clock() + self.settings.start_timeout_s)
                )
                attempt += 1
                continue
            self.gate.granted()
            self._note(sandbox)
            return sandbox

    async def give_back(self, sandbox: Sandbox) -> None:
        """Stops the sandbox. A failure is logged, not raised: the sandbox then ends with its lifetime. The stop
        continues if the caller is cancelled."""
        stopping = asyncio.create_task(self._stop_surely(sandbox))
        self._strays.add(stopping)
        stopping.add_done_callback(self._strays.discard)
        await asyncio.shield(stopping)

    async def _start_surely(self, request_id: str) -> Sandbox:
        """If the caller is cancelled, the start runs to its end and its sandbox is stopped."""
        limit_s = self.settings.start_timeout_s
        starting = asyncio.create_task(self.client.start(request_id, limit_s=limit_s))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            stray = asyncio.create_task(self._stop_stray(starting))
            self._strays.add(stray)
            stray.add_done_callback(self._strays.discard)
            raise

    async def _stop_stray(self, starting: "asyncio.Task[Sandbox]") -> None:
        try:
            sandbox = await starting
        except (ReplicaError, DependencyError):
            return
        await self._stop_surely(sandbox)

    async def _stop_surely(self, sandbox: Sandbox) -> None:
        deadline, attempt = self.retry_policy.clock() + STOP_LIMIT_S, 0
        try:
            while True:
                left_s = max(0.1, deadline - self.retry_policy.clock())
                try:
                    await self.client.stop(sandbox, limit_s=left_s)
                    return
                except (SandboxBusyError, SandboxFailedError) as error:
                    await self.retry_policy.wait(error, attempt, deadline=deadline)
                    attempt += 1
        except SandboxGoneError:
            return
        except (ReplicaError, DependencyError) as error:
            log.error("sandbox %s was not stopped, and uses quota until its life ends: %s", sandbox.sandbox_id, error)

    def _note(self, sandbox: Sandbox) -> None:
        self._sandbox_details = sandbox.details
        if not sandbox.image_digest or sandbox.image_digest == self._digest:
            return
        if self._digest is not None:
            log.error(
                "the gateway's desktops have another image now (%.12s, before %.12s): scores from now on cannot be "
                "compared with earlier ones; restart the env server", sandbox.image_digest, self._digest,
            )  # fmt: skip
        self._digest = sandbox.image_digest


class GatewayDesktop:
    def __init__(self, provider: GatewayProvider, replica_id: str) -> None:
        self._provider, self._replica_id = provider, replica_id
        self._sandbox: Sandbox | None = None
        self._guest: GuestClient | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._proxy: GuestProxy | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._death: str | None = None
        self._is_stopped = False

    @property
    def guest(self) -> GuestClient:
        if self._guest is None:
            raise ReplicaError(f"the desktop {self._replica_id} is stopped; start another")
        return self._guest

    @property
    def sandbox(self) -> Sandbox:
        """The state at the last refresh. ReplicaError if there is none, or it is dead."""
        if self._sandbox is None or self._death is not None:
            raise SandboxGoneError(self._death or f"the desktop {self._replica_id} has no sandbox; start another")
        return self._sandbox

    async def reset(self) -> None:
        """Starts a new sandbox; the old one is stopped before that."""
        if self._is_stopped:
            raise ReplicaError(f"the desktop {self._replica_id} is stopped; start another")
        await self._let_go()
        sandbox = await self._provider.obtain(self._replica_id)
        if self._is_stopped:  # while this was waiting
            await self._provider.give_back(sandbox)
            raise ReplicaError(f"the desktop {self._replica_id} was stopped during its reset; start another")
        self._sandbox, self._death = sandbox, None
        await self._connect()
        self._keeper = asyncio.create_task(self._keep(), name=f"{self._replica_id} refresh")
        await self._wait_ready()

    def is_alive(self) -> bool:
        return self._sandbox is not None and self._death is None

    async def stop(self) -> None:
        self._is_stopped = True
        self._provider.forget(self)
        await self._let_go()

    async def _connect(self) -> None:
        provider = self._provider
        transport = SandboxTransport(
            provider.client, lambda: self.sandbox, retry_policy=provider.retry_policy, on_gone=self._die
        )
        # Only processes of this user can enter the folder; its socket is for graders with their own HTTP client.
        self._folder = tempfile.TemporaryDirectory(prefix="gateway-")
        socket = Path(self._folder.name) / "guest"
        self._proxy = GuestProxy(transport)
        await self._proxy.listen(socket)
        http = httpx.AsyncClient(base_url="http://guest", transport=transport)
        self._guest = GuestClient(http, name=self._replica_id, address=f"unix:{socket}")

    async def _wait_ready(self) -> None:
        """Returns when the guest has returned a screenshot."""
        limit_s, clock = self._provider.settings.start_timeout_s, self._provider.retry_policy.clock
        deadline = clock() + limit_s
        while True:
            try:
                image = await self.guest.screenshot(timeout_s=max(0.1, min(CALL_LIMIT_S, deadline - clock())))
                break
            except SandboxGoneError:
                raise
            except ReplicaError as error:
                if clock() + READY_POLL_S >= deadline:
                    raise ReplicaError(
                        f"the sandbox of {self._replica_id} returned no screenshot within {limit_s:g} s: {error}"
                    ) from error
                await self._provider.retry_policy.sleep(READY_POLL_S)
        size, wanted = await asyncio.to_thread(size_of, image), self._provider.screen_size
        if size != wanted:
            found = f"{size[0]}x{size[1]}"
            raise DependencyError(
                f"the gateway's screens are {found}, not {wanted[0]}x{wanted[1]}; start with --screen-size {found}"
            )

    async def _keep(self) -> None:
        """Refreshes the sandbox while it is held, and detects that it is dead."""
        provider = self._provider
        clock = provider.retry_policy.clock
        proven_at = clock()
        while self._sandbox is not None and self.is_alive():
            lifetime_s = self._sandbox.lifetime_s
            await provider.retry_policy.sleep(min(REFRESH_S, (lifetime_s or UNREACHABLE_S) / 4))
            try:
                self._sandbox = await provider.client.refresh(self.sandbox, limit_s=CALL_LIMIT_S)
                proven_at = clock()
            except (SandboxGoneError, SandboxRefusedError) as error:
                self._die(str(error))
                return
            except ReplicaError as error:
                if clock() - proven_at > (lifetime_s or UNREACHABLE_S):
                    self._die(f"the sandbox could not be refreshed for {clock() - proven_at:.0f} s: {error}")
                    return
                log.warning("%s was not refreshed: %s", self._replica_id, error)

    def _die(self, reason: str) -> None:
        if self._death is None:
            log.warning("the sandbox of %s is gone: %s", self._replica_id, reason)
            self._death = reason

    async def _let_go(self) -> None:
        """Releases everything that belongs to the sandbox. Idempotent."""
        keeper, self._keeper = self._keeper, None
        guest, self._guest = self._guest, None
        proxy, self._proxy = self._proxy, None
        folder, self._folder = self._folder, None
        sandbox, self._sandbox = self._sandbox, None
        try:
            if keeper is not None:
                keeper.cancel()
                with contextlib.suppress(asyncio.CancelledError, ReplicaError):
                    await keeper
            if proxy is not None:
                await proxy.close()
            if guest is not None:
                await guest.close()
        finally:
            if folder is not None:
                folder.cleanup()
            if sandbox is not None:
                await self._provider.give_back(sandbox)

"""Desktops for synchronous callers: the env client behind blocking calls, with its event loop in a separate thread."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.protocols import DesktopInfo
from osworld_pipeline.rollout.env_client import EnvClient, EnvTimeouts
from osworld_pipeline.rollout.http_desktop import HttpDesktop
from osworld_pipeline.wire import EnvConfig

Result = TypeVar("Result")
JOIN_S = 5.0


class WaitingDesktop:
    """One desktop at a time; each reset releases the previous one. Its calls raise the exceptions of
    `protocols.Desktop`."""

    def __init__(
        self,
        base_urls: str | Sequence[str],
        *,
        token: str | None = None,
        env_config: EnvConfig | None = None,
        timeouts: EnvTimeouts | None = None,
        client_id: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """The arguments are those of `EnvClient`. Connections and thread start with the first reset."""
        self._options: dict[str, Any] = {
            "token": token, "env_config": env_config, "timeouts": timeouts, "client_id": client_id,
            "transport": transport,
        }  # fmt: skip
        self._base_urls = base_urls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: EnvClient | None = None
        self._desktop: HttpDesktop | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def reset(self, task: Task) -> tuple[Observation, DesktopInfo]:
        self.give_back()
        if self._client is None:
            self._client = EnvClient(self._base_urls, **self._options)
        self._desktop = self._client.desktop()
        return self._run(self._desktop.reset(task))

    def act(self, command: str, *, pause_s: float) -> Observation:
        return self._run(self._live.act(command, pause_s=pause_s))

    def score(self) -> float:
        return self._run(self._live.score())

    def give_back(self) -> None:
        """Idempotent."""
        desktop, self._desktop = self._desktop, None
        if desktop is not None:
            self._run(desktop.close())

    def close(self) -> None:
        """Releases the desktop and ends the thread; idempotent. A later reset starts them again."""
        if self._loop is None or self._thread is None:
            return
        self.give_back()
        if self._client is not None:
            self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)
        self._loop = self._thread = self._client = None

    @property
    def _live(self) -> HttpDesktop:
        if self._desktop is None:
            raise EnvServerError("there is no desktop: call reset first")
        return self._desktop

    def _run(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Runs a call of the client in the event loop's thread. It needs no timeout here, because every call has
        its own time limits. If the wait is interrupted, the call is cancelled."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="env-client", daemon=True)
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()

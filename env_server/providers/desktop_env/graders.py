"""Grades with OSWorld's own code: its evaluate, metrics and getters, in a process of desktop-env's Python. The process
runs in a sandbox, where it reaches only the desktop's guest."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from env_server.driving.download import Downloader
from env_server.driving.guest_driver import TaskGrader
from env_server.evaluators.episode_cache import EpisodeCache
from env_server.guest_client import GuestClient
from env_server.providers.desktop_env.cloud_files import check_cloud_files, fetch_cloud_files
from env_server.providers.desktop_env.driver import reward_of
from env_server.providers.desktop_env.grader_sandbox import ExcessError, GraderLimits, GraderSandbox
from env_server.providers.desktop_env.install import DesktopEnvInstall
from env_server.providers.desktop_env.tasks import check_evaluator
from env_server.providers.desktop_env.workers import Launcher, WorkerSilentError
from env_server.providers.gateway.port_tunnel import forwarded_ports
from env_server.settings import TaskLimits
from env_server.tcp_forward import served, tcp_forward
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import DependencyError, EvaluatorError, ReplicaError
from osworld_pipeline.task_schema.verbs import CLIENT_PASSWORD

log = logging.getLogger("env_server")

MAX_AT_ONCE = 16
"""Gradings at a time; each is a separate process, and shares most of its memory with the others."""
GRADE_LIMIT_S = 3600.0
"""The task's own limit is shorter, and ends the grading by cancelling it."""
PUT_LIMIT_S = 60.0
PING_LIMIT_S = 10.0

Call = Callable[..., Awaitable[Mapping[str, Any]]]
Process = tuple[Call, Mapping[str, Any]]
"""The function that calls a grader's process, and the address where the process finds the guest."""


class OSWorldGraders:
    """`python` is the interpreter of the environment where desktop-env is installed; `with_ports` forwards the ports of
    a desktop's browser and VLC to getters that need them. `downloader` fetches the files that evaluators name by URL;
    its owner closes it. `allow_unsandboxed` applies if this machine allows no sandbox."""

    def __init__(
        self,
        *,
        python: Path,
        folder: Path = Path("var/desktops/desktop-env"),
        install: DesktopEnvInstall | None = None,
        with_ports: bool = False,
        downloader: Downloader | None = None,
        limits: GraderLimits | None = None,
        allow_unsandboxed: bool = False,
    ) -> None:
        """
        Raises:
            DependencyError: desktop-env is not installed, or no sandbox is possible here.
        """
        self.with_ports = with_ports
        self.downloader = downloader or Downloader(TaskLimits())
        self.install = install or DesktopEnvInstall.find(python)
        self.processes = _find_processes(self.install, limits, folder, allow_unsandboxed=allow_unsandboxed)
        self.slots = asyncio.Semaphore(MAX_AT_ONCE)

    @property
    def version(self) -> str:
        return self.install.name

    def read(self, task: Task) -> TaskGrader:
        check_evaluator(task, self.install, has_ports=self.with_ports)
        check_cloud_files(task, self.downloader.limits)
        self.processes.start()  # it loads while the episode runs
        return _OSWorldGrader(task=task, graders=self)

    async def close(self) -> None:
        await self.processes.close()


@dataclass(frozen=True, kw_only=True)
class _OSWorldGrader:
    task: Task
    graders: OSWorldGraders

    async def grade(self, guest: GuestClient, cache: EpisodeCache, *, last_action: str | None) -> float:
        await fetch_cloud_files(self.task, self.graders.downloader, cache)
        async with self.graders.slots:
            try:
                return await self._grade(guest, cache, last_action)
            except ExcessError as error:
                log.warning("the grader of task %s exceeds its limit of %s: scored 0", self.task.task_id, error)
                return 0.0
            except DependencyError as error:
                raise EvaluatorError(f"OSWorld's evaluators cannot be run: {error}") from error
            except WorkerSilentError as error:
                raise EvaluatorError(str(error)) from error
            except ReplicaError as error:
                # The grader's error does not show whether the desktop or the grader failed; the guest is asked.
                await guest.screenshot("jpeg", timeout_s=PING_LIMIT_S)
                raise EvaluatorError(f"the grading of task {self.task.task_id} was interrupted: {error}") from error

    async def _grade(self, guest: GuestClient, cache: EpisodeCache, last_action: str | None) -> float:
        graders = self.graders
        name = f"the grader of task {self.task.task_id}"
        async with graders.processes.process(guest, name=name, with_ports=graders.with_ports) as (call, address):
            for file in cache:
                await call("put", limit_s=PUT_LIMIT_S, name=file.name, blob=file.data)
            answer = await call(
                "grade",
                limit_s=GRADE_LIMIT_S,
                task=dict(self.task.config),
                last_action=last_action,
                password=CLIENT_PASSWORD,
                **address,
            )
        return reward_of(answer["score"])


class _Processes(Protocol):
    def start(self) -> None: ...

    def process(
        self, guest: GuestClient, *, name: str, with_ports: bool
    ) -> AbstractAsyncContextManager[Process, bool | None]:
        """A grader's process. It and all processes that it started have ended when the block is left, also by a
        cancellation."""
        ...

    async def close(self) -> None: ...


class _Sandboxed:
    def __init__(self, sandbox: GraderSandbox) -> None:
        self._sandbox = sandbox
        self.start, self.close = sandbox.start, sandbox.close

    @asynccontextmanager
    async def process(self, guest: GuestClient, *, name: str, with_ports: bool) -> AsyncIterator[Process]:
        async with self._sandbox.grader() as grader, AsyncExitStack() as stack:
            doors = dict(grader.doors)
            door = doors.pop("guest")
            host, port = door.getsockname()
            await stack.enter_async_context(served(guest, door))
            address: dict[str, Any] = {"host": host, "port": port}
            if with_ports:
                ports = await stack.enter_async_context(forwarded_ports(guest, listeners=doors))
                address |= {f"{name}_port": number for name, number in ports.items()}
            yield grader.call, address


class _Unsandboxed:
    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.start, self.close = launcher.start, launcher.close

    @asynccontextmanager
    async def process(self, guest: GuestClient, *, name: str, with_ports: bool) -> AsyncIterator[Process]:
        worker = await self._launcher.start_worker(name)

        async def call(*words: str, **arguments: Any) -> Mapping[str, Any]:
            return (await worker.call(*words, **arguments)).fields

        try:
            async with AsyncExitStack() as stack:
                host, port = await stack.enter_async_context(tcp_forward(guest))
                address: dict[str, Any] = {"host": host, "port": port}
                if with_ports:
                    ports = await stack.enter_async_context(forwarded_ports(guest))
                    address |= {f"{name}_port": number for name, number in ports.items()}
                yield call, address
        finally:
            await self._launcher.stop_worker(worker)


def _find_processes(
    install: DesktopEnvInstall, limits: GraderLimits | None, folder: Path, *, allow_unsandboxed: bool
) -> _Processes:
    try:
        return _Sandboxed(GraderSandbox(install, limits))
    except DependencyError as error:
        if not allow_unsandboxed:
            raise DependencyError(
                f"OSWorld's graders cannot be sandboxed: {error}; or run them with your permissions and network with "
                "--allow-unsandboxed-graders"
            ) from error
        log.warning("OSWORLD'S GRADERS WITHOUT A SANDBOX: they run with your permissions and the network (%s)", error)
        return _Unsandboxed(Launcher(install, folder=folder))

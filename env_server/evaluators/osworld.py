"""Grades by OSWorld itself: its evaluate, metrics and getters, in a process of desktop-env's Python that reaches the
desktop's guest through a port lent for the time of the grading."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env_server.evaluators.result_file import EpisodeCache
from env_server.exposed import exposed
from env_server.guest_client import GuestClient
from env_server.guest_driver import TaskGrader
from env_server.providers.desktop_env.driver import reward_of
from env_server.providers.desktop_env.install import DesktopEnvInstall
from env_server.providers.desktop_env.tasks import check_evaluator
from env_server.providers.desktop_env.workers import Launcher, Worker, WorkerSilentError
from env_server.providers.gateway.port_tunnel import lent_ports
from env_server.setup import CLIENT_PASSWORD
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import DependencyError, EvaluatorError, ReplicaError

MAX_AT_ONCE = 16
"""Gradings; each is a process of its own, and shares most of its memory with the others."""
GRADE_LIMIT_S = 3600.0
"""The task's own limit is shorter, and ends the grading by cancelling it."""
PUT_LIMIT_S = 60.0
PING_LIMIT_S = 10.0


class OSWorldGraders:
    """`python` is the interpreter of the environment where desktop-env is installed; `with_ports` has the ports of a
    desktop's browser and VLC lent to getters that reach into these."""

    def __init__(
        self,
        *,
        python: Path,
        folder: Path = Path("var/desktops/desktop-env"),
        install: DesktopEnvInstall | None = None,
        with_ports: bool = False,
    ) -> None:
        self.with_ports = with_ports
        self.install = install or DesktopEnvInstall.find(python)
        self.launcher = Launcher(self.install, folder=folder)
        self.slots = asyncio.Semaphore(MAX_AT_ONCE)

    @property
    def version(self) -> str:
        return self.install.name

    def read(self, task: Task) -> TaskGrader:
        check_evaluator(task, self.install, has_ports=self.with_ports)
        self.launcher.start()  # it loads while the episode goes on
        return _OSWorldGrader(task=task, graders=self)

    async def close(self) -> None:
        await self.launcher.close()


@dataclass(frozen=True, kw_only=True)
class _OSWorldGrader:
    task: Task
    graders: OSWorldGraders

    async def grade(self, guest: GuestClient, cache: EpisodeCache, *, last_action: str | None) -> float:
        async with self.graders.slots:
            try:
                worker = await self.graders.launcher.start_worker(f"the grader of task {self.task.task_id}")
            except (DependencyError, ReplicaError) as error:
                raise EvaluatorError(f"OSWorld's evaluators cannot be run: {error}") from error
            try:
                return await self._grade(worker, guest, cache, last_action)
            finally:
                # Ended whatever it is doing: a cancelled grading must not go on.
                await self.graders.launcher.stop_worker(worker)

    async def _grade(self, worker: Worker, guest: GuestClient, cache: EpisodeCache, last_action: str | None) -> float:
        try:
            for file in cache:
                await worker.call("put", limit_s=PUT_LIMIT_S, name=file.name, blob=file.data)
            async with AsyncExitStack() as stack:
                host, port = await stack.enter_async_context(exposed(guest))
                lent: dict[str, Any] = {}
                if self.graders.with_ports:
                    ports = await stack.enter_async_context(lent_ports(guest))
                    lent = {f"{name}_port": number for name, number in ports.items()}
                answer = await worker.call(
                    "grade",
                    limit_s=GRADE_LIMIT_S,
                    host=host,
                    port=port,
                    task=dict(self.task.config),
                    last_action=last_action,
                    password=CLIENT_PASSWORD,
                    **lent,
                )
        except WorkerSilentError as error:
            raise EvaluatorError(str(error)) from error
        except ReplicaError as error:
            # The worker's word for what may be the desktop's end or its own; only the guest can tell.
            await guest.screenshot("jpeg", timeout_s=PING_LIMIT_S)
            raise EvaluatorError(f"the grading of task {self.task.task_id} broke off: {error}") from error
        return reward_of(answer.fields["score"])

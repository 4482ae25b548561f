"""Drives a desktop with OSWorld's guest protocol: set-up verbs, input through the guest agent, and a grader."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from env_server.driving.download import Downloader
from env_server.driving.driver import EpisodeDriver, Plan, View
from env_server.driving.images import in_size
from env_server.driving.pyautogui_calls import MAX_ACTION_S, read_calls
from env_server.driving.settle import screen_digest, settle_by_looks, wait_until_calm
from env_server.driving.setup import run_verbs, setup_context
from env_server.evaluators.episode_cache import EpisodeCache, LargeChecks
from env_server.evaluators.grading import RunMetric, grade
from env_server.evaluators.metric_processes import MetricProcesses
from env_server.evaluators.version import GRADER_VERSION
from env_server.guest_client import GuestClient
from env_server.protocols import ProvidedDesktop
from env_server.settings import TaskLimits
from osworld_pipeline.domain.observation import Observation, Settle
from osworld_pipeline.domain.pyautogui import SPECIAL_ACTIONS
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EvaluatorError, ReplicaError, SetupError
from osworld_pipeline.task_schema.context import SetupContext
from osworld_pipeline.task_schema.reading import Grader, check_verbs, read_grader
from osworld_pipeline.task_schema.verbs import VERBS

ACT_MARGIN_S = 30.0


class TaskGrader(Protocol):
    """One task's grader, already validated."""

    async def grade(self, guest: GuestClient, cache: EpisodeCache, *, last_action: str | None) -> float:
        """The reward in 0..1. EvaluatorError if the grader crashed; ReplicaError if the desktop died."""
        ...


class Graders(Protocol):
    """The source of graders: our own metrics, or OSWorld's."""

    @property
    def version(self) -> str: ...

    def read(self, task: Task) -> TaskGrader:
        """TaskError if the task's evaluator cannot be run."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class _OwnGrader:
    grader: Grader
    run_metric: RunMetric

    async def grade(self, guest: GuestClient, cache: EpisodeCache, *, last_action: str | None) -> float:
        return await grade(self.grader, guest, cache, last_action=last_action, run_metric=self.run_metric)


class OwnGraders:
    """Our own metrics and getters (osworld_pipeline.task_schema)."""

    version = GRADER_VERSION

    def __init__(self) -> None:
        self._metrics = MetricProcesses()

    def read(self, task: Task) -> TaskGrader:
        grader = read_grader(task.task_id, task.config["evaluator"])
        return _OwnGrader(grader=grader, run_metric=self._metrics.run)

    async def close(self) -> None:
        await self._metrics.close()


class GuestDrivers:
    """Plans for desktops that have a guest agent."""

    def __init__(
        self, *, limits: TaskLimits, downloader: Downloader, screen: tuple[int, int], graders: Graders | None = None
    ) -> None:
        self.limits, self.downloader, self.screen = limits, downloader, screen
        self.graders: Graders = graders or OwnGraders()
        self.large_checks = LargeChecks()

    @property
    def grader_version(self) -> str:
        return self.graders.version

    def plan(self, task_config: Mapping[str, Any]) -> Plan:
        task = Task.from_config(task_config)
        return GuestPlan(
            task=task,
            config=check_verbs(task.task_id, task.config.get("config")),
            postconfig=check_verbs(task.task_id, task.config["evaluator"].get("postconfig")),
            grader=self.graders.read(task),
            drivers=self,
        )

    async def close(self) -> None:
        await self.graders.close()
        await self.downloader.close()


@dataclass(frozen=True, kw_only=True)
class GuestPlan:
    task: Task
    config: tuple[Mapping[str, Any], ...]
    postconfig: tuple[Mapping[str, Any], ...]
    grader: TaskGrader
    drivers: GuestDrivers

    def drive(self, desktop: ProvidedDesktop) -> EpisodeDriver:
        return GuestDriver(self, desktop)


class GuestDriver:
    def __init__(self, plan: GuestPlan, desktop: ProvidedDesktop) -> None:
        self._plan, self._desktop = plan, desktop
        self._limits = plan.drivers.limits
        self._cache = EpisodeCache(plan.drivers.large_checks)

    async def prepare(self) -> None:
        limit_s = self._limits.setup_timeout_s
        guest = self._desktop.guest
        try:
            async with asyncio.timeout(limit_s):
                opens_window = any(VERBS[verb["type"]].opens_window for verb in self._plan.config)
                before = await screen_digest(guest) if opens_window else None
                await run_verbs(self._plan.config, self._context(guest))
                await wait_until_calm(guest, before=before)
        except TimeoutError as error:
            raise SetupError(
                f"the set-up of task {self._plan.task.task_id} took more than {limit_s:g} s; shorten its config"
            ) from error

    async def act(self, action: str, *, pause_s: float, settle: Settle) -> None:
        calls = () if action in SPECIAL_ACTIONS else read_calls(action)
        guest, timeout_s = self._desktop.guest, MAX_ACTION_S + ACT_MARGIN_S
        if action == "WAIT":
            await asyncio.sleep(pause_s)
        if settle == "adaptive":
            if not await guest.act(calls, settle_s=pause_s, timeout_s=timeout_s):
                await settle_by_looks(guest.screenshot, limit_s=pause_s)
            return
        if calls:
            await guest.act(calls, timeout_s=timeout_s)
        await asyncio.sleep(pause_s)

    async def observe(self, view: View) -> Observation:
        guest = self._desktop.guest
        screenshot, tree, terminal = await asyncio.gather(
            guest.screenshot(view.image_format, quality=view.image_quality, size=view.image_size),
            guest.accessibility() if view.with_accessibility_tree else _nothing(),
            guest.terminal() if view.with_terminal else _nothing(),
        )
        seen = Observation(
            screenshot=screenshot,
            image_format=format_of(screenshot),
            accessibility_tree=tree,
            terminal=terminal,
            instruction=self._plan.task.instruction,
        )
        return await in_size(seen, view, screen=self._plan.drivers.screen)

    async def evaluate(self, *, last_action: str | None) -> float:
        limit_s, task_id = self._limits.evaluate_timeout_s, self._plan.task.task_id
        guest = self._desktop.guest
        try:
            async with asyncio.timeout(limit_s):
                await run_verbs(self._plan.postconfig, self._context(guest), is_before_grading=True)
                reward = await self._plan.grader.grade(guest, self._cache, last_action=last_action)
                if reward < 1.0:
                    # A desktop that died during grading looks like one on which nothing was done, so a score below 1
                    # counts only if the desktop is still alive.
                    await guest.platform()
                return reward
        except TimeoutError as error:
            raise EvaluatorError(f"grading task {task_id} took more than {limit_s:g} s") from error
        except SetupError as error:
            raise EvaluatorError(f"grading task {task_id} could not start: {error}") from error

    async def close(self) -> None:
        """The driver holds no resources."""

    def _context(self, guest: GuestClient) -> SetupContext:
        drivers = self._plan.drivers
        return setup_context(guest, self._cache, drivers.downloader, limits=self._limits, screen=drivers.screen)


async def _nothing() -> None:
    return None


def format_of(image: bytes) -> str:
    """The format by content: a foreign guest returns PNG for every requested format. ReplicaError if it is not an
    image."""
    if image.startswith(b"\xff\xd8"):
        return "jpeg"
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "webp"
    if image.startswith(b"\x89PNG"):
        return "png"
    raise ReplicaError("the guest's screenshot is neither PNG, JPEG nor WebP; replace the replica")

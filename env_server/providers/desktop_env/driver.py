"""Runs episodes on DesktopEnv's own loop: its set-up, its input, its observation and its grading."""

import asyncio
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env_server.driving.driver import EpisodeDriver, Plan, View
from env_server.driving.guest_driver import format_of
from env_server.driving.images import in_size
from env_server.driving.pyautogui_calls import MAX_ACTION_S
from env_server.driving.settle import settle_by_looks
from env_server.protocols import ProvidedDesktop
from env_server.providers.desktop_env.actions import source_of
from env_server.providers.desktop_env.cloud_files import check_cloud_files
from env_server.providers.desktop_env.install import DesktopEnvInstall
from env_server.providers.desktop_env.provider import DesktopEnvDesktop
from env_server.providers.desktop_env.tasks import check_evaluator, harmless_task
from env_server.providers.desktop_env.workers import Answer, WorkerSilentError
from env_server.settings import TaskLimits
from osworld_pipeline.domain.observation import Observation, Settle
from osworld_pipeline.domain.pictures import open_picture
from osworld_pipeline.domain.pyautogui import SPECIAL_ACTIONS
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EvaluatorError

ACT_MARGIN_S = 60.0
OBSERVE_LIMIT_S = 120.0
"""DesktopEnv's controller tries each part three times, with 10 s each."""
DEFAULT_QUALITY = 90


class DesktopEnvDrivers:
    """Plans for desktops of a DesktopEnvProvider."""

    def __init__(self, *, python: Path, limits: TaskLimits, install: DesktopEnvInstall | None = None) -> None:
        self.install = install or DesktopEnvInstall.find(python)
        self.limits = limits

    @property
    def grader_version(self) -> str:
        return self.install.name

    def plan(self, task_config: Mapping[str, Any]) -> Plan:
        task = Task.from_config(task_config)
        check_evaluator(task, self.install, has_ports=True)
        check_cloud_files(task, self.limits)
        return DesktopEnvPlan(task=task, config=harmless_task(task, self.install, self.limits), limits=self.limits)

    async def close(self) -> None:
        """Holds no resources; the workers belong to the provider."""


@dataclass(frozen=True, kw_only=True)
class DesktopEnvPlan:
    task: Task
    config: Mapping[str, Any]
    limits: TaskLimits

    def drive(self, desktop: ProvidedDesktop) -> EpisodeDriver:
        assert isinstance(desktop, DesktopEnvDesktop), "these drivers need that provider"
        return DesktopEnvDriver(self, desktop)


class DesktopEnvDriver:
    def __init__(self, plan: DesktopEnvPlan, desktop: DesktopEnvDesktop) -> None:
        self._plan, self._desktop = plan, desktop

    async def prepare(self) -> None:
        limit_s = self._plan.limits.setup_timeout_s
        await self._desktop.moved(
            await self._desktop.worker.call("prepare", limit_s=limit_s, task=dict(self._plan.config))
        )

    async def act(self, action: str, *, pause_s: float, settle: Settle) -> None:
        source = action if action in SPECIAL_ACTIONS else source_of(action)
        limit_s = MAX_ACTION_S + 2 * pause_s + ACT_MARGIN_S
        is_fixed = settle == "fixed"
        own_pause_s = pause_s if is_fixed else 0.0
        await self._desktop.worker.call("act", limit_s=limit_s, action=source, pause_s=own_pause_s)
        if is_fixed:
            return
        if action == "WAIT":
            await asyncio.sleep(pause_s)
        await settle_by_looks(self._screenshot, limit_s=pause_s)

    async def observe(self, view: View) -> Observation:
        seen = await self._look(with_tree=view.with_accessibility_tree, with_terminal=view.with_terminal)
        screenshot = await asyncio.to_thread(transcode, seen.blob, view)
        observation = Observation(
            screenshot=screenshot,
            image_format=format_of(screenshot),
            accessibility_tree=seen.fields["tree"],
            terminal=seen.fields["terminal"],
            instruction=self._plan.task.instruction,
        )
        return await in_size(observation, view, screen=None)

    async def evaluate(self, *, last_action: str | None) -> float:
        """`last_action` is unused: DesktopEnv records the actions itself."""
        limit_s = self._plan.limits.evaluate_timeout_s
        try:
            answer = await self._desktop.worker.call("evaluate", limit_s=limit_s)
        except WorkerSilentError as error:
            raise EvaluatorError(f"grading task {self._plan.task.task_id} took more than {limit_s:g} s") from error
        return reward_of(answer.fields["score"])

    async def close(self) -> None:
        """Holds no resources."""

    async def _look(self, *, with_tree: bool, with_terminal: bool) -> Answer:
        return await self._desktop.worker.call(
            "observe", limit_s=OBSERVE_LIMIT_S, with_tree=with_tree, with_terminal=with_terminal
        )

    async def _screenshot(self) -> bytes:
        return (await self._look(with_tree=False, with_terminal=False)).blob


def reward_of(score: object) -> float:
    """EvaluatorError if it is not a number in 0..1."""
    if not isinstance(score, int | float) or not 0.0 <= score <= 1.0:
        raise EvaluatorError(f"OSWorld's evaluator returned {score!r}, which is not a score in 0..1")
    return float(score)


def transcode(image: bytes, view: View) -> bytes:
    """The screenshot in the requested format; an OSWorld VM returns only PNG."""
    if format_of(image) == view.image_format:
        return image
    buffer = io.BytesIO()
    with open_picture(image) as picture:
        options: dict[str, Any] = (
            {} if view.image_format == "png" else {"quality": view.image_quality or DEFAULT_QUALITY}
        )
        picture.convert("RGB").save(buffer, view.image_format.upper(), **options)
    return buffer.getvalue()

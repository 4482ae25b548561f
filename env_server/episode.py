"""One episode on one leased desktop: set up, observe, act, grade. Its calls run one at a time, and a desktop that dies
under one of them ends the lease at once, so that its replacement does not wait for the client."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from env_server.download import Downloader
from env_server.evaluators.grading import Grader, grade, read_grader
from env_server.evaluators.result_file import EpisodeCache
from env_server.guest_client import GuestClient
from env_server.pyautogui_calls import MAX_ACTION_S, read_calls
from env_server.replica import Lease
from env_server.settings import TaskLimits
from env_server.settle import screen_digest, wait_until_calm
from env_server.setup import OPENING_VERBS, SetupContext, check_verbs, run_verbs
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.pyautogui import SPECIAL_ACTIONS
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EvaluatorError, ReplicaError, SetupError, TaskError
from osworld_pipeline.wire import EnvConfig

ACT_MARGIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """A task as this server will carry it out; everything about it that can be refused has been."""

    task: Task
    config: tuple[Mapping[str, Any], ...]
    postconfig: tuple[Mapping[str, Any], ...]
    grader: Grader

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "TaskPlan":
        """
        Raises:
            TaskError: the task is malformed, or needs what this server does not have.
        """
        task = Task.from_config(config)
        evaluator = task.config["evaluator"]
        return cls(
            task=task,
            config=check_verbs(task.task_id, task.config.get("config")),
            postconfig=check_verbs(task.task_id, evaluator.get("postconfig")),
            grader=read_grader(task.task_id, evaluator),
        )


@dataclass(frozen=True, kw_only=True)
class StepResult:
    observation: Observation
    num_steps: int
    """With this one; refused actions do not count."""
    action: str

    @property
    def is_done(self) -> bool:
        return self.action in ("DONE", "FAIL")


class Episode:
    def __init__(
        self,
        *,
        episode_id: str,
        plan: TaskPlan,
        lease: Lease,
        env_config: EnvConfig,
        limits: TaskLimits,
        downloader: Downloader,
        screen: tuple[int, int],
    ) -> None:
        self.episode_id = episode_id
        self.plan = plan
        self.replica_id = lease.replica_id
        self.num_steps = 0
        self.last_action: str | None = None
        self.last_used_at = time.monotonic()
        self._lease, self._env_config, self._limits = lease, env_config, limits
        self._downloader, self._screen = downloader, screen
        self._cache = EpisodeCache()
        self._observation: Observation | None = None
        self._lock = asyncio.Lock()

    @property
    def is_busy(self) -> bool:
        return self._lock.locked()

    async def prepare(self) -> Observation:
        """Runs the task's set-up on the fresh desktop and looks at it when it stands still.

        Raises:
            SetupError: a verb failed, or all of them took too long.
            ReplicaError: the desktop died.
        """
        limit_s = self._limits.setup_timeout_s
        async with self._using() as guest:
            try:
                async with asyncio.timeout(limit_s):
                    opens_window = any(verb["type"] in OPENING_VERBS for verb in self.plan.config)
                    before = await screen_digest(guest) if opens_window else None
                    await run_verbs(self.plan.config, self._context(guest))
                    await wait_until_calm(guest, before=before)
            except TimeoutError as error:
                raise SetupError(
                    f"the set-up of task {self.plan.task.task_id} took more than {limit_s:g} s; shorten its config"
                ) from error
            return await self._observe(guest)

    async def step(self, action: str, *, pause_s: float) -> StepResult:
        """
        Raises:
            ActionParseError: the action was refused; nothing has happened, and it does not count as a step.
            ReplicaError: the desktop died.
        """
        action = action.strip()
        calls = () if action in SPECIAL_ACTIONS else read_calls(action)
        async with self._using() as guest:
            if calls:
                await guest.act(calls, timeout_s=MAX_ACTION_S + ACT_MARGIN_S)
            elif action == "WAIT":
                await asyncio.sleep(pause_s)
            self.last_action = action
            self.num_steps += 1
            await asyncio.sleep(pause_s)
            return StepResult(observation=await self._observe(guest), num_steps=self.num_steps, action=action)

    async def render(self) -> Observation:
        """The last observation, without asking the desktop."""
        self.last_used_at = time.monotonic()
        assert self._observation is not None, "an episode is in the table only after prepare"
        return self._observation

    async def evaluate(self) -> float:
        """The grader's reward in 0..1.

        Raises:
            EvaluatorError: the grader crashed, or took too long.
            ReplicaError: the desktop died.
        """
        limit_s = self._limits.evaluate_timeout_s
        async with self._using() as guest:
            try:
                async with asyncio.timeout(limit_s):
                    await run_verbs(self.plan.postconfig, self._context(guest), is_before_grading=True)
                    return await grade(self.plan.grader, guest, self._cache, last_action=self.last_action)
            except TimeoutError as error:
                raise EvaluatorError(f"grading task {self.plan.task.task_id} took more than {limit_s:g} s") from error
            except SetupError as error:
                raise EvaluatorError(f"grading task {self.plan.task.task_id} could not begin: {error}") from error

    @asynccontextmanager
    async def _using(self) -> AsyncIterator[GuestClient]:
        async with self._lock:
            self.last_used_at = time.monotonic()
            try:
                if self._lease.is_over:
                    raise ReplicaError(self._lease.failure or f"episode {self.episode_id} is closed")
                yield self._lease.desktop.guest
            except ReplicaError as error:
                self._lease.fail(str(error))
                raise
            finally:
                self.last_used_at = time.monotonic()

    async def _observe(self, guest: GuestClient) -> Observation:
        config = self._env_config
        screenshot, tree, terminal = await asyncio.gather(
            guest.screenshot(config.image_format),
            guest.accessibility() if config.require_a11y_tree else _nothing(),
            guest.terminal() if config.require_terminal else _nothing(),
        )
        self._observation = Observation(
            screenshot=screenshot,
            image_format=_format_of(screenshot),
            accessibility_tree=tree,
            terminal=terminal,
            instruction=self.plan.task.instruction,
        )
        return self._observation

    def _context(self, guest: GuestClient) -> SetupContext:
        return SetupContext(
            guest=guest, cache=self._cache, downloader=self._downloader, limits=self._limits, screen=self._screen
        )


async def _nothing() -> None:
    return None


def _format_of(image: bytes) -> str:
    """By content: a foreign guest answers PNG whatever was asked."""
    if image.startswith(b"\xff\xd8"):
        return "jpeg"
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "webp"
    if image.startswith(b"\x89PNG"):
        return "png"
    raise ReplicaError("the guest's screenshot is neither PNG, JPEG nor WebP; replace the replica")


def check_env_config(env_config: EnvConfig) -> None:
    """
    Raises:
        TaskError: it asks for a system or an action space that this server does not have.
    """
    if env_config.os_type.lower() not in ("ubuntu", "linux"):
        raise TaskError(f"this env server has Linux desktops, not {env_config.os_type!r}")
    if env_config.action_space != "pyautogui":
        raise TaskError(f"this env server knows the action space pyautogui, not {env_config.action_space!r}")

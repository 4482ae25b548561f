"""The interface between an episode and its implementation: our own guest protocol, or OSWorld's whole DesktopEnv.

An Episode counts steps, enforces order and stores answers; its driver operates the desktop."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from env_server.protocols import ProvidedDesktop
from osworld_pipeline.domain.observation import Observation, Settle
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import TaskError
from osworld_pipeline.wire import EnvConfig, ImageFormat


@dataclass(frozen=True, kw_only=True)
class View:
    """What an observation contains, and how its screenshot is encoded."""

    image_format: ImageFormat = "png"
    image_quality: int | None = None
    """1..100 for the lossy formats; None means the guest's default."""
    image_size: tuple[int, int] | None = None
    """(width, height); None means the screen's size."""
    with_accessibility_tree: bool = False
    with_terminal: bool = False

    @classmethod
    def of(cls, config: EnvConfig) -> "View":
        return cls(
            image_format=config.image_format,
            image_quality=config.image_quality,
            image_size=config.image_size,
            with_accessibility_tree=config.require_a11y_tree,
            with_terminal=config.require_terminal,
        )


class EpisodeDriver(Protocol):
    """Runs one task on one desktop; calls are sequential. A ReplicaError from any of them means that the desktop is
    lost."""

    async def prepare(self) -> None:
        """Runs the task's set-up on the fresh desktop; returns when the screen is still.

        Raises:
            SetupError: it could not be set up, or not in time.
            ReplicaError: the desktop died.
        """
        ...

    async def act(self, action: str, *, pause_s: float, settle: Settle) -> None:
        """Executes one stripped action, or WAIT, DONE or FAIL. Then the screen gets `pause_s` seconds to settle, or
        fewer if `settle` is adaptive and it has settled sooner. A WAIT itself takes `pause_s` in either case.

        Raises:
            ActionParseError: the action was refused and nothing was executed.
            ReplicaError: the desktop died.
        """
        ...

    async def observe(self, view: View) -> Observation: ...

    async def evaluate(self, *, last_action: str | None) -> float:
        """The grader's reward in 0..1.

        Raises:
            EvaluatorError: the grader crashed, or took too long.
            ReplicaError: the desktop died.
        """
        ...

    async def close(self) -> None:
        """Releases what the driver itself acquired, not the desktop. Idempotent."""
        ...


class Plan(Protocol):
    """A task as this server will run it, validated completely."""

    @property
    def task(self) -> Task: ...

    def drive(self, desktop: ProvidedDesktop) -> EpisodeDriver: ...


class Drivers(Protocol):
    """Reads tasks for one kind of desktop and one kind of grader."""

    @property
    def grader_version(self) -> str:
        """The name and version of the grader."""
        ...

    def plan(self, task_config: Mapping[str, Any]) -> Plan:
        """
        Raises:
            TaskError: the task is malformed, or needs what this server does not have.
        """
        ...

    async def close(self) -> None: ...


def check_env_config(env_config: EnvConfig) -> None:
    """
    Raises:
        TaskError: it requests an operating system or an action space that this server does not have.
    """
    if env_config.os_type.lower() not in ("ubuntu", "linux"):
        raise TaskError(f"this env server has Linux desktops, not {env_config.os_type!r}")
    if env_config.action_space != "pyautogui":
        raise TaskError(f"this env server supports the action space pyautogui, not {env_config.action_space!r}")
